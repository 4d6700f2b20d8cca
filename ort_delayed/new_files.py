"""Writing files that appear whole or not at all, and copying bytes into them in large sequential pieces."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

from ort_delayed.loader.reading import PIECE_BYTES, read_into

__all__ = ["PAGE_BYTES", "CopyBuffer", "PendingDataFile", "PendingFile", "flush_directory"]

PAGE_BYTES = 4096
"""Every payload of a data file starts on a multiple of this, so that it can be mapped by itself."""

_WRITE_BUFFER_BYTES = 4 << 20
_HOLE_BYTES = 64 << 10


class CopyBuffer:
    """One buffer of at most 16 MiB, used again for every piece that is copied."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def copy(self, fd: int, offset: int, nbytes: int, out: PendingFile) -> None:
        """Append ``nbytes`` bytes at ``offset`` of the open file ``fd`` to ``out``.

        Raises:
            ShortReadError, OSError: as for reading and writing.
        """
        wanted = min(nbytes, PIECE_BYTES)
        if len(self._buffer) < wanted:
            self._buffer = bytearray(wanted)
        with memoryview(self._buffer) as view:
            for start in range(0, nbytes, PIECE_BYTES):
                piece = view[: min(PIECE_BYTES, nbytes - start)]
                read_into(fd, piece, offset + start)
                if len(piece) >= _HOLE_BYTES and not np.frombuffer(piece, np.uint8).any():
                    out.write_zeros(piece)
                else:
                    out.write(piece)


class PendingFile:
    """A file that is being written beside its place, under another name, until :meth:`commit`. For ``with``.

    Leaving the ``with`` block without a commit removes it. A process that is killed leaves the other name behind,
    ``.NAME.<random>.partial``; it never leaves half a file in the place itself.
    """

    def __init__(self, directory: str, name: str) -> None:
        # Names can be as long as a file system allows, so the temporary one does not grow with them.
        self.path = os.path.join(directory, f".{name[:100]}.{secrets.token_hex(6)}.partial")
        self._committed = False

    def __enter__(self) -> Self:
        # Made here and nowhere else: an interrupt is raised as soon as the call in which it came has returned, and a
        # file that a constructor had made would be nobody's at that moment.
        try:
            # Not tempfile: its files can be read by nobody else, and a model's mode follows the user's umask.
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
            self._file = os.fdopen(fd, "wb", buffering=_WRITE_BUFFER_BYTES)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed:
            # Closing flushes, which fails again on a full disk: the first error is the one to see.
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._file.write(data)

    def write_zeros(self, zeros: bytes | memoryview) -> None:
        """Append these zeros as a hole: what is sparse stays sparse."""
        self._file.seek(len(zeros), os.SEEK_CUR)

    def flush_to_disk(self) -> None:
        """Return when all that was written is on the disk; nothing can be appended any more."""
        self._file.flush()
        self._file.truncate()  # a hole at the end makes no file longer by itself
        os.fsync(self._file.fileno())
        self._file.close()

    @property
    def placed(self) -> bool:
        """Whether the file has got its name, even if an interrupt came before :meth:`commit` returned."""
        try:
            return os.stat(self.path).st_nlink > 1
        except FileNotFoundError:
            return True

    def commit(self, path: str, *, replace: bool) -> None:
        """Give the file its name, at once.

        Raises:
            FileExistsError: something has that name, and ``replace`` is false.
        """
        if not self._file.closed:
            self.flush_to_disk()
        if replace:
            os.replace(self.path, path)
        else:
            _rename_to_free_name(self.path, path)
        self._committed = True


class PendingDataFile(PendingFile):
    """A data file: payloads at given, growing offsets, padded with zeros, and a digest of all of it.

    Attributes:
        position: bytes written so far.
        on_progress: called with ``position`` as it grows, if set.
    """

    def __init__(self, directory: str, name: str) -> None:
        super().__init__(directory, name)
        self.position = 0
        self.on_progress: Callable[[int], Any] | None = None
        self._digest = hashlib.sha256()  # which processors have instructions for

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        super().write(data)
        self._advance(data)

    def write_zeros(self, zeros: bytes | memoryview) -> None:
        """Append zeros as a hole."""
        super().write_zeros(zeros)
        self._advance(zeros)

    def pad_to(self, offset: int) -> None:
        """Append zeros up to ``offset``."""
        if offset < self.position:
            raise ValueError(f"offset {offset} is behind the end of the data written so far, {self.position}")
        self.write(bytes(offset - self.position))

    def _advance(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self.position += len(data)
        if self.on_progress is not None:
            self.on_progress(self.position)

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that stand for the content."""
        return self._digest.hexdigest()[:12]


def flush_directory(directory: str) -> None:
    """Make renames in ``directory`` last through a power cut, where the system can."""
    with contextlib.suppress(OSError):  # Windows opens no directories
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _rename_to_free_name(old: str, new: str) -> None:
    try:
        # A rename replaces what is there, a link does not: nothing slips in between a check and the rename.
        os.link(old, new)
    except OSError:  # also that of a file system without hard links
        if os.path.lexists(new):
            raise FileExistsError(f"'{new}' exists") from None
        os.rename(old, new)
    else:
        # The file has its name; that it has another one too is no failure.
        with contextlib.suppress(OSError):
            os.unlink(old)
