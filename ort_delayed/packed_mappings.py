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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import onnxruntime

from ort_delayed.loader import platform
from ort_delayed.loader.files import open_weights
from ort_delayed.loader.mapped_ranges import find_pieces
from ort_delayed.loader.process_lock import ProcessLock
from ort_delayed.loader.quoting import quoted
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.pack_layout import SMALL_ALIGNMENT
from ort_delayed.packed_source import PackedModelError

__all__ = ["MAY_READ_UNALIGNED", "ONE_CONSTRUCTION", "PackedMappings", "check_mappable", "refuse_unmapped"]

MAY_READ_UNALIGNED = tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 32)
"""Whether this ONNX Runtime dies of packed weights that it could not map."""

ONE_CONSTRUCTION = ProcessLock()
"""Held while a session is built whose mappings are told from others by being new."""


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


def refuse_unmapped(ranges: Sequence[TensorOnDisk], mappings: Iterable[platform.FileMapping]) -> None:
    """Refuse a session of which ONNX Runtime has read packed weights into memory that its kernels cannot use.

    Args:
        ranges: the packed ranges of its model.
        mappings: those that are the session's.

    Raises:
        OSError: with ``errno.ENOMEM``; the message names the first range.
    """
    if not MAY_READ_UNALIGNED:
        return
    found = find_pieces(ranges, mappings)
    missing = [t for t in ranges if t.nbytes and t.name not in found]
    if missing:
        first = missing[0]
        raise OSError(
            errno.ENOMEM,
            f"ONNX Runtime could not map {len(missing)} of {len(ranges)} packed weights (the first: "
            f"{quoted(first.name)}, {first.nbytes} bytes at offset {first.offset}), and its kernels could not read "
            "them from the memory that it has put them into. The process needs more address space (ulimit -v), or has "
            "too many mappings (vm.max_map_count); or a session on the same file went at that moment: construct this "
            "one again",
            first.path,
        )


class PackedMappings:
    """The mappings of packed weights that a session has, where somebody must look."""

    def __init__(self) -> None:
        self._own: frozenset[platform.FileMapping] = frozenset()

    @contextmanager
    def appearing(self, ranges: Sequence[TensorOnDisk]) -> Iterator[None]:
        """While ONNX Runtime builds a session, or builds it again.

        Raises:
            OSError: as :func:`check_mappable` and :func:`refuse_unmapped` say.
        """
        check_mappable(ranges)
        paths = {t.path for t in ranges}
        if not (MAY_READ_UNALIGNED and paths and platform.can_give_up_pages()):
            yield
            return
        with ONE_CONSTRUCTION:
            before = frozenset(platform.file_mappings(paths))
            yield
            self._own = frozenset(platform.file_mappings(paths)) - (before - self._own)
        refuse_unmapped(ranges, self._own)
