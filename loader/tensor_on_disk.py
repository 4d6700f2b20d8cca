"""What a tensor on disk is: its name, where its bytes are, its shape and its element type."""

from __future__ import annotations

from dataclasses import dataclass

from ort_delayed.loader.element_types import ElementType

__all__ = ["TensorOnDisk"]


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
