"""restore_model: initializers again, that ONNX Runtime and onnx.load both take, wherever the payloads stand."""

import os

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from weighted_models import initializer, model, node, run_plain, same_bits, save, value, weights

import ort_delayed
from ort_delayed import convert_model, restore_model
from ort_delayed.ops import make_node
from ort_delayed.ops.errors import DelayedInitializerValueError

N = 1100
X = {"x": weights(N, seed=9)}
WEIGHT = weights(N)


def delayed_model(filename, *, dtype=TensorProto.FLOAT, shape=(N,), operator="Add", **settings):
    """``y = operator(x, w)`` where ``w`` is delayed."""
    made = model(
        [make_node("w", filename=str(filename), shape=shape, dtype=dtype), node(operator, ["x", "w"], ["y"])],
        [value("x", [N], dtype if operator == "Add" else 1)],
        [value("y", [N] if operator == "Add" else ["rows", "columns"], dtype if operator == "Add" else 1)],
        **settings,
    )
    del made.opset_import[1:]
    made.opset_import.add(domain="ai.rt", version=1)
    return made


def entries(path):
    graph = onnx.load(path, load_external_data=False).graph
    return {t.name: {e.key: e.value for e in t.external_data} for t in graph.initializer}


def check(path, expected=X["x"] + WEIGHT):
    """Both runtimes load it; nothing of ours is left in it."""
    loaded = onnx.load(path)
    onnx.checker.check_model(loaded, full_check=True)
    assert "ai.rt" not in {o.domain for o in loaded.opset_import}
    assert same_bits(run_plain(path, X), [expected])
    return loaded


def test_a_payload_below_the_destination_is_referenced_where_it_stands(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(b"pad!" + WEIGHT.tobytes())
    made = delayed_model("sub/w.bin")
    made.graph.node[0].attribute[[a.name for a in made.graph.node[0].attribute].index("offset")].i = 4
    report = restore_model(save(made, tmp_path / "m.onnx"), tmp_path / "restored.onnx")
    assert entries(tmp_path / "restored.onnx")["w"] == {"location": "sub/w.bin", "offset": "4", "length": str(4 * N)}
    assert (report.tensor("w").action, report.data_file) == ("referenced", None)
    check(tmp_path / "restored.onnx")


def absolute(directory):
    return directory / "model" / "w.bin"


def through_parent(directory):
    (directory / "w.bin").write_bytes(WEIGHT.tobytes())
    return "../w.bin"


def link_to_file(directory):
    os.symlink("w.bin", directory / "model" / "link.bin")
    return "link.bin"


def link_to_directory(directory):
    (directory / "elsewhere").mkdir()
    (directory / "elsewhere" / "v.bin").write_bytes(WEIGHT.tobytes())
    os.symlink("../elsewhere", directory / "model" / "linked")
    return "linked/v.bin"


def hard_link(directory):
    os.link(directory / "model" / "w.bin", directory / "model" / "second.bin")
    return "second.bin"


def link_inside(directory):
    os.symlink(".", directory / "model" / "here")
    return "here/w.bin"


@pytest.mark.parametrize(
    ("place", "copied"),
    [
        (absolute, False),
        (through_parent, True),
        (link_to_file, True),
        (link_to_directory, True),
        (hard_link, True),
        (link_inside, False),
    ],
)
def test_what_some_runtime_would_not_reach_is_copied(tmp_path, place, copied):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w.bin").write_bytes(WEIGHT.tobytes())
    source = save(delayed_model(place(tmp_path)), tmp_path / "model" / "m.onnx")
    report = restore_model(source, tmp_path / "model" / "restored.onnx")
    assert report.tensor("w").action == ("written" if copied else "referenced")
    location = entries(tmp_path / "model" / "restored.onnx")["w"]["location"]
    assert location == (os.path.basename(report.data_file) if copied else "w.bin")
    check(tmp_path / "model" / "restored.onnx")


def test_in_another_directory_everything_is_copied_and_the_same_bytes_once(tmp_path):
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes())
    made = delayed_model("w.bin")
    made.graph.node.extend([make_node("v", filename="w.bin", shape=[N], dtype=1), node("Sub", ["y", "v"], ["z"])])
    made.graph.output[0].name = "z"
    (tmp_path / "out").mkdir()
    report = restore_model(save(made, tmp_path / "m.onnx"), tmp_path / "out" / "restored.onnx")
    assert report.data_bytes == 4 * N
    assert report.count("written") == 2
    os.unlink(tmp_path / "w.bin")
    check(tmp_path / "out" / "restored.onnx", X["x"] + WEIGHT - WEIGHT)


