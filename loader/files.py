"""Opening weight files safely: regular files only, and inside given directories where a caller confines them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ort_delayed.loader import platform

__all__ = ["FileIdentity", "NotARegularFileError", "OutsideDirectoryError", "confining_directories"]
__all__ += ["is_inside", "is_path", "open_weights", "opened_weights"]


class NotARegularFileError(OSError):
    """A weights path leads to a FIFO, a device, a socket: only regular files are read."""


class OutsideDirectoryError(PermissionError):
    """A weights path leads, links resolved, out of the directories that the caller confined the model to."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells a file from another and from itself rewritten: device, inode, bytes, time of last change (ns)."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, fd_or_path: int | str) -> FileIdentity:
        """The identity of an open file descriptor, or of the file a path leads to now."""
        found = os.stat(fd_or_path)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def confining_directories(directory: str) -> tuple[str, ...]:
    """The real directories that files of a model confined to ``directory`` may stand in.

    That is the directory itself, links resolved. A snapshot directory of a Hugging Face hub cache
    (``REPO/snapshots/REVISION``) holds links to ``REPO/blobs``, also in its subdirectories, so the blobs of the same
    repository are included.
    """
    real = os.path.realpath(directory)
    revision = real
    while (parent := os.path.dirname(revision)) != revision:
        repository, snapshots = os.path.split(parent)
        if snapshots == "snapshots" and os.path.isdir(os.path.join(repository, "blobs")):
            return (real, os.path.join(repository, "blobs"))
        revision = parent
    return (real,)


def is_inside(path: str, directories: Sequence[str]) -> bool:
    """Whether ``path`` (absolute, links resolved) is one of ``directories`` or stands below one."""
    return any(path == d or path.startswith(d.rstrip(os.sep) + os.sep) for d in directories)


def is_path(text: str) -> bool:
    """Whether a file could have this path. JSON can spell what none has: nothing, NUL, half of a surrogate pair."""
    try:
        return bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def open_weights(path: str, *, within: Sequence[str] | None = None) -> int:
    """Open a weights file for reading and return its file descriptor, which the caller closes.

    Args:
        path: the file; links are followed.
        within: real directories (see :func:`confining_directories`) that the file, links resolved, must stand in.
            What is checked is the file that was really opened, so a link swapped meanwhile gains nothing.

    Raises:
        FileNotFoundError, PermissionError, IsADirectoryError, OSError: as the operating system says.
        NotARegularFileError: the path leads to something that is not a regular file. It is never opened for
            reading: opening a FIFO or a device can block or have effects.
        OutsideDirectoryError: the file stands outside ``within``.
    """
    return platform.open_checked(
        path, lambda found, real: _check(path, found, real, within), resolve=within is not None
    )


@contextmanager
def opened_weights(path: str, *, within: Sequence[str] | None = None) -> Iterator[int]:
    """:func:`open_weights` as a context manager that closes the descriptor."""
    fd = open_weights(path, within=within)
    try:
        yield fd
    finally:
        os.close(fd)


def _check(path: str, found: os.stat_result, real: str | None, within: Sequence[str] | None) -> None:
    if within is not None and (real is None or not is_inside(real, within)):
        raise OutsideDirectoryError(
            errno.EACCES,
            f"the file leads to '{real}', outside the directory that the model is confined to ('{within[0]}')",
            path,
        )
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(found.st_mode):
        raise NotARegularFileError(errno.EINVAL, f"only regular files are read, this is {_kind(found.st_mode)}", path)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "a FIFO",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")
