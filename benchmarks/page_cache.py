"""The page cache's state for a case's own files, and how it got there.

*Cold*: dropped by ``POSIX_FADV_DONTNEED``. *Warm*: dropped, then read once sequentially in 16 MiB reads, so that all
warm files have one history: pages that were written or read in small pieces come back more slowly after they were
given up. A sample verifies the state by what it physically reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from measure import read_through

__all__ = ["PageCache", "drop"]


def drop(path: str) -> None:
    """Drop a file's pages from the page cache; dirty ones are written first, since they cannot be dropped."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@dataclass
class PageCache:
    """Puts files into the state that a sample is to start from; a file that is warm already is left alone."""

    _warm: set[str] = field(default_factory=set)

    def prepare(self, files: Iterable[str], state: str) -> None:
        """Make ``files`` ``"warm"`` or ``"cold"``."""
        for path in files:
            if state == "cold":
                drop(path)
                # A sample reads it by faults and in an order of its own; that is not the history of a warm file.
                self._warm.discard(path)
            elif path not in self._warm:
                drop(path)
                read_through(path)
                self._warm.add(path)

    def doubt(self, files: Iterable[str]) -> None:
        """A sample had to read what should have been warm: prepare these files anew for the next."""
        self._warm.difference_update(files)
