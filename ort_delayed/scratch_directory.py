"""A directory for intermediate files beside a destination, gone afterwards; what a killed process left is removed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from types import TracebackType

from ort_delayed.loader import platform

__all__ = ["ScratchDirectory"]

_LOCK = "lock"


class ScratchDirectory:
    """``.NAME.<random>.packing`` beside a model called NAME, from entering a ``with`` block until it is left.

    It is held by a lock that ends with the process. Entering removes those of the same NAME that nobody holds.

    Args:
        directory: where it stands: on the destination's file system, which has room for what it is to hold.
        name: the destination's name.

    Attributes:
        path: the directory.
    """

    def __init__(self, directory: str, name: str) -> None:
        self._parent = directory
        self._stem = f".{name[:100]}."
        self.path = os.path.join(directory, f"{self._stem}{secrets.token_hex(6)}.packing")
        self._lock = -1

    def __enter__(self) -> ScratchDirectory:
        self._remove_abandoned()
        try:
            # Inside: an interrupt is raised as soon as the call in which it came has returned.
            os.mkdir(self.path)
            self._lock = os.open(os.path.join(self.path, _LOCK), os.O_RDWR | os.O_CREAT, 0o666)
            platform.hold_alone(self._lock)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._remove()
        except BaseException:  # an interrupt came in the middle of it
            self._remove()
            raise

    def file(self, name: str) -> str:
        """The path of a file in the directory."""
        return os.path.join(self.path, name)

    def _remove(self) -> None:
        # The lock goes first: where the process has no other descriptor left, its own is there to list the directory,
        # and Windows removes no file that is open.
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = os.listdir(self.path)
        # The file that was locked goes last: by it the next one finds a directory that was left.
        for name in sorted(names, key=lambda name: name == _LOCK):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.path, name))
        with contextlib.suppress(OSError):
            os.rmdir(self.path)

    def _remove_abandoned(self) -> None:
        pattern = re.compile(re.escape(self._stem) + r"[0-9a-f]{12}\.packing")
        for name in filter(pattern.fullmatch, os.listdir(self._parent)):
            path = os.path.join(self._parent, name)
            # Without its lock file it is just being made, or empty.
            with contextlib.suppress(OSError):
                lock = os.open(os.path.join(path, _LOCK), os.O_RDWR)
                try:
                    if platform.hold_alone(lock):
                        shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(lock)
