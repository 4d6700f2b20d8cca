"""convert_model: what stays a constant, and the reason that the report gives."""

import os

import numpy as np
import onnx
import pytest
from conversions import N, X, check_runs, converted_nodes, vector_model
from onnx import TensorProto, helper
from weighted_models import (
    initializer,
    model,
    node,
    run_delayed,
    run_plain,
    same_bits,
    save,
    value,
    weights,
)

from ort_delayed import convert_model


def test_what_an_alias_hands_to_an_operator_that_reads_shapes_stays(tmp_path):
    made = model(
        [node("Identity", ["shape"], ["alias"]), node("Reshape", ["x", "alias"], ["y"])],
        [value("x", [N])],
        [value("y", [1, N])],
        [initializer("shape", np.array([1, N]))],
    )
    report = check_runs(save(made, tmp_path / "m.onnx"), tmp_path, min_bytes=1)
    assert report.count("kept") == 1
    assert "Reshape" in report.tensor("shape").reason


def test_inputs_and_outputs_of_the_model_stay(tmp_path):
    made = vector_model(initializer("w0", weights(N)), initializer("w1", weights(N, seed=1)))
    made.graph.input.append(value("w0", [N]))
    made.graph.output.append(value("w1", [N]))
    report = check_runs(save(made, tmp_path / "m.onnx"), tmp_path)
    assert "caller may give another value" in report.tensor("w0").reason
    assert "output of the model" in report.tensor("w1").reason
    other = {**X, "w0": weights(N, seed=5)}
    assert same_bits(run_delayed(tmp_path / "converted.onnx", other), run_plain(tmp_path / "m.onnx", other))


def test_before_ir_version_4_listed_initializers_are_constants(tmp_path):
    made = vector_model(initializer("w0", weights(N)), initializer("small", weights(1)), ir_version=3, opset=8)
    made.graph.input.extend([value("w0", [N]), value("small", [1])])
    made.graph.input[1].doc_string = "the weight"
    source = save(made, tmp_path / "m.onnx")
    onnx.checker.check_model(made)
    report = check_runs(source, tmp_path)
    assert report.tensor("w0").action == "written"
    converted = onnx.load(tmp_path / "converted.onnx").graph
    assert [i.name for i in converted.input] == ["x", "small"]
    restored = onnx.load(tmp_path / "restored.onnx").graph
    assert sorted(i.name for i in restored.input) == ["small", "w0", "x"]
    assert [i.doc_string for i in restored.input if i.name == "w0"] == ["the weight"]


def test_types_that_the_op_cannot_carry_stay(tmp_path):
    packed = TensorProto(name="w4", data_type=TensorProto.INT4, dims=[20000], raw_data=bytes(10000))
    brain = TensorProto(name="wb", data_type=TensorProto.BFLOAT16, dims=[N], raw_data=bytes(2 * N))
    text = helper.make_tensor("text", TensorProto.STRING, [2], [b"a" * 5000, b"b"])
    made = vector_model(initializer("w0", weights(N)), opset=21, ir_version=10)
    made.graph.node.extend(node("Cast", [n], [f"{n}c"], to=1) for n in ("w4", "wb"))
    made.graph.node.append(node("Identity", ["text"], ["textc"]))
    made.graph.initializer.extend([packed, brain, text])
    made.graph.output.extend([value("w4c", [20000]), value("textc", [2], TensorProto.STRING)])
    report = check_runs(save(made, tmp_path / "m.onnx"), tmp_path)
    reasons = {t.name: t.reason for t in report.tensors if t.action == "kept"}
    assert reasons == {
        "w4": "ONNX Runtime's Python operators cannot carry int4",
        "wb": "ONNX Runtime's Python operators cannot carry bfloat16",
        "text": "ONNX Runtime's Python operators cannot carry STRING (8)",
    }


def test_complex_tensors_stay(tmp_path):
    made = vector_model(initializer("w0", weights(N)))
    made.graph.initializer.append(initializer("c", weights(N).astype(np.complex64)))
    report = convert_model(save(made, tmp_path / "m.onnx"), tmp_path / "converted.onnx")
    assert report.tensor("c").reason.endswith("cannot carry complex64")


