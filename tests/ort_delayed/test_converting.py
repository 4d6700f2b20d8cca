"""convert_model: everything else of a model, delayed nodes that it has already, the report."""

import os
import shutil

import onnx
import pytest
from conversions import N, X, check_runs, converted_nodes, vector_model
from onnx import helper
from weighted_models import (
    external,
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

from ort_delayed import convert_model, restore_model
from ort_delayed.ops import make_node


def test_everything_else_stays_as_it_was(tmp_path):
    made = vector_model(initializer("w0", weights(N)), initializer("scale", weights(1)))
    made.producer_name, made.producer_version, made.domain, made.model_version = "p", "1", "d", 7
    made.doc_string = made.graph.doc_string = "documented"
    made.metadata_props.add(key="k", value="v")
    made.graph.initializer[0].doc_string = "a weight"
    made.graph.initializer[0].metadata_props.add(key="who", value="me")
    made.graph.value_info.extend([value("y0", [N]), value("w0", [N])])
    annotation = made.graph.quantization_annotation.add(tensor_name="w0")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="scale")
    source = save(made, tmp_path / "m.onnx")
    check_runs(source, tmp_path)
    converted = onnx.load(tmp_path / "converted.onnx")
    assert (converted.graph.node[0].doc_string, converted.graph.node[0].metadata_props[0].value) == ("a weight", "me")
    assert [(o.domain, o.version) for o in converted.opset_import] == [("", 17), ("ai.rt", 1)]
    restored = onnx.load(tmp_path / "restored.onnx")
    restored.graph.initializer.reverse()
    assert [t.name for t in restored.graph.initializer] == ["w0", "scale"]
    restored.graph.initializer[0].ClearField("data_location")
    assert restored == made
    del converted.opset_import[1], converted.graph.node[0]
    del made.graph.initializer[0]
    assert converted == made


def test_the_domain_is_imported_once(tmp_path):
    made = vector_model(initializer("w0", weights(N)))
    made.opset_import.add(domain="ai.rt", version=1)
    convert_model(save(made, tmp_path / "m.onnx"), tmp_path / "converted.onnx")
    assert [o.domain for o in onnx.load(tmp_path / "converted.onnx").opset_import] == ["", "ai.rt"]


def test_load_device(tmp_path):
    source = save(vector_model(initializer("w0", weights(N))), tmp_path / "m.onnx")
    check_runs(source, tmp_path, load_device="cpu")
    assert converted_nodes(tmp_path / "converted.onnx")["w0"].load_device == "cpu"
    with pytest.raises(ValueError, match="load_device must be 'cpu' or 'file', found 'gpu'"):
        convert_model(source, tmp_path / "b.onnx", load_device="gpu")


def delayed_model(directory, filename="old.bin"):
    array = weights(N, seed=1)
    (directory / "old.bin").write_bytes(array.tobytes())
    made = vector_model(initializer("w0", weights(N)))
    made.graph.node.insert(0, make_node("old", filename=filename, shape=[N], dtype=1, load_device="cpu"))
    made.graph.node[-1].output[0] = "z"
    made.graph.node.append(node("Add", ["z", "old"], ["y0"]))
    made.opset_import.add(domain="ai.rt", version=1)
    return save(made, directory / "m.onnx"), [X["x"] + weights(N) + array]


def test_delayed_nodes_of_the_source_stay_and_their_files_are_named_from_the_new_directory(tmp_path):
    (tmp_path / "near" / "deep").mkdir(parents=True)
    (tmp_path / "far").mkdir()
    source, expected = delayed_model(tmp_path / "near" / "deep")
    for directory, name in [
        ("near/deep", "old.bin"),
        ("near", "deep/old.bin"),
        ("far", f"{tmp_path}/near/deep/old.bin"),
    ]:
        path = tmp_path / directory / "converted.onnx"
        report = convert_model(source, path)
        nodes = converted_nodes(path)
        assert nodes["old"].filename == name
        assert (nodes["old"].load_device, nodes["w0"].load_device) == ("cpu", "file")
        row = report.tensor("old")
        assert (row.kind, row.action, row.path) == ("delayed node", "kept", name)
        assert ("whose file was named 'old.bin'" in row.reason) == (name != "old.bin")
        assert same_bits(run_delayed(path, X), expected)


