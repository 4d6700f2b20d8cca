"""``make_node``: what it makes is what the specification and ``read_attributes`` want."""

import numpy as np
import onnx
import pytest

from ort_delayed.ops import DelayedInitializerError, make_node
from ort_delayed.ops.attributes import read_attributes


def test_all_six_attributes_are_written() -> None:
    node = make_node("w", filename="a.bin", shape=(2, 3), dtype=10, offset=16, load_device="cpu", name="n")
    assert (node.domain, node.op_type, list(node.input), list(node.output)) == (
        "ai.rt",
        "DelayedInitializer",
        [],
        ["w"],
    )
    assert {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} == {
        "dtype": 10,
        "filename": b"a.bin",
        "load_device": b"cpu",
        "offset": 16,
        "runtime_device": b"cpu",
        "shape": [2, 3],
    }


def test_defaults() -> None:
    attributes = read_attributes(make_node("w", filename="a.bin", shape=[], dtype=1))
    assert (attributes.offset, attributes.load_device, attributes.runtime_device) == (0, "file", "cpu")
    assert attributes.shape == ()


def test_the_type_of_an_empty_shape_is_written() -> None:
    (shape,) = [a for a in make_node("w", filename="a.bin", shape=[], dtype=1).attribute if a.name == "shape"]
    assert shape.type == onnx.AttributeProto.INTS


def test_numpy_integers_are_taken() -> None:
    node = make_node("w", filename="a", shape=np.array([2, 3]), dtype=np.int32(1), offset=np.int64(8))
    assert read_attributes(node).nbytes == 24


@pytest.mark.parametrize("bad", [{"dtype": 8}, {"offset": -1}, {"filename": ""}, {"load_device": "disk"}])
def test_bad_values_are_refused_at_once(bad: dict[str, object]) -> None:
    settings = {"filename": "a.bin", "shape": [2], "dtype": 1, **bad}
    with pytest.raises(DelayedInitializerError):
        make_node("w", **settings)