def test_sparse_initializers_text_and_single_numbers_stay(tmp_path):
    made = vector_model(initializer("w0", weights(N)))
    values = initializer("sparse", weights(2))
    indices = TensorProto(name="at", data_type=7, dims=[2], int64_data=[1, 2])
    made.graph.sparse_initializer.append(onnx.SparseTensorProto(values=values, indices=indices, dims=[N]))
    made.graph.node.append(node("Constant", [], ["t"], value_strings=[b"a"]))
    made.graph.node.append(node("Constant", [], ["f"], value_float=1.0))
    made.graph.node.append(node("Add", ["x", "sparse"], ["z"]))
    report = check_runs(save(made, tmp_path / "m.onnx"), tmp_path, min_bytes=0)
    kept = {t.name: (t.kind, t.reason) for t in report.tensors if t.action == "kept"}
    assert kept == {
        "sparse": ("sparse initializer", "it is sparse"),
        "t": ("Constant", "it is text"),
        "f": ("Constant", "it is a single number"),
    }


def test_min_bytes(tmp_path):
    source = save(vector_model(initializer("w0", weights(N)), initializer("w1", weights(1))), tmp_path / "m.onnx")
    assert convert_model(source, tmp_path / "a.onnx").tensor("w1").reason == "smaller than min_bytes=4096"
    assert convert_model(source, tmp_path / "b.onnx", min_bytes=4 * N + 1).count("written") == 0
    assert not [name for name in os.listdir(tmp_path) if name.startswith("b.onnx.")]
    check_runs(source, tmp_path, min_bytes=4)
    assert set(converted_nodes(tmp_path / "converted.onnx")) == {"w0", "w1"}
    with pytest.raises(ValueError, match="from 0 on, found -1"):
        convert_model(source, tmp_path / "c.onnx", min_bytes=-1)


def test_select_by_patterns_and_by_a_callable(tmp_path):
    names = ["layer1.w", "layer1.b", "layer2.w"]
    source = save(vector_model(*(initializer(n, weights(N, seed=i)) for i, n in enumerate(names))), tmp_path / "m.onnx")
    report = convert_model(source, tmp_path / "a.onnx", select=["layer1.*", "nothing"])
    assert [t.name for t in report.tensors if t.action == "written"] == ["layer1.w", "layer1.b"]
    assert report.tensor("layer2.w").reason == "not selected"
    seen = []
    check_runs(source, tmp_path, select=lambda name, tensor: seen.append(tensor) or name.endswith(".w"))
    assert set(converted_nodes(tmp_path / "converted.onnx")) == {"layer1.w", "layer2.w"}
    assert [(t.name, list(t.dims), t.data_type, t.raw_data) for t in seen] == [(n, [N], 1, b"") for n in names]
    with pytest.raises(TypeError, match=r"write \['layer1\*'\]"):
        convert_model(source, tmp_path / "b.onnx", select="layer1*")


def test_operators_of_unknown_domains_keep_what_they_read(tmp_path):
    made = model(
        [node("Mystery", ["x", "w"], ["y"], domain="somebody.else")],
        [value("x", [N])],
        [value("y", [N])],
        [initializer("w", weights(N))],
    )
    report = convert_model(save(made, tmp_path / "m.onnx"), tmp_path / "converted.onnx")
    assert report.tensor("w").action == "kept"
    assert "somebody.else::Mystery reads it" in report.tensor("w").reason


def test_bodies_that_are_not_run_as_graphs_keep_their_constants(tmp_path):
    body = helper.make_graph(
        [node("Add", ["i", "w"], ["o"])], "body", [value("i", [N])], [value("o", [N])], [initializer("w", weights(N))]
    )
    made = model(
        [node("SequenceConstruct", ["x"], ["s"]), node("SequenceMap", ["s"], ["t"], body=body)],
        [value("x", [N])],
        [helper.make_tensor_sequence_value_info("t", 1, [N])],
    )
    report = convert_model(save(made, tmp_path / "m.onnx"), tmp_path / "converted.onnx")
    assert report.tensor("w").reason.startswith("it stands in a body of SequenceMap")