def test_copy_brings_the_payloads_of_delayed_nodes_too(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    source, expected = delayed_model(tmp_path / "a")
    convert_model(source, tmp_path / "b" / "m.onnx", copy=True)
    shutil.rmtree(tmp_path / "a")
    assert same_bits(run_delayed(tmp_path / "b" / "m.onnx", X), expected)


def test_a_delayed_node_that_calls_complete_can_only_stay_where_it_is(tmp_path):
    held = make_node("w", filename="w.bin", shape=[N], dtype=1)
    next(a for a in held.attribute if a.name == "filename").ClearField("s")
    next(a for a in held.attribute if a.name == "filename").ref_attr_name = "file"
    function = helper.make_function(
        "local",
        "F",
        ["x"],
        ["y"],
        [held, node("Add", ["x", "w"], ["y"])],
        [helper.make_opsetid("", 17), helper.make_opsetid("ai.rt", 1)],
        ["file"],
    )
    (tmp_path / "w.bin").write_bytes(weights(N).tobytes())
    made = model(
        [node("F", ["x"], ["y"], domain="local", file="w.bin")], [value("x", [N])], [value("y", [N])], [], [function]
    )
    source = save(made, tmp_path / "m.onnx")
    convert_model(source, tmp_path / "same.onnx")
    assert same_bits(run_delayed(tmp_path / "same.onnx", X), [X["x"] + weights(N)])
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="each call of the function gives its attributes"):
        convert_model(source, tmp_path / "other" / "m.onnx")
    restore_model(source, tmp_path / "other" / "restored.onnx")
    assert same_bits(run_plain(tmp_path / "other" / "restored.onnx", X), [X["x"] + weights(N)])


def test_kept_external_tensors_stay_within_reach_of_the_new_model(tmp_path):
    (tmp_path / "near" / "deep").mkdir(parents=True)
    (tmp_path / "far").mkdir()
    deep = tmp_path / "near" / "deep"
    large, small = weights(20000, seed=1), weights(N)
    (deep / "w.bin").write_bytes(large.tobytes() + small.tobytes())
    made = vector_model(external("w0", small, "w.bin", 80000, 4 * N))
    made.graph.initializer.append(external("large", large, "w.bin", 0, 80000))
    made.graph.initializer[1].external_data.add(key="prepacked_0", value="key|0;4;0")
    made.graph.node.append(node("Identity", ["large"], ["z"]))
    made.graph.output.append(value("z", [20000]))
    source = save(made, deep / "m.onnx")
    expected = [X["x"] + small, large]
    reasons = {}
    for directory in ("near/deep", "near", "far"):
        path = tmp_path / directory / "converted.onnx"
        report = convert_model(source, path, select=())
        graph = onnx.load(path, load_external_data=False).graph
        entries = [{e.key: e.value for e in t.external_data} for t in graph.initializer]
        reasons[directory] = [e.get("location") for e in entries]
        # A prepacked range belongs to the file that it was written for.
        assert ("prepacked_0" in entries[1]) == (directory != "far")
        assert same_bits(run_plain(path, X), expected)
    assert reasons == {
        "near/deep": ["w.bin", "w.bin"],
        "near": ["deep/w.bin", "deep/w.bin"],
        "far": [None, os.path.basename(report.data_file)],
    }
    assert "copied to the data file as external data" in report.tensor("large").reason
    assert "put into the model" in report.tensor("w0").reason


def test_the_report_is_a_table_with_totals(tmp_path):
    made = vector_model(initializer("w0", weights(N)), initializer("w1", weights(1)))
    report = convert_model(save(made, tmp_path / "m.onnx"), tmp_path / "converted.onnx")
    lines = str(report).splitlines()
    assert lines[0] == f"{tmp_path / 'm.onnx'} -> {tmp_path / 'converted.onnx'}"
    assert lines[2].split() == ["tensor", "graph", "type", "bytes", "action", "where", "or", "why"]
    assert lines[3].split()[:6] == ["w0", "main", "graph", f"float32[{N}]", str(4 * N), "written"]
    assert lines[4].endswith("kept     smaller than min_bytes=4096")
    assert lines[6:] == [
        "written: 1 tensors, 4.297 KiB",
        "kept: 1 tensors, 4 bytes",
        f"data file: {report.data_file}, 4.297 KiB",
    ]
    assert (report.count("written"), report.nbytes("written"), report.nbytes("kept")) == (1, 4 * N, 4)
    with pytest.raises(AttributeError):
        report.source = "other"  # type: ignore[misc]
    with pytest.raises(KeyError, match="0 tensors are named 'nobody'"):
        report.tensor("nobody")


def test_a_model_without_tensors(tmp_path):
    made = model([node("Identity", ["x"], ["y"])], [value("x", [N])], [value("y", [N])])
    report = check_runs(save(made, tmp_path / "m.onnx"), tmp_path)
    assert str(report).endswith("no tensors")
    assert onnx.load(tmp_path / "converted.onnx") == made
