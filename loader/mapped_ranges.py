"""Which addresses of this process show which tensor's bytes, and how to give their pages up.

The mappings may be anybody's: they are found by file and offset in the process's own list of mappings. Giving pages
up is always right, since the next touch brings the same bytes back from the file: it can only cost time. What must
not happen is that a file changes under a mapping (then values change, or the process dies of SIGBUS), so the files'
identities are kept and checked.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ort_delayed.loader import platform
from ort_delayed.loader.errors import ShardFormatError
from ort_delayed.loader.files import FileIdentity, open_weights
from ort_delayed.loader.quoting import quoted
from ort_delayed.loader.tensor_on_disk import TensorOnDisk

__all__ = ["AmbiguousMappingsError", "MappedFileChanged", "MappedFiles", "Piece", "check_own", "find_pieces"]

_PIECE_BYTES = 4 << 20  # a multiple of the size of a huge page, so that giving a piece up splits none


class MappedFileChanged(ShardFormatError):  # noqa: N818  (named as RamBudgetExceeded is)
    """A file whose bytes are mapped is not the file any more that it was: nothing may be computed from it."""


class AmbiguousMappingsError(RuntimeError):
    """More mappings show a tensor than were to be expected: some are somebody else's, and it cannot be told which."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole pages of a file mapping that show one tensor, or a part of it.

    Attributes:
        address: the first byte.
        nbytes: a multiple of the page size. The tensor's neighbours in the file may share its first and last page.
        path: the file.
        offset: the file's byte at ``address``.
    """

    address: int
    nbytes: int
    path: str
    offset: int


def find_pieces(
    tensors: Sequence[TensorOnDisk], mappings: Iterable[platform.FileMapping], *, piece_bytes: int = _PIECE_BYTES
) -> dict[str, tuple[Piece, ...]]:
    """The pieces of each tensor by its name, in the order of addresses; a tensor that no mapping shows is left out.

    Two tensors on the same bytes are taken to be shown by two mappings, if there are two.

    Args:
        tensors: paths are real paths; names are unique.
        mappings: of this process.
        piece_bytes: pieces end at addresses that are a multiple of this.
    """
    by_path: dict[str, list[platform.FileMapping]] = {}
    for mapping in mappings:
        by_path.setdefault(mapping.path, []).append(mapping)
    taken: set[tuple[int, int]] = set()
    found: dict[str, tuple[Piece, ...]] = {}
    for tensor in tensors:
        showing = [m for m in by_path.get(tensor.path, ()) if _shows(m, tensor)]
        if not showing or tensor.nbytes == 0:
            continue
        # The tightest one first: a mapping made for this tensor, before one that happens to show it too.
        showing.sort(key=lambda m: ((m.address, tensor.offset) in taken, m.nbytes))
        taken.add((showing[0].address, tensor.offset))
        found[tensor.name] = tuple(_cut(showing[0], tensor, piece_bytes))
    return found


def check_own(tensors: Iterable[TensorOnDisk], mappings: Iterable[platform.FileMapping]) -> None:
    """Refuse mappings of which some were made by others meanwhile.

    Pages must never be given up at addresses that are somebody else's: once that mapping is gone, anything may stand
    there.

    Raises:
        AmbiguousMappingsError: more mappings show exactly the pages of a tensor than there are tensors on them.
    """
    expected = Counter((t.path, t.offset // mmap.PAGESIZE, -(-t.end // mmap.PAGESIZE)) for t in tensors)
    found = Counter((m.path, m.offset // mmap.PAGESIZE, (m.offset + m.nbytes) // mmap.PAGESIZE) for m in mappings)
    for place, count in expected.items():
        if found[place] > count:
            raise AmbiguousMappingsError(
                f"{found[place]} mappings of '{place[0]}' appeared where {count} was to be expected: another session "
                "on this file was constructed at the same time. Construct this one again"
            )


def _shows(mapping: platform.FileMapping, tensor: TensorOnDisk) -> bool:
    return mapping.offset <= tensor.offset and tensor.end <= mapping.offset + mapping.nbytes


def _cut(mapping: platform.FileMapping, tensor: TensorOnDisk, piece_bytes: int) -> Iterable[Piece]:
    shift = mapping.address - mapping.offset  # a multiple of the page size
    start = (tensor.offset + shift) // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(tensor.end + shift) // mmap.PAGESIZE) * mmap.PAGESIZE
    while start < end:
        stop = min((start // piece_bytes + 1) * piece_bytes, end)
        yield Piece(start, stop - start, tensor.path, start - shift)
        start = stop


class MappedFiles:
    """The files that mapped tensors stand in: held open, with their identity at the time when they were opened.

    Owns one descriptor per file, through which cached pages are dropped; close it.

    Args:
        paths: the files.
        within: real directories that they must stand in, links resolved; None for anywhere.

    Raises:
        OSError: as :func:`open_weights`.
    """

    def __init__(self, paths: Iterable[str], *, within: Sequence[str] | None = None) -> None:
        self._open: dict[str, int] = {}
        self._identities: dict[str, FileIdentity] = {}
        try:
            for path in dict.fromkeys(paths):
                fd = self._open[path] = open_weights(path, within=within)
                self._identities[path] = FileIdentity.of(fd)
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> tuple[str, ...]:
        """The files."""
        return tuple(self._identities)

    def check_inside(self, tensors: Iterable[TensorOnDisk]) -> None:
        """Refuse tensors that reach beyond the end of their file: touching a page behind it ends the process.

        Raises:
            ShardFormatError: names tensor, file, offset, and the bytes needed and found.
        """
        for tensor in tensors:
            size = self._identities[tensor.path].size
            if tensor.end > size:
                raise ShardFormatError(
                    f"tensor {quoted(tensor.name)} needs {tensor.nbytes} bytes at offset {tensor.offset} of "
                    f"'{tensor.path}', the file holds {max(size - tensor.offset, 0)} from there on"
                )

    def check_unchanged(self) -> None:
        """Refuse files that are not what they were when they were opened.

        Raises:
            MappedFileChanged: a path leads nowhere or to another file, or the file's size or time of change is new.
        """
        for path, expected in self._identities.items():
            try:
                found = FileIdentity.of(path)
            except OSError as error:
                raise MappedFileChanged(
                    f"the file '{path}', from which weights are mapped, cannot be found any more ({error.strerror}): "
                    "construct the session again once it is back"
                ) from error
            _refuse_changed(path, expected, found)

    def check_not_rewritten(self) -> None:
        """Refuse files that were written to since they were opened, wherever their paths lead now.

        Raises:
            MappedFileChanged: the file's size or time of change is new.
        """
        for path, fd in self._open.items():
            _refuse_changed(path, self._identities[path], FileIdentity.of(fd))

    def drop_cached(self, piece: Piece) -> None:
        """Ask the system to forget its cached pages of a piece that has been given up."""
        fd = self._open.get(piece.path)
        if fd is not None:
            platform.drop_from_page_cache(fd, piece.offset, piece.nbytes)

    def close(self) -> None:
        """Close the files. Safe to call twice."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        # For whoever was interrupted between opening them and having a name for this.
        with contextlib.suppress(Exception):
            self.close()


def _refuse_changed(path: str, expected: FileIdentity, found: FileIdentity) -> None:
    if found != expected:
        raise MappedFileChanged(
            f"the file '{path}', from which weights are mapped, has changed since the session was constructed "
            f"({_difference(expected, found)}): construct the session again"
        )


def _difference(expected: FileIdentity, found: FileIdentity) -> str:
    if (expected.device, expected.inode) != (found.device, found.inode):
        return "another file stands in its place"
    if expected.size != found.size:
        return f"it had {expected.size} bytes and has {found.size}"
    return "it was written to"