def test_small_payloads_and_what_is_needed_while_loading_go_into_the_model(tmp_path):
    shape = np.ones(200, np.int64)
    shape[0] = N
    (tmp_path / "w.bin").write_bytes(np.array([1, N]).tobytes())
    (tmp_path / "long.bin").write_bytes(shape.tobytes())
    for filename, dims, reason in [("w.bin", [2], "smaller than 1024 bytes"), ("long.bin", [200], "Reshape reads it")]:
        made = delayed_model(filename, dtype=TensorProto.INT64, shape=dims, operator="Reshape")
        path = tmp_path / f"{filename}.onnx"
        report = restore_model(save(made, tmp_path / "m.onnx"), path, overwrite=True)
        assert (report.tensor("w").action, report.tensor("w").path) == ("inlined", None)
        assert reason in report.tensor("w").reason
        assert entries(path) == {"w": {}}
    check(tmp_path / "w.bin.onnx", X["x"].reshape(1, N))


def test_a_payload_without_elements_needs_no_file(tmp_path):
    (tmp_path / "w.bin").write_bytes(b"")
    made = model([make_node("w", filename="w.bin", shape=[0, 3], dtype=1)], [], [value("w", [0, 3])])
    made.opset_import.add(domain="ai.rt", version=1)
    restore_model(save(made, tmp_path / "m.onnx"), tmp_path / "restored.onnx")
    assert entries(tmp_path / "restored.onnx") == {"w": {}}
    assert run_plain(tmp_path / "restored.onnx")[0].shape == (0, 3)


def test_a_delayed_node_that_is_an_output_of_the_model_or_of_a_branch(tmp_path):
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes())
    branch = helper.make_graph([make_node("b", filename="w.bin", shape=[N], dtype=1)], "branch", [], [value("b", [N])])
    made = delayed_model("w.bin")
    made.graph.node.append(node("If", ["flag"], ["z"], then_branch=branch, else_branch=branch))
    made.graph.input.append(value("flag", [], TensorProto.BOOL))
    made.graph.output.extend([value("w", [N]), value("z", [N])])
    restore_model(save(made, tmp_path / "m.onnx"), tmp_path / "restored.onnx")
    onnx.load(tmp_path / "restored.onnx")
    found = run_plain(tmp_path / "restored.onnx", {**X, "flag": np.array(True)})
    assert same_bits(found, [X["x"] + WEIGHT, WEIGHT, WEIGHT])


def test_functions_get_constants(tmp_path):
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes())
    function = helper.make_function(
        "local",
        "F",
        ["x"],
        ["y"],
        [
            make_node("w", filename="w.bin", shape=[N], dtype=1, name="kept name"),
            make_node("s", filename="w.bin", shape=[1], dtype=1),
            node("G", ["x", "w", "s"], ["y"], domain="other"),
        ],
        [helper.make_opsetid("ai.rt", 1), helper.make_opsetid("other", 1)],
    )
    inner = helper.make_function(
        "other",
        "G",
        ["x", "w", "s"],
        ["y"],
        [node("Add", ["x", "w"], ["t"]), node("Add", ["t", "s"], ["y"])],
        [helper.make_opsetid("", 17)],
    )
    made = model([node("F", ["x"], ["y"], domain="local")], [value("x", [N])], [value("y", [N])], [], [function, inner])
    made.opset_import.add(domain="other", version=1)
    report = restore_model(save(made, tmp_path / "m.onnx"), tmp_path / "restored.onnx")
    assert [report.tensor(n).action for n in "ws"] == ["referenced", "inlined"]
    loaded = check(tmp_path / "restored.onnx", X["x"] + WEIGHT + WEIGHT[:1])
    nodes = loaded.functions[0].node
    assert [(n.op_type, n.name) for n in nodes[:2]] == [("Constant", "kept name"), ("Constant", "")]
    # A Constant is a standard operator, which this function had not imported.
    assert {o.domain: o.version for o in loaded.functions[0].opset_import} == {"": 17, "other": 1}


