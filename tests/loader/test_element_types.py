"""The table of element types agrees with what ONNX, numpy and safetensors say themselves."""

from __future__ import annotations

import time
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from checkpoints import SAFETENSORS_NAMES, entry, library_knows, raw_safetensors
from onnx import TensorProto, helper
from safetensors import safe_open

from ort_delayed.loader.element_types import (
    ELEMENT_TYPES,
    ElementType,
    element_type_from_dtype,
    element_type_from_onnx,
    element_type_from_safetensors,
    onnx_type_name,
)

by_name = pytest.mark.parametrize("element_type", ELEMENT_TYPES, ids=str)


@by_name
def test_onnx_calls_it_that(element_type: ElementType) -> None:
    assert element_type.onnx is not None
    if element_type.onnx in TensorProto.DataType.values():  # an older onnx does not know the newest types
        assert TensorProto.DataType.Name(element_type.onnx) == element_type.onnx_name
    assert element_type_from_onnx(element_type.onnx) is element_type
    assert onnx_type_name(element_type.onnx) == f"{element_type.onnx_name} ({element_type.onnx})"


def test_no_onnx_type_with_raw_storage_is_missing() -> None:
    known = {t.onnx for t in ELEMENT_TYPES}
    assert set(TensorProto.DataType.values()) - known == {TensorProto.UNDEFINED, TensorProto.STRING}


@by_name
def test_numpy_holds_the_stored_bytes(element_type: ElementType) -> None:
    if element_type.dtype is None:
        assert element_type.bits < 8
        return
    assert element_type.dtype.name == element_type.name
    assert element_type.dtype.itemsize * 8 == element_type.bits
    assert element_type_from_dtype(element_type.dtype) is element_type
    assert element_type.onnx is not None
    assert helper.tensor_dtype_to_np_dtype(element_type.onnx) == element_type.dtype


@by_name
def test_safetensors_takes_it_by_that_name_and_size(element_type: ElementType, tmp_path: Path) -> None:
    if element_type.safetensors is None or not library_knows(element_type.safetensors):
        return
    size = element_type.nbytes((8, 3))
    path = raw_safetensors(tmp_path / "m", {"a": entry(0, size, (8, 3), element_type.safetensors)}, bytes(size))
    with safe_open(path, framework="np") as opened:
        assert opened.get_slice("a").get_dtype() == element_type.safetensors
    assert element_type_from_safetensors(element_type.safetensors) is element_type
    assert SAFETENSORS_NAMES.get(element_type.name, element_type.safetensors) == element_type.safetensors


@pytest.mark.parametrize(
    ("name", "shape", "nbytes"),
    [("float32", (), 4), ("float32", (0, 5), 0), ("int64", (2, 3), 48), ("int4", (3,), 2), ("uint2", (5,), 2)]
    + [("float6_e2m3fn", (4,), 3), ("float16", (2**31, 2), 2**33)],
)
def test_sizes(name: str, shape: tuple[int, ...], nbytes: int) -> None:
    (element_type,) = (t for t in ELEMENT_TYPES if t.name == name)
    assert element_type.nbytes(shape) == nbytes


def test_the_types_that_the_op_takes() -> None:
    names = {t.name for t in ELEMENT_TYPES if t.delayed}
    assert names == {
        "bool",
        "float16",
        "float32",
        "float64",
        *(f"{u}int{b}" for u in ("", "u") for b in (8, 16, 32, 64)),
    }
    assert {t.name for t in ELEMENT_TYPES if t.in_schema} == names | {"complex64", "complex128"}
    assert all(t.ort for t in ELEMENT_TYPES if t.delayed)


def test_what_is_not_in_the_table() -> None:
    for data_type in (0, 8, 99, -1):
        assert element_type_from_onnx(data_type) is None
    assert [onnx_type_name(t) for t in (0, 8, 99)] == ["UNDEFINED (0)", "STRING (8)", "unknown (99)"]
    assert element_type_from_safetensors("F128") is None
    assert element_type_from_dtype(np.dtype("U3")) is None
    assert element_type_from_dtype(np.dtype(ml_dtypes.int4)) is None


def test_byte_order_does_not_make_another_type() -> None:
    found = element_type_from_dtype(np.dtype(">f4"))
    assert found is not None
    assert found.onnx == onnx.TensorProto.FLOAT


def test_a_shape_beyond_all_storage_costs_no_time() -> None:
    (float32,) = (t for t in ELEMENT_TYPES if t.name == "float32")
    start = time.process_time()
    assert float32.nbytes([2**62] * 300_000) > 2**63
    assert float32.nbytes([*[2**62] * 300_000, 0]) == 0
    assert time.process_time() - start < 5
