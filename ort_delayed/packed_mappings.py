"""Packed weights must be mapped: a session whose are not is refused before it runs.

Where ONNX Runtime cannot map a packed range it reads the range into memory from ``new char[]``, which is aligned to 16
bytes; its kernels read packed weights with instructions that want 32, and the process dies at the first run (releases
up to 1.31; 1.32 does not. tests/upstream watches it). Filesystems that cannot map, limits of address space and too many
mappings lead there.
"""

from __future__ import annotations

import errno
import mmap
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import onnxruntime

from ort_delayed.loader import platform
from ort_delayed.loader.files import open_weights
from ort_delayed.loader.process_lock import ProcessLock
from ort_delayed.loader.quoting import quoted
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.pack_layout import SMALL_ALIGNMENT
from ort_delayed.packed_source import PackedModelError

__all__ = ["MAY_READ_UNALIGNED", "ONE_CONSTRUCTION", "PackedMappings", "check_mappable", "places_of"]

MAY_READ_UNALIGNED = tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 32)
"""Whether this ONNX Runtime dies of packed weights that it could not map."""

ONE_CONSTRUCTION = ProcessLock()
"""Held while a session is built whose mappings are told from those of others."""

_Place = tuple[str, int, int]  # where a range is shown: file, offset, address
_owners: dict[_Place, object] = {}


def check_mappable(ranges: Sequence[TensorOnDisk]) -> None:
    """Check where the ranges stand, and try to map a page of each file.

    Raises:
        PackedModelError: a range does not start at a multiple of 64 bytes, as in every file that ``pack_model`` writes.
        OSError: a file cannot be opened or mapped; the message says what to do.
    """
    if not MAY_READ_UNALIGNED:
        return
    for stored in ranges:
        if stored.offset % SMALL_ALIGNMENT:
            raise PackedModelError(
                f"the packed weight {quoted(stored.name)} must start at a multiple of {SMALL_ALIGNMENT} bytes, its "
                f"offset in '{stored.path}' is {stored.offset}: pack the model again"
            )
    for path in dict.fromkeys(t.path for t in ranges if t.nbytes):
        fd = open_weights(path)
        try:
            mmap.mmap(fd, 1, access=mmap.ACCESS_READ).close()
        except OSError as error:
            raise OSError(
                error.errno or errno.ENODEV,
                f"packed weights must be mapped, which the system refuses ({error.strerror}): copy the model to "
                "another filesystem, or use it unpacked",
                path,
            ) from error
        finally:
            os.close(fd)


def places_of(
    ranges: Iterable[TensorOnDisk], mappings: Iterable[platform.FileMapping]
) -> dict[TensorOnDisk, tuple[_Place, ...]]:
    """Where each range that is not empty is shown as a whole; neighbouring mappings may have become one."""
    sought = sorted((t for t in ranges if t.nbytes), key=lambda t: (t.path, t.offset))
    starts = [(t.path, t.offset) for t in sought]
    found: dict[TensorOnDisk, list[_Place]] = {t: [] for t in sought}
    for mapping in mappings:
        end = mapping.offset + mapping.nbytes
        first, last = (bisect_left(starts, (mapping.path, offset)) for offset in (mapping.offset, end))
        for stored in sought[first:last]:
            if stored.end <= end:
                place = (stored.path, stored.offset, mapping.address + stored.offset - mapping.offset)
                found[stored].append(place)
    return {stored: tuple(places) for stored, places in found.items()}


class PackedMappings:
    """The mappings of packed weights that one session has; close it before ONNX Runtime's session goes.

    A range is somewhere that is no other session's. (That a mapping is new says nothing: a session that goes on another
    thread meanwhile leaves its addresses to this one.) Where there are several such places, because of sessions that
    nobody told of, which one it is remains open.
    """

    def __init__(self) -> None:
        self._own: tuple[_Place, ...] = ()

    @contextmanager
    def appearing(self, ranges: Sequence[TensorOnDisk]) -> Iterator[None]:
        """While ONNX Runtime builds a session, or builds it again.

        Raises:
            OSError: as :func:`check_mappable` and :meth:`take` say.
        """
        check_mappable(ranges)
        paths = {t.path for t in ranges}
        if not (MAY_READ_UNALIGNED and paths and platform.can_give_up_pages()):
            yield
            return
        with ONE_CONSTRUCTION:
            yield
            self.take(ranges, platform.file_mappings(paths))

    def take(self, ranges: Sequence[TensorOnDisk], mappings: Iterable[platform.FileMapping]) -> None:
        """Find where the session's packed ranges are; the caller holds :data:`ONE_CONSTRUCTION`.

        Args:
            ranges: the packed ranges of its model.
            mappings: all of their files.

        Raises:
            OSError: with ``errno.ENOMEM``: ONNX Runtime has put some into memory that its kernels cannot use. The
                message names the first.
        """
        if not MAY_READ_UNALIGNED:
            return
        self.close()
        free = {t: [p for p in places if p not in _owners] for t, places in places_of(ranges, mappings).items()}
        missing = [t for t, places in free.items() if not places]
        if missing:
            first = missing[0]
            raise OSError(
                errno.ENOMEM,
                f"ONNX Runtime could not map {len(missing)} of {len(ranges)} packed weights (the first: "
                f"{quoted(first.name)}, {first.nbytes} bytes at offset {first.offset}), and its kernels could not read "
                "them from the memory that it has put them into. The process needs more address space (ulimit -v), or "
                "has too many mappings (vm.max_map_count)",
                first.path,
            )
        self._own = tuple(places[0] for places in free.values() if len(places) == 1)
        _owners.update(dict.fromkeys(self._own, self))

    def close(self) -> None:
        """The session goes, and others may get its addresses. Safe to call twice."""
        for place in self._own:
            if _owners.get(place) is self:
                del _owners[place]
        self._own = ()
