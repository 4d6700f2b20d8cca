"""The one place where platforms differ. Everything else asks here."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

__all__ = ["open_checked", "read_at"]

_Check = Callable[[os.stat_result, "str | None"], None]
_seek_lock = threading.Lock()


def open_checked(path: str, check: _Check, *, resolve: bool) -> int:
    """Open ``path`` for reading after ``check(stat, real_path)`` has accepted what it leads to.

    ``real_path`` is the path of the object that is opened, links resolved, or None unless ``resolve``. On Linux the
    object is held by an ``O_PATH`` descriptor from before the check until it is open, so nothing can be swapped in
    between, and nothing but an accepted object is ever opened for reading.
    """
    if sys.platform == "linux" and resolve:
        held = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            link = f"/proc/self/fd/{held}"
            check(os.fstat(held), os.readlink(link))
            return os.open(link, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(held)
    # O_NONBLOCK (no effect on regular files): a FIFO swapped in after the check does not block the process.
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    check(os.stat(path), os.path.realpath(path) if resolve else None)
    fd = os.open(path, flags)
    try:
        check(os.fstat(fd), os.path.realpath(path) if resolve else None)
    except BaseException:
        os.close(fd)
        raise
    return fd


if hasattr(os, "preadv"):

    def read_at(fd: int, buffer: memoryview, offset: int) -> int:
        """Read up to ``len(buffer)`` bytes at ``offset`` into ``buffer``; returns how many, 0 at the end."""
        return os.preadv(fd, [buffer], offset)

else:

    def read_at(fd: int, buffer: memoryview, offset: int) -> int:
        """Read up to ``len(buffer)`` bytes at ``offset`` into ``buffer``; returns how many, 0 at the end."""
        with _seek_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)
