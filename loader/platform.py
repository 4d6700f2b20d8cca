"""The one place where platforms differ. Everything else asks here."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import sys
import threading
from collections.abc import Callable

__all__ = ["open_checked", "read_at"]
__all__ += [
    "give_back_pages",
    "peak_resident_bytes",
    "release_free_memory",
    "reset_peak_resident_bytes",
    "resident_bytes",
]

_Check = Callable[[os.stat_result, "str | None"], None]
_seek_lock = threading.Lock()
# O_NONBLOCK has no effect on regular files: a FIFO swapped in after the check does not block the process.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_checked(path: str, check: _Check, *, resolve: bool) -> int:
    """Open ``path`` for reading after ``check(stat, real_path)`` has accepted what it leads to.

    ``real_path`` is the path of the object that is opened, links resolved, or None unless ``resolve``. On Linux the
    object is held by an ``O_PATH`` descriptor from before the check until it is open, so nothing can be swapped in
    between, and nothing but an accepted object is ever opened for reading. Without ``resolve`` a regular file is
    accepted as it is, and ``check`` has to refuse everything else.
    """
    if sys.platform == "linux" and resolve:
        held = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            link = f"/proc/self/fd/{held}"
            check(os.fstat(held), os.readlink(link))
            return os.open(link, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(held)
    # This runs once per weight and run: what is a regular file takes no other call than these three.
    found = os.stat(path)
    if resolve or not stat.S_ISREG(found.st_mode):
        check(found, os.path.realpath(path) if resolve else None)
    fd = os.open(path, _OPEN_FLAGS)
    try:
        found = os.fstat(fd)
        if resolve or not stat.S_ISREG(found.st_mode):
            check(found, os.path.realpath(path) if resolve else None)
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


if sys.platform == "linux":

    def resident_bytes() -> int | None:
        """Resident set size of this process in bytes, None if it cannot be measured."""
        try:
            with open("/proc/self/statm", "rb") as statm:
                return int(statm.read().split()[1]) * mmap.PAGESIZE
        except (OSError, IndexError, ValueError):
            return None

    def peak_resident_bytes() -> int | None:
        """The kernel's high-water mark of the resident set size in bytes, None where there is none."""
        try:
            with open("/proc/self/status", "rb") as status:
                for line in status:
                    if line.startswith(b"VmHWM:"):
                        return int(line.split()[1]) << 10
        except (OSError, IndexError, ValueError):
            pass
        return None

    def reset_peak_resident_bytes() -> bool:
        """Set the kernel's high-water mark back to what is resident now; False where that is not possible."""
        try:
            # Unbuffered, so that a refusal is an error here and not when the file is closed.
            with open("/proc/self/clear_refs", "wb", buffering=0) as clear_refs:
                clear_refs.write(b"5")
        except OSError:
            return False
        return True

else:

    def resident_bytes() -> int | None:
        """Resident set size of this process in bytes, None if it cannot be measured."""
        import psutil

        try:
            return int(psutil.Process().memory_info().rss)
        except psutil.Error:
            return None

    def peak_resident_bytes() -> int | None:
        """None: a mark that can be set back is kept on Linux only."""
        return None

    def reset_peak_resident_bytes() -> bool:
        """False: a mark that can be set back is kept on Linux only."""
        return False


def give_back_pages(mapping: mmap.mmap) -> None:
    """Take a file mapping's pages out of this process; the next touch brings them back, with the same bytes.

    Where the platform has no such call, closing the mapping does it.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def release_free_memory() -> None:
    """Have the C library give freed memory back to the system, where it can (glibc's ``malloc_trim``).

    glibc keeps freed blocks of up to 32 MiB for later, which after a model has been parsed are most of its weights.
    """
    if sys.platform != "linux":
        return
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim(ctypes.c_size_t(0))