def test_a_model_that_another_project_wrote(tmp_path):
    """onnx-light writes absolute file names, one node a weight, and the shape first."""
    path = tmp_path / "onnx_light_backend_delayedinitializer_cpu.bin"
    path.write_bytes(WEIGHT.tobytes())
    made = delayed_model(path)
    attributes = sorted(made.graph.node[0].attribute, key=lambda a: a.name, reverse=True)
    del made.graph.node[0].attribute[:]
    made.graph.node[0].attribute.extend(attributes)
    restore_model(save(made, tmp_path / "m.onnx"), tmp_path / "restored.onnx")
    check(tmp_path / "restored.onnx")


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_payloads_which_onnx_runtime_has_not(tmp_path, dtype):
    array = (weights(200) + 1j * weights(200, seed=1)).astype(dtype)
    (tmp_path / "w.bin").write_bytes(array.tobytes())
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    made = model([make_node("w", filename="w.bin", shape=[200], dtype=kind)], [], [value("w", [200], kind)])
    made.opset_import.add(domain="ai.rt", version=1)
    restore_model(save(made, tmp_path / "m.onnx"), tmp_path / "restored.onnx")
    loaded = onnx.load(tmp_path / "restored.onnx")
    assert onnx.numpy_helper.to_array(loaded.graph.initializer[0]).tobytes() == array.tobytes()
    assert same_bits(ReferenceEvaluator(loaded).run(None, {}), [array])


@pytest.mark.parametrize(
    ("content", "kind", "text"),
    [(None, FileNotFoundError, "does not exist"), (bytes(40), EOFError, f"{4 * N} bytes needed, 40 found")],
)
def test_a_payload_that_is_not_there_is_refused_before_anything_is_written(tmp_path, content, kind, text):
    if content is not None:
        (tmp_path / "w.bin").write_bytes(content)
    source = save(delayed_model("w.bin"), tmp_path / "m.onnx")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(kind, match=text) as caught:
        restore_model(source, tmp_path / "restored.onnx")
    assert isinstance(caught.value, ort_delayed.DelayedInitializerError)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_node_that_the_specification_does_not_allow_is_refused(tmp_path):
    made = delayed_model("w.bin")
    del made.graph.node[0].attribute[0]
    with pytest.raises(ort_delayed.DelayedInitializerError, match="lacks the required attribute"):
        restore_model(save(made, tmp_path / "m.onnx"), tmp_path / "restored.onnx")


def test_a_function_that_nothing_calls_and_calls_would_complete_is_refused(tmp_path):
    held = make_node("w", filename="w.bin", shape=[N], dtype=1)
    next(a for a in held.attribute if a.name == "filename").ref_attr_name = "file"
    function = helper.make_function("local", "F", [], ["w"], [held], [helper.make_opsetid("ai.rt", 1)], ["file"])
    made = model([node("Identity", ["x"], ["y"])], [value("x", [N])], [value("y", [N])], [], [function])
    with pytest.raises(ValueError, match="nothing calls the function"):
        restore_model(save(made, tmp_path / "m.onnx"), tmp_path / "restored.onnx")


def test_initializers_that_are_external_already_come_within_reach_too(tmp_path):
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes())
    os.symlink("w.bin", tmp_path / "link.bin")
    made = delayed_model("w.bin")
    made.graph.initializer.append(initializer("v", WEIGHT))
    made.graph.initializer[0].ClearField("raw_data")
    made.graph.initializer[0].data_location = TensorProto.EXTERNAL
    made.graph.initializer[0].external_data.add(key="location", value="link.bin")
    made.graph.node.append(node("Sub", ["y", "v"], ["z"]))
    made.graph.output[0].name = "z"
    report = restore_model(save(made, tmp_path / "m.onnx"), tmp_path / "restored.onnx")
    assert "it is external data already; put into the model" in report.tensor("v").reason
    check(tmp_path / "restored.onnx", X["x"] + WEIGHT - WEIGHT)


def test_restoring_a_conversion_moves_nothing(tmp_path):
    made = model([node("Add", ["x", "w"], ["y"])], [value("x", [N])], [value("y", [N])], [initializer("w", WEIGHT)])
    report = convert_model(save(made, tmp_path / "m.onnx"), tmp_path / "converted.onnx")
    restored = restore_model(tmp_path / "converted.onnx", tmp_path / "restored.onnx")
    assert restored.data_file is None
    assert entries(tmp_path / "restored.onnx")["w"]["location"] == os.path.basename(report.data_file)
    check(tmp_path / "restored.onnx")


@pytest.mark.parametrize("what", ["initializer", "input", "delayed node"])
def test_two_values_of_one_name_are_refused(what, tmp_path):
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes())
    made = delayed_model("w.bin")
    if what == "initializer":
        made.graph.initializer.append(initializer("w", WEIGHT))
    elif what == "input":
        made.graph.input.append(value("w", [N]))
    else:
        made.graph.node.insert(0, made.graph.node[0])
    path = save(made, tmp_path / "m.onnx")
    with pytest.raises(DelayedInitializerValueError, match="has the name of what it yields"):
        restore_model(path, tmp_path / "restored.onnx")
    assert not (tmp_path / "restored.onnx").exists()
