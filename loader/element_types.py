"""The table of element types: what ONNX, numpy, safetensors and ONNX Runtime each call them, and their size.

It stands here once; every format reader, the op and the converter look things up in it.

Sources: onnx.proto (``TensorProto.DataType``), the safetensors format description (``Dtype``), and what
onnxruntime-extensions can return from a Python op (its table of item sizes has the twelve types marked
``delayed`` below; complex types are known to it, but ONNX Runtime has no complex tensors).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

__all__ = ["ELEMENT_TYPES", "ElementType", "element_type_from_dtype", "element_type_from_onnx"]
__all__ += ["element_type_from_safetensors", "onnx_type_name"]

_BEYOND_STORAGE = 2**128  # elements


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type, in every vocabulary that the project meets.

    Attributes:
        name: its numpy (or ml_dtypes) name, ``"float32"``.
        onnx: its ``TensorProto.DataType`` value, or None where ONNX has no such type.
        onnx_name: that value's name, ``"FLOAT"``, or None.
        safetensors: its safetensors dtype, ``"F32"``, or None where that format has no such type.
        bits: bits one element takes in raw storage (sub-byte types are packed, little end first).
        dtype: numpy dtype whose items are the stored bytes, or None where the items are packed below a byte.
        ort: the name in ONNX Runtime's type strings, ``"float"`` as in ``tensor(float)``, or None where it
            has no such tensors.
        delayed: whether ONNX Runtime can carry it through the Python custom op.
        in_schema: whether the specification of ``ai.rt::DelayedInitializer`` allows it.
    """

    name: str
    onnx: int | None
    onnx_name: str | None
    safetensors: str | None
    bits: int
    dtype: np.dtype[np.generic] | None
    ort: str | None
    delayed: bool = False
    in_schema: bool = False

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes that a tensor of this type and ``shape`` (elements per axis) takes in raw storage.

        For a shape that no storage holds, some number that is far beyond any file offset: the true product of a
        hundred thousand large dims would take minutes, and could not even be printed.
        """
        elements = 0 if 0 in shape else 1
        for dim in shape:
            elements *= dim
            if abs(elements) > _BEYOND_STORAGE:
                break
        return (elements * self.bits + 7) // 8

    def __str__(self) -> str:
        return self.name


def _row(
    name: str,
    onnx: int | None,
    onnx_name: str | None,
    safetensors: str | None,
    ort: str | None,
    *,
    delayed: bool = False,
    in_schema: bool = False,
) -> ElementType:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    return ElementType(name, onnx, onnx_name, safetensors, dtype.itemsize * 8, dtype, ort, delayed, in_schema)


def _packed(
    name: str, bits: int, onnx: int | None, onnx_name: str, safetensors: str | None, ort: str | None
) -> ElementType:
    return ElementType(name, onnx, onnx_name, safetensors, bits, None, ort)


ELEMENT_TYPES: tuple[ElementType, ...] = (
    _row("float32", 1, "FLOAT", "F32", "float", delayed=True, in_schema=True),
    _row("uint8", 2, "UINT8", "U8", "uint8", delayed=True, in_schema=True),
    _row("int8", 3, "INT8", "I8", "int8", delayed=True, in_schema=True),
    _row("uint16", 4, "UINT16", "U16", "uint16", delayed=True, in_schema=True),
    _row("int16", 5, "INT16", "I16", "int16", delayed=True, in_schema=True),
    _row("int32", 6, "INT32", "I32", "int32", delayed=True, in_schema=True),
    _row("int64", 7, "INT64", "I64", "int64", delayed=True, in_schema=True),
    _row("bool", 9, "BOOL", "BOOL", "bool", delayed=True, in_schema=True),
    _row("float16", 10, "FLOAT16", "F16", "float16", delayed=True, in_schema=True),
    _row("float64", 11, "DOUBLE", "F64", "double", delayed=True, in_schema=True),
    _row("uint32", 12, "UINT32", "U32", "uint32", delayed=True, in_schema=True),
    _row("uint64", 13, "UINT64", "U64", "uint64", delayed=True, in_schema=True),
    _row("complex64", 14, "COMPLEX64", "C64", None, in_schema=True),
    _row("complex128", 15, "COMPLEX128", None, None, in_schema=True),
    _row("bfloat16", 16, "BFLOAT16", "BF16", "bfloat16"),
    _row("float8_e4m3fn", 17, "FLOAT8E4M3FN", "F8_E4M3", "float8e4m3fn"),
    _row("float8_e4m3fnuz", 18, "FLOAT8E4M3FNUZ", "F8_E4M3FNUZ", "float8e4m3fnuz"),
    _row("float8_e5m2", 19, "FLOAT8E5M2", "F8_E5M2", "float8e5m2"),
    _row("float8_e5m2fnuz", 20, "FLOAT8E5M2FNUZ", "F8_E5M2FNUZ", "float8e5m2fnuz"),
    _row("float8_e8m0fnu", 24, "FLOAT8E8M0", "F8_E8M0", None),
    _packed("uint4", 4, 21, "UINT4", None, "uint4"),
    _packed("int4", 4, 22, "INT4", None, "int4"),
    _packed("float4_e2m1fn", 4, 23, "FLOAT4E2M1", "F4", "float4e2m1"),
    _packed("uint2", 2, 25, "UINT2", None, "uint2"),
    _packed("int2", 2, 26, "INT2", None, "int2"),
    _packed("float6_e2m3fn", 6, 27, "FLOAT6E2M3", "F6_E2M3", None),
    _packed("float6_e3m2fn", 6, 28, "FLOAT6E3M2", "F6_E3M2", None),
)

_BY_ONNX = {t.onnx: t for t in ELEMENT_TYPES if t.onnx is not None}
_BY_SAFETENSORS = {t.safetensors: t for t in ELEMENT_TYPES if t.safetensors is not None}
_BY_DTYPE = {t.dtype: t for t in ELEMENT_TYPES if t.dtype is not None}
# Types without raw storage or without elements, named only so that messages can say what was found.
_OTHER_ONNX_NAMES = {0: "UNDEFINED", 8: "STRING"}


def element_type_from_onnx(data_type: int) -> ElementType | None:
    """The element type with this ``TensorProto.DataType`` value; None for UNDEFINED, STRING and unknown values."""
    return _BY_ONNX.get(data_type)


def element_type_from_safetensors(dtype: str) -> ElementType | None:
    """The element type that safetensors calls ``dtype`` (``"BF16"``), or None."""
    return _BY_SAFETENSORS.get(dtype)


def element_type_from_dtype(dtype: np.dtype[np.generic]) -> ElementType | None:
    """The element type whose items a numpy array of ``dtype`` holds, or None."""
    return _BY_DTYPE.get(dtype.newbyteorder("="))


def onnx_type_name(data_type: int) -> str:
    """How a message names a ``TensorProto.DataType`` value: ``"FLOAT (1)"``, ``"unknown (99)"``."""
    found = _BY_ONNX.get(data_type)
    name = found.onnx_name if found is not None else _OTHER_ONNX_NAMES.get(data_type, "unknown")
    return f"{name} ({data_type})"
