"""The rules for a delayed node's attributes, each broken once."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
from delayed_models import delayed
from onnx import AttributeProto, TensorProto, helper

from ort_delayed.ops.attributes import Attributes, check_carried, is_delayed, read_attributes
from ort_delayed.ops.errors import DelayedInitializerTypeError, DelayedInitializerValueError

NAMES = ["dtype", "filename", "load_device", "offset", "runtime_device", "shape"]
CARRIED = [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13]
COMPLEX = [TensorProto.COMPLEX64, TensorProto.COMPLEX128]


def changed(**values: object) -> onnx.NodeProto:
    """A good node with some attributes replaced (None: removed)."""
    node = delayed("w", [2, 3], offset=8)
    kept = [a for a in node.attribute if a.name not in values]
    del node.attribute[:]
    node.attribute.extend(kept)
    for name, value in values.items():
        if value is not None:
            kind = AttributeProto.INTS if value == [] else None
            node.attribute.append(helper.make_attribute(name, value, attr_type=kind))
    return node


def test_a_good_node() -> None:
    attributes = read_attributes(delayed("w", [2, 3], "d/w.bin", offset=8, load_device="cpu"))
    assert (attributes.shape, attributes.filename, attributes.offset) == ((2, 3), "d/w.bin", 8)
    assert (attributes.element_type.name, attributes.load_device, attributes.runtime_device) == (
        "float32",
        "cpu",
        "cpu",
    )
    assert attributes.nbytes == 24


@pytest.mark.parametrize("name", NAMES)
def test_every_attribute_is_required(name: str) -> None:
    with pytest.raises(DelayedInitializerValueError, match=f"'w'.*lacks the required attribute '{name}'"):
        read_attributes(changed(**{name: None}))


def test_all_that_are_missing_are_named() -> None:
    with pytest.raises(DelayedInitializerValueError, match="attributes 'offset', 'shape'"):
        read_attributes(changed(offset=None, shape=None))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"load_device": "gpu"}, "load_device must be 'cpu' or 'file', found 'gpu'"),
        ({"load_device": ""}, "load_device must be"),
        ({"load_device": "CPU"}, "load_device must be"),
        ({"runtime_device": "cuda"}, "runtime_device must be 'cpu', found 'cuda'"),
        ({"shape": [2, -1]}, r"no negative number, found \[2, -1\]"),
        ({"shape": [2**31, 2**31, 2]}, "overflow"),
        ({"shape": [2**62, 0, 2**62]}, "overflow"),
        ({"shape": [2**61], "offset": 0}, "overflow"),
        ({"offset": 2**63 - 1}, "overflow"),
        ({"offset": -1}, "offset must be a number of bytes from 0 on, found -1"),
        ({"filename": ""}, "filename must name a file"),
        ({"filename": "a\0b"}, "filename must name a file"),
        ({"filename": b"\xff\xfe"}, "filename is not UTF-8"),
        ({"load_device": b"\xff"}, "load_device is not UTF-8"),
        ({"dtype": 1.0}, "'dtype' must be of type INT, found FLOAT"),
        ({"shape": 3}, "'shape' must be of type INTS, found INT"),
        ({"shape": [1.5]}, "'shape' must be of type INTS, found FLOATS"),
        ({"filename": 1}, "'filename' must be of type STRING, found INT"),
        ({"offset": "8"}, "'offset' must be of type INT, found STRING"),
    ],
)
def test_bad_values(values: dict[str, object], message: str) -> None:
    with pytest.raises(DelayedInitializerValueError, match=message) as caught:
        read_attributes(changed(**values))
    assert isinstance(caught.value, ValueError)
    assert "'w'" in str(caught.value.node)


@pytest.mark.parametrize("dtype", [0, 8, 16, 17, 20, 21, 22, 23, 24, 99, -1, 2**40])
def test_types_that_the_specification_does_not_allow(dtype: int) -> None:
    with pytest.raises(DelayedInitializerTypeError, match=rf"\({dtype}\).*must be one of FLOAT \(1\)") as caught:
        read_attributes(changed(dtype=dtype))
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("dtype", CARRIED + COMPLEX)
def test_types_that_it_allows(dtype: int) -> None:
    attributes = read_attributes(changed(dtype=dtype))
    assert attributes.element_type.onnx == dtype
    assert attributes.nbytes == 6 * helper.tensor_dtype_to_np_dtype(dtype).itemsize


@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_is_not_carried_by_onnxruntime(dtype: int) -> None:
    with pytest.raises(DelayedInitializerTypeError, match=r"onnx\.reference"):
        check_carried(read_attributes(changed(dtype=dtype)), "node")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n: n.input.append("x"), "takes no inputs, found"),
        (lambda n: n.output.append("v"), "exactly one output"),
        (lambda n: n.ClearField("output"), "exactly one output"),
        (lambda n: n.output.__setitem__(0, ""), "exactly one output"),
        (lambda n: n.attribute.append(n.attribute[0]), "twice"),
    ],
)
def test_inputs_outputs_and_repetitions(change: Callable[[onnx.NodeProto], None], message: str) -> None:
    node = delayed("w", [2])
    change(node)
    with pytest.raises(DelayedInitializerValueError, match=message):
        read_attributes(node)


def test_an_empty_shape_whose_type_was_left_out_is_a_scalar() -> None:
    node = delayed("w", [])
    node.attribute[-1].ClearField("type")
    assert read_attributes(node).shape == ()


def test_reference_attributes_take_the_value_of_the_call() -> None:
    node = changed(offset=None)
    node.attribute.append(AttributeProto(name="offset", type=AttributeProto.INT, ref_attr_name="start"))
    bound = {"start": helper.make_attribute("start", 64)}
    assert read_attributes(node, bound).offset == 64
    with pytest.raises(DelayedInitializerValueError, match="refers to 'start', which the call does not give"):
        read_attributes(node)
    with pytest.raises(DelayedInitializerValueError, match="must be of type INT, found STRING"):
        read_attributes(node, {"start": helper.make_attribute("start", "64")})


def test_the_record_is_frozen() -> None:
    attributes = read_attributes(delayed("w", [2]))
    with pytest.raises(AttributeError):
        attributes.offset = 1  # type: ignore[misc]
    assert isinstance(attributes, Attributes)


def test_only_the_op_of_the_domain_is_delayed() -> None:
    assert is_delayed(delayed("w", [2]))
    assert not is_delayed(helper.make_node("DelayedInitializer", [], ["w"], domain="other"))
    assert not is_delayed(helper.make_node("DelayedInitializer", [], ["w"]))
