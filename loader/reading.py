"""Reading the bytes of a tensor with ``pread``: exact, in pieces, never past what the file holds.

Positioned reads and not a mapping, because a mapped file that is truncated kills the process with SIGBUS on the
next touch, while a read of it comes back short.
"""

from __future__ import annotations

from ort_delayed.loader import platform

__all__ = ["PIECE_BYTES", "ShortReadError", "check_holds", "read_into"]

PIECE_BYTES = 16 << 20
"""Largest single read, in bytes: Linux caps one read just below 2 GiB, and pieces keep a cancelled run short."""


class ShortReadError(EOFError):
    """A file ended before the bytes that were asked for.

    Attributes:
        offset: first byte that was asked for.
        expected_bytes: how many were asked for.
        found_bytes: how many the file held from ``offset`` on.
    """

    def __init__(self, offset: int, expected_bytes: int, found_bytes: int) -> None:
        super().__init__(
            f"{expected_bytes} bytes are needed at offset {offset}, the file holds {found_bytes} bytes from there on"
        )
        self.offset = offset
        self.expected_bytes = expected_bytes
        self.found_bytes = found_bytes


def check_holds(size: int, offset: int, nbytes: int) -> None:
    """Refuse a file of ``size`` bytes that ends before the bytes asked for do. No bytes are in every file, anywhere.

    For before memory is taken for them: how many they are is what somebody claims.

    Raises:
        ShortReadError: it ends before.
    """
    found = max(0, size - offset)
    if found < nbytes:
        raise ShortReadError(offset, nbytes, found)


def read_into(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill ``buffer`` (contiguous bytes) from ``offset`` of an open file, in pieces of at most 16 MiB.

    Short reads are continued. A read that a signal interrupts is retried by Python itself (PEP 475).

    Raises:
        ShortReadError: the file ends before the buffer is full.
        OSError: as the operating system says.
    """
    view = buffer.cast("B")
    done = 0
    while done < len(view):
        count = platform.read_at(fd, view[done : done + PIECE_BYTES], offset + done)
        if count == 0:
            raise ShortReadError(offset, len(view), done)
        done += count
