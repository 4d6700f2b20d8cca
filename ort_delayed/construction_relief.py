"""Giving up pages of weights while ONNX Runtime builds a session: safely, and before they are too many.

While it builds, ONNX Runtime unmaps raw weights as it packs or folds them, and what it allocates next may come to
stand at their addresses; to give up pages there with MADV_DONTNEED would wipe that. So those are reclaimed, which takes
longer, and the file's pages leave the page cache too. The packed ranges of a packed model it maps before it packs
anything, and keeps them mapped: those are simply given up. Mappings that were there before are other sessions', and
may go at any moment (a collection of garbage ends a session in whatever thread it comes up, this one too): they are
left alone.

For a packed model each kernel packs its weight once more, into memory that cannot be given up. Pages that are not
needed any more are therefore given up early: room for the largest weight is kept free all the time. That this memory
leaves the process when it is freed is seen to by :func:`large_blocks_go_back`.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Collection, Sequence

from ort_delayed.loader import platform
from ort_delayed.loader.mapped_ranges import MappedFiles
from ort_delayed.loader.tensor_on_disk import TensorOnDisk

__all__ = ["ConstructionRelief"]

_Pages = tuple[str, int, int]
# A raw weight of more than this part of the budget is mapped page by page: packing touches all of it at once.
_LARGE_PART = 16


class ConstructionRelief:
    """What is given up while one session is built.

    Args:
        tensors: the weights that stay in their files, and the packed ranges among them.
        packed_ranges: names of those.
        files: the files.
        budget_bytes: the budget.
        mark_bytes: where even what is slow to give up is given up.
        used_bytes: returns the bytes in use that count against the budget, now.
        by_page: gets the large raw weights.
        before: mappings of the files from before the session was built.

    Attributes:
        mark_bytes: from where on :meth:`relieve` has something to do.
    """

    def __init__(
        self,
        tensors: Sequence[TensorOnDisk],
        packed_ranges: Collection[str],
        files: MappedFiles,
        *,
        budget_bytes: int,
        mark_bytes: int,
        used_bytes: Callable[[], int],
        by_page: platform.PageByPage,
        before: Collection[platform.FileMapping] = (),
    ) -> None:
        packed = [t for t in tensors if t.name in packed_ranges]
        self.mark_bytes = mark_bytes
        if packed:
            largest = max(t.nbytes for t in packed)
            self.mark_bytes = min(mark_bytes, max(mark_bytes - largest, budget_bytes // 8))
        self._hard_mark = mark_bytes
        self._packed: frozenset[_Pages] = frozenset(_pages(t.path, t.offset, t.nbytes) for t in packed)
        self._files = files
        self._large = budget_bytes // _LARGE_PART
        self._used_bytes = used_bytes
        self._by_page = by_page
        self._before = frozenset(before)
        self._paged: set[platform.FileMapping] = set()

    def relieve(self) -> None:
        """Give up packed pages; if that does not do, reclaim raw ones."""
        others = []
        mappings = platform.file_mappings(self._files.paths)
        self._before &= frozenset(mappings)  # what comes to stand where one has gone is this session's
        for mapping in mappings:
            if mapping in self._before:
                continue
            if _pages(mapping.path, mapping.offset, mapping.nbytes) in self._packed:
                _give_up(mapping)
            else:
                others.append(mapping)
        for mapping in others:
            if self._packed and mapping.nbytes >= self._large and mapping not in self._paged:
                self._paged.add(mapping)
                self._by_page.add(mapping.address, mapping.nbytes)
        for mapping in others:
            if self._used_bytes() <= self._hard_mark:
                break
            platform.reclaim_pages(mapping.address, mapping.nbytes)


def _give_up(mapping: platform.FileMapping) -> None:
    try:
        platform.give_up_pages(mapping.address, mapping.nbytes)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        # Nothing is mapped there any more, so there is nothing to give up.


def _pages(path: str, offset: int, nbytes: int) -> _Pages:
    """The file, the first page of the range, and the first behind it. (The kernel joins mappings that touch.)"""
    return path, offset // mmap.PAGESIZE, -(-(offset + nbytes) // mmap.PAGESIZE)
