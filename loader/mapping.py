"""Mapping one layer group: read-only views of the bytes on disk, until the group is released.

Pages of a mapping count as resident memory until they are given back, so a group gives them back first and closes
the mapping then. A view that somebody still holds keeps its mapping open, never the memory behind it.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ort_delayed.loader import platform
from ort_delayed.loader.errors import BufferReleaseError, ShardFormatError
from ort_delayed.loader.files import FileIdentity
from ort_delayed.loader.layers import LayerGroup, LayerGroupSpec
from ort_delayed.loader.shards import opened_shard
from ort_delayed.loader.tensor_on_disk import TensorOnDisk

__all__ = ["FileRange", "StreamedLayerGroup", "map_group", "ranges_of"]

_MOST_RANGES = 256
"""Mappings that a group is content with: each takes a file descriptor, of which a process may have but 1024."""
_FIRST_GAP = 64 << 10

_Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class FileRange:
    """A stretch of a file that is mapped as one; both ends are multiples of the mapping granularity.

    Attributes:
        path: the file.
        start: its first byte.
        end: the first byte behind it; it may lie behind the file's end.
    """

    path: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of address space, and at most of resident memory, that mapping it takes."""
        return self.end - self.start


def ranges_of(tensors: Iterable[TensorOnDisk]) -> tuple[FileRange, ...]:
    """The stretches to map for ``tensors``: whole pages, joined where they touch. Empty tensors take none.

    Where that leaves very many, those with small gaps between them are joined as well.
    """
    grain = mmap.ALLOCATIONGRANULARITY
    pages = sorted((t.path, t.offset // grain * grain, -(-t.end // grain) * grain) for t in tensors if t.nbytes > 0)
    ranges = _joined([FileRange(*p) for p in pages], 0)
    files = len({r.path for r in ranges})
    gap = _FIRST_GAP
    while len(ranges) > max(_MOST_RANGES, files):
        ranges = _joined(ranges, gap)
        gap *= 2
    return tuple(ranges)


def _joined(ranges: Sequence[FileRange], gap: int) -> list[FileRange]:
    """``ranges`` (sorted) with those joined that lie at most ``gap`` bytes apart in the same file."""
    joined: list[FileRange] = []
    for r in ranges:
        last = joined[-1] if joined else None
        if last is not None and last.path == r.path and r.start <= last.end + gap:
            joined[-1] = FileRange(last.path, last.start, max(last.end, r.end))
        else:
            joined.append(r)
    return joined


class StreamedLayerGroup:
    """The weights of one layer group as read-only arrays, valid until :meth:`release`.

    Made by :func:`map_group`. A context manager that releases on exit.

    Attributes:
        spec: its name, tensors, files and size.
        records: where each tensor stands on disk, with its logical shape and element type.
    """

    def __init__(
        self,
        group: LayerGroup,
        arrays: dict[str, _Array],
        mappings: list[mmap.mmap],
        owners: dict[str, weakref.ref[_Array]],
    ) -> None:
        self.spec: LayerGroupSpec = group.spec
        self.records: tuple[TensorOnDisk, ...] = group.tensors
        self._arrays = arrays
        self._mappings = mappings
        self._owners = owners
        self._given_up = False

    @property
    def name(self) -> str:
        """The group's name, ``"layer-0003"``."""
        return self.spec.name

    @property
    def tensors(self) -> Mapping[str, _Array]:
        """The arrays by tensor name, in natural order; RuntimeError once the group has been released.

        An array has the tensor's shape and type (bfloat16, float8 as ml_dtypes); of a type whose elements are
        packed below a byte it is one-dimensional, uint8, the packed bytes.
        """
        if self._given_up:
            raise RuntimeError(f"layer group '{self.name}' has been released: copy what is needed later")
        return MappingProxyType(self._arrays)

    @property
    def released(self) -> bool:
        """Whether every mapping has been closed or, behind a failure, left to its last view to close."""
        return self._given_up and not self._mappings

    def release(self) -> None:
        """Give the pages back and close the mappings. Harmless when done already.

        Raises:
            BufferReleaseError: somebody still holds a view. Its pages have been given back all the same; once the
                view is gone, calling this again succeeds.
        """
        self._give_up()
        if self._mappings:
            # A view in a reference cycle is nobody's any more, but only the collector knows.
            gc.collect()
            self._close()
        if self._mappings:
            raise BufferReleaseError(
                f"views of layer group '{self.name}' are still held{self._held()}: copy what is needed after the "
                "callback (numpy.array(view, copy=True)) and keep no view, slice, memoryview or wrapper of it"
            )

    def abandon(self, error: BaseException | None = None) -> None:
        """Release behind a failure: nothing is raised, and each mapping closes when its last view is gone.

        Args:
            error: what is propagating; it gets a note if views are still held, as by the frames of its traceback.
        """
        self._give_up()
        if self._mappings and error is not None:
            error.add_note(
                f"Views of layer group '{self.name}' are still held{self._held()}, by this traceback or elsewhere. "
                "Their memory has been given back; the mapping closes when the last view is gone."
            )
        self._mappings = []

    def __enter__(self) -> StreamedLayerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.release()
        else:
            self.abandon(error)

    def _give_up(self) -> None:
        self._given_up = True
        self._arrays.clear()
        for mapping in self._mappings:
            platform.give_back_pages(mapping)
        self._close()

    def _close(self) -> None:
        still_open = []
        for mapping in self._mappings:
            try:
                mapping.close()
            except BufferError:
                still_open.append(mapping)
        self._mappings = still_open

    def _held(self) -> str:
        names = [name for name, owner in self._owners.items() if owner() is not None]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f" (of {', '.join(repr(n) for n in names[:3])}{more})" if names else ""


def map_group(
    group: LayerGroup, *, identities: Mapping[str, FileIdentity], within: Sequence[str] | None = None
) -> StreamedLayerGroup:
    """Map the tensors of a group. Nothing is read until a view is touched.

    Args:
        group: what to map.
        identities: each weight file as it was when it was discovered.
        within: real directories that the files must stand in, links resolved; None: anywhere.

    Raises:
        ShardFormatError: a file is no longer the one that was discovered, or ends before a tensor does.
        FileNotFoundError, LocalWeightsRequired, OSError: as opening a shard raises them.
    """
    mappings: dict[str, list[tuple[int, mmap.mmap]]] = {}
    try:
        ranges = ranges_of(group.tensors)
        for path in sorted({r.path for r in ranges}):
            with opened_shard(path, within=within, expected=identities[path]) as (fd, identity):
                _check_ends(group.tensors, path, identity.size)
                for r in ranges:
                    if r.path == path:
                        # Touching a page that lies wholly behind the file's end would be SIGBUS.
                        length = min(r.end, identity.size) - r.start
                        opened = mmap.mmap(fd, length, access=mmap.ACCESS_READ, offset=r.start)
                        mappings.setdefault(path, []).append((r.start, opened))
        arrays, owners = _views(group.tensors, mappings)
    except BaseException:
        for parts in mappings.values():
            for _, opened in parts:
                with contextlib.suppress(BufferError):  # closes with the last array, in the frames of the traceback
                    opened.close()
        raise
    return StreamedLayerGroup(group, arrays, [m for parts in mappings.values() for _, m in parts], owners)


def _check_ends(tensors: Sequence[TensorOnDisk], path: str, size: int) -> None:
    for t in tensors:
        if t.path == path and t.end > size:
            raise ShardFormatError(
                f"tensor '{t.name}' needs {t.nbytes} bytes at offset {t.offset} of '{path}', which has {size} bytes"
            )


def _views(
    tensors: Sequence[TensorOnDisk], mappings: Mapping[str, list[tuple[int, mmap.mmap]]]
) -> tuple[dict[str, _Array], dict[str, weakref.ref[_Array]]]:
    arrays: dict[str, _Array] = {}
    owners: dict[str, weakref.ref[_Array]] = {}
    starts = {path: np.array([start for start, _ in parts]) for path, parts in mappings.items()}
    for t in tensors:
        dtype = t.element_type.dtype
        if t.nbytes == 0:
            arrays[t.name] = np.empty((0,), np.uint8) if dtype is None else np.empty(t.shape, dtype)
            arrays[t.name].flags.writeable = False
            continue
        start, mapping = mappings[t.path][int(np.searchsorted(starts[t.path], t.offset, side="right")) - 1]
        stored = np.dtype(np.uint8) if dtype is None else dtype
        # Not numpy.ndarray(buffer=...): that holds no export of the mapping, which could then be closed under it.
        flat = np.frombuffer(mapping, stored, t.nbytes // stored.itemsize, t.offset - start)
        # Slices and reshapes of an array refer to the one that has no array below it: this one.
        owners[t.name] = weakref.ref(flat)
        arrays[t.name] = flat if dtype is None else flat.reshape(t.shape)
    return arrays, owners
