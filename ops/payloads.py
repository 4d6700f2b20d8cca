"""The bytes behind a delayed node: held since the session was made (``cpu``) or read at every run (``file``)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ort_delayed.loader.element_types import ElementType
from ort_delayed.loader.reading import check_holds, read_into
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.ops.buffers import BufferPool
from ort_delayed.ops.run_files import weights_file

__all__ = ["FilePayload", "HeldPayload", "PayloadSource", "read_payload"]


class PayloadSource(Protocol):
    """Something that yields one tensor's elements, flat."""

    @property
    def element_type(self) -> ElementType:
        """The elements' type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per axis."""

    def elements(self, pool: BufferPool) -> npt.NDArray[np.generic]:
        """The elements as a flat, contiguous array, which may use a buffer lent by ``pool``."""


@dataclass(frozen=True, slots=True)
class HeldPayload:
    """A ``cpu`` payload: read once, yielded at every run."""

    element_type: ElementType
    shape: tuple[int, ...]
    held: npt.NDArray[np.generic]

    def elements(self, pool: BufferPool) -> npt.NDArray[np.generic]:
        """The held elements; ONNX Runtime gets a copy of them."""
        return self.held


@dataclass(frozen=True, slots=True)
class FilePayload:
    """A ``file`` payload: nothing is touched until a run asks, and each run reads what the file then holds."""

    tensor: TensorOnDisk
    within: tuple[str, ...] | None

    @property
    def element_type(self) -> ElementType:
        """The elements' type."""
        return self.tensor.element_type

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per axis."""
        return self.tensor.shape

    def elements(self, pool: BufferPool) -> npt.NDArray[np.generic]:
        """Read the elements from the file."""
        return read_payload(self.tensor, self.within, pool.lend)


def read_payload(
    tensor: TensorOnDisk, within: tuple[str, ...] | None, lend: Callable[[int], npt.NDArray[np.uint8]]
) -> npt.NDArray[np.generic]:
    """Read the tensor's bytes from its file and return them as a flat array of its elements.

    ``lend`` gives the buffer. It is asked only when the file is there and says that it is long enough: what a node
    claims to need may be no number of bytes that anybody has. Files that the system makes when they are read (those of
    ``/proc``) say that they hold nothing, so they are never read.

    Raises:
        OSError, ShortReadError: as :func:`weights_file` and :func:`read_into` do.
        MemoryError: as ``lend`` does.
    """
    dtype = tensor.element_type.dtype
    assert dtype is not None  # packed types never become payloads: the op's specification does not allow them
    fd, stays_open = weights_file(tensor.path, within)
    try:
        check_holds(os.fstat(fd).st_size, tensor.offset, tensor.nbytes)
        buffer = lend(tensor.nbytes)
        read_into(fd, buffer.data, tensor.offset)
    finally:
        if not stays_open:
            os.close(fd)
    return buffer.view(dtype)
