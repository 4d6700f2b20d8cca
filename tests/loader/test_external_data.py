"""External-data entries to records and back."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import bits, external_initializer
from onnx import TensorProto, numpy_helper

from ort_delayed.loader.element_types import ELEMENT_TYPES
from ort_delayed.loader.external_data import ExternalDataError, external_tensor, has_external_data, set_external_data
from ort_delayed.loader.tensor_on_disk import TensorOnDisk


def test_entries_become_a_record() -> None:
    tensor = external_initializer("w", bits("float32", (2, 3)), "sub/w.bin", 64)
    assert has_external_data(tensor)
    assert external_tensor(tensor, "/m") == TensorOnDisk("w", "/m/sub/w.bin", 64, 24, (2, 3), ELEMENT_TYPES[0])


def test_links_are_not_shortened_away() -> None:
    tensor = external_initializer("w", bits("float32", ()), "link/../w.bin", 0)
    assert external_tensor(tensor, "/m").path == "/m/link/../w.bin"


@pytest.mark.parametrize("length", ["", "0", None])
def test_an_absent_length_is_what_the_shape_needs(length: str | None) -> None:
    tensor = external_initializer("w", bits("float16", (5,)), "w.bin", 0)
    if length is None:
        del tensor.external_data[1:]
    else:
        tensor.external_data[2].value = length
    record = external_tensor(tensor, "/m")
    assert (record.offset, record.nbytes) == (0, 10)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("location", "", "no usable 'location'"),
        ("location", "a\0b", "no usable 'location'"),
        ("offset", "-1", "'offset' must be a number of bytes from 0 on, found '-1'"),
        ("offset", "1.5", "'offset' must be"),
        ("offset", str(2**63), "'offset' must be"),
        ("length", "7", "'length' is 7, a tensor of float16 and shape \\[5\\] takes 10 bytes"),
        ("length", "-10", "'length' must be"),
    ],
)
def test_entries_that_say_nothing(key: str, value: str, said: str) -> None:
    tensor = external_initializer("w", bits("float16", (5,)), "w.bin", 0)
    for e in tensor.external_data:
        if e.key == key:
            e.value = value
    with pytest.raises(ExternalDataError, match=f"initializer 'w': external data.*{said}"):
        external_tensor(tensor, "/m")


@pytest.mark.parametrize("dims", [[-1], [2**62, 4], [2**40, 2**40]])
def test_shapes_that_cannot_be_stored(dims: list[int]) -> None:
    tensor = external_initializer("w", bits("float32", ()), "w.bin", 0)
    tensor.dims[:] = dims
    with pytest.raises(ExternalDataError, match="are not a shape of a tensor that can be stored"):
        external_tensor(tensor, "/m")


@pytest.mark.parametrize("data_type", [TensorProto.STRING, TensorProto.UNDEFINED, 99])
def test_types_without_raw_storage(data_type: int) -> None:
    tensor = external_initializer("w", bits("float32", ()), "w.bin", 0)
    tensor.data_type = data_type
    with pytest.raises(ExternalDataError, match="has no raw storage"):
        external_tensor(tensor, "/m")


def test_a_tensor_is_made_external() -> None:
    tensor = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3), "w")
    assert not has_external_data(tensor)
    set_external_data(tensor, "w.bin", 64, 24)
    assert not tensor.HasField("raw_data")
    assert external_tensor(tensor, "/m") == TensorOnDisk("w", "/m/w.bin", 64, 24, (2, 3), ELEMENT_TYPES[0])
    tensor.external_data.add(key="prepacked_0", value="x|1;2;0")
    tensor.external_data.add(key="checksum", value="old")
    set_external_data(tensor, "v.bin", 0, 24, keep=["prepacked_"])
    assert [(e.key, e.value) for e in tensor.external_data] == [
        ("location", "v.bin"),
        ("offset", "0"),
        ("length", "24"),
        ("prepacked_0", "x|1;2;0"),
    ]


def test_typed_fields_are_cleared_too() -> None:
    tensor = TensorProto(name="w", dims=[2], data_type=TensorProto.FLOAT, float_data=[1, 2])
    set_external_data(tensor, "w.bin", 0, 8)
    assert len(tensor.float_data) == 0
