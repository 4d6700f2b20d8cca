"""The schema: ``onnx.checker`` and ``onnx.shape_inference`` know the op."""

from __future__ import annotations

import importlib
import subprocess
import sys

import onnx
import onnx.defs
import pytest
from delayed_models import FLOAT, delayed, function, model, node, value
from onnx import helper

import ort_delayed.ops
import ort_delayed.ops.op_schema


def registered() -> onnx.defs.OpSchema:
    return onnx.defs.get_schema("DelayedInitializer", domain="ai.rt")


def test_the_schema_is_registered_and_documented() -> None:
    schema = registered()
    assert schema.since_version == 1
    assert {n for n, a in schema.attributes.items() if a.required} == {
        "dtype",
        "filename",
        "load_device",
        "offset",
        "runtime_device",
        "shape",
    }
    assert all(a.description for a in schema.attributes.values())
    assert len(schema.doc) > 200
    assert (len(schema.inputs), len(schema.outputs)) == (0, 1)
    assert ort_delayed.ops.schema.name == "DelayedInitializer"


def test_the_types_are_those_of_the_specification() -> None:
    (constraint,) = registered().type_constraints
    expected = "bool complex128 complex64 double float float16 int16 int32 int64 int8 uint16 uint32 uint64 uint8"
    assert sorted(constraint.allowed_type_strs) == [f"tensor({t})" for t in expected.split()]


@pytest.mark.parametrize(("shape", "dtype"), [([], 1), ([0, 3], 10), ([1, 2, 3, 4, 5, 6, 7, 8], 7), ([5], 15)])
def test_shape_inference(shape: list[int], dtype: int) -> None:
    made = model(
        [delayed("w", shape, dtype=dtype), node("Identity", ["w"], ["y"])], [], [value("y", [None] * len(shape), dtype)]
    )
    onnx.checker.check_model(made, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(made, strict_mode=True)
    (found,) = [v for v in inferred.graph.value_info if v.name == "w"]
    assert found.type.tensor_type.elem_type == dtype
    assert [d.dim_value for d in found.type.tensor_type.shape.dim] == shape


def test_a_contradicting_declaration_fails_the_full_check() -> None:
    made = model([delayed("y", [2, 3])], [], [value("y", [3, 2])])
    with pytest.raises(onnx.shape_inference.InferenceError):
        onnx.checker.check_model(made, full_check=True)


@pytest.mark.parametrize("name", ["dtype", "filename", "load_device", "offset", "runtime_device", "shape"])
def test_the_checker_demands_every_attribute(name: str) -> None:
    made = model([delayed("y", [2])], [], [value("y", [2])])
    kept = [a for a in made.graph.node[0].attribute if a.name != name]
    del made.graph.node[0].attribute[:]
    made.graph.node[0].attribute.extend(kept)
    with pytest.raises(onnx.checker.ValidationError, match=name):
        onnx.checker.check_model(made)


def test_the_checker_refuses_inputs() -> None:
    made = model([delayed("y", [2])], [value("x", [2])], [value("y", [2])])
    made.graph.node[0].input.append("x")
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(made)


def test_reference_attributes_in_a_function_are_inferred_at_the_call() -> None:
    body = delayed("w", [1])
    for attribute in body.attribute:
        if attribute.name == "shape":
            attribute.CopyFrom(
                onnx.AttributeProto(name="shape", type=onnx.AttributeProto.INTS, ref_attr_name="weight_shape")
            )
    made = model(
        [helper.make_node("F", ["x"], ["y"], domain="local", weight_shape=[4, 5])],
        [value("x", [3, 4])],
        [value("y", [None, None])],
        functions=[function("F", ["a"], ["b"], [body, node("MatMul", ["a", "w"], ["b"])], attributes=["weight_shape"])],
    )
    onnx.checker.check_model(made, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(made, strict_mode=True)
    output = inferred.graph.output[0].type.tensor_type
    assert (output.elem_type, [d.dim_value for d in output.shape.dim]) == (FLOAT, [3, 5])


def test_registering_twice_and_reloading_are_harmless() -> None:
    ort_delayed.ops.op_schema.register_schema()
    importlib.reload(ort_delayed.ops.op_schema)
    importlib.reload(ort_delayed.ops)
    onnx.checker.check_model(model([delayed("y", [2])], [], [value("y", [2])]), full_check=True)


def test_a_process_that_imported_the_op_ends() -> None:
    # onnx 1.19 hangs and 1.20 to 1.22 crash at exit on a schema with a Python inference function that is still there.
    done = subprocess.run([sys.executable, "-c", "import ort_delayed.ops"], timeout=60, check=False)
    assert done.returncode == 0
