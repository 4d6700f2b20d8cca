"""What a tensor on disk is: its name, where its bytes are, its shape and its element type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ort_delayed.loader.element_types import ElementType

__all__ = ["TensorOnDisk", "cut_off"]


@dataclass(frozen=True, slots=True)
class TensorOnDisk:
    """Where the raw little-endian bytes of one tensor stand.

    Attributes:
        name: the tensor's name in its model or checkpoint.
        path: absolute path of the file that holds the bytes (links not resolved).
        offset: first byte of the payload in that file.
        nbytes: bytes of the payload; always ``element_type.nbytes(shape)``.
        shape: elements per axis; ``()`` for a scalar.
        element_type: the row of the table of element types.
    """

    name: str
    path: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    element_type: ElementType

    @property
    def end(self) -> int:
        """First byte behind the payload."""
        return self.offset + self.nbytes


def cut_off(path: str, size: int, tensors: Sequence[TensorOnDisk]) -> str | None:
    """What is wrong with a file of ``size`` bytes that holds these tensors; None where it holds all of them."""
    cut = [t for t in tensors if t.end > size]
    if not cut:
        return None
    return (
        f"'{path}' has {size} bytes and must have at least {max(t.end for t in cut)}: {len(cut)} of its {len(tensors)} "
        f"tensors are cut off, such as '{cut[0].name}' ({cut[0].nbytes} bytes at offset {cut[0].offset})"
    )
