"""convert_model: which constants become delayed nodes, where their payloads go, and that the numbers stay."""

import os
import shutil

import numpy as np
import onnx
import pytest
import safetensors.numpy
from onnx import TensorProto, helper, numpy_helper
from weighted_models import (
    constant,
    external,
    initializer,
    model,
    node,
    run_delayed,
    run_plain,
    same_bits,
    save,
    typed,
    value,
    weights,
)

import ort_delayed
from ort_delayed import convert_model, restore_model
from ort_delayed.graphs import bodies, iter_nodes
from ort_delayed.ops import make_node
from ort_delayed.ops.attributes import is_delayed, read_attributes

N = 1100  # elements of a float32 vector just above the default min_bytes
X = {"x": weights(N, seed=9)}


def vector_model(*tensors, **settings):
    """``y`` is the sum of ``x`` and every tensor (``w0``, ``w1``...), one Add a tensor."""
    nodes, last = [], "x"
    for index, tensor in enumerate(tensors):
        nodes.append(node("Add", [last, tensor.name], [f"y{index}"], name=f"add {index}"))
        last = f"y{index}"
    return model(nodes, [value("x", [N])], [value(last, [N])], tensors, **settings)


def converted_nodes(path):
    """The delayed nodes of the main graph by output name, with their attributes."""
    graph = onnx.load(path, load_external_data=False).graph
    return {n.output[0]: read_attributes(n) for n in graph.node if is_delayed(n)}


def check_runs(source, tmp_path, inputs=X, **options):
    """Convert, run, restore, run: all as the source; returns the conversion's report."""
    report = convert_model(source, tmp_path / "converted.onnx", **options)
    expected = run_plain(source, inputs)
    assert same_bits(run_delayed(tmp_path / "converted.onnx", inputs), expected)
    restore_model(tmp_path / "converted.onnx", tmp_path / "restored.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "restored.onnx"))
    assert same_bits(run_plain(tmp_path / "restored.onnx", inputs), expected)
    return report


# Storage


def test_raw_and_typed_values_go_to_one_page_aligned_data_file_in_order_of_first_use(tmp_path):
    first, second, third = (weights(N, seed=i) for i in range(3))
    made = vector_model(typed("w0", first), initializer("w1", second), typed("w2", third))
    made.graph.initializer.reverse()
    source = save(made, tmp_path / "m.onnx")
    before = source.read_bytes()
    report = check_runs(source, tmp_path)
    nodes = converted_nodes(tmp_path / "converted.onnx")
    assert list(nodes) == ["w0", "w1", "w2"]
    assert [a.offset for a in nodes.values()] == [0, 8192, 16384]
    data = np.memmap(report.data_file, np.uint8, "r")
    for a, array in zip(nodes.values(), (first, second, third), strict=True):
        assert data[a.offset : a.offset + a.nbytes].tobytes() == array.tobytes()
    assert os.path.getsize(report.data_file) == report.data_bytes == 16384 + 4 * N
    assert source.read_bytes() == before
    graph = onnx.load(tmp_path / "converted.onnx").graph
    assert [n.op_type for n in graph.node] == ["DelayedInitializer"] * 3 + ["Add"] * 3
    assert not graph.initializer


NARROW = ["bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64"]
NARROW += ["uint8", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize("store", [initializer, typed], ids=["raw", "typed"])
@pytest.mark.parametrize("dtype", NARROW)
def test_every_type_keeps_its_bytes(tmp_path, dtype, store):
    array = weights(5000, dtype=np.dtype(dtype).type)
    made = model(
        [node("Identity", ["w"], ["y"])], [], [value("y", [5000], helper.np_dtype_to_tensor_dtype(array.dtype))]
    )
    made.graph.initializer.append(store("w", array))
    source = save(made, tmp_path / "m.onnx")
    report = check_runs(source, tmp_path, {})
    assert report.tensor("w").action == "written"
    assert np.fromfile(report.data_file, array.dtype).tobytes() == array.tobytes()


def test_external_payloads_are_referenced_in_place(tmp_path):
    arrays = [weights(N, seed=i) for i in range(3)]
    (tmp_path / "a.bin").write_bytes(b"pad!" + arrays[0].tobytes())
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.bin").write_bytes(arrays[1].tobytes() + arrays[2].tobytes())
    tensors = [external("w0", arrays[0], "a.bin", 4), external("w1", arrays[1], "sub/b.bin", 0, 4 * N)]
    tensors += [external("w2", arrays[2], "sub/b.bin", 4 * N, 0), external("w3", arrays[1], "sub/b.bin", 0, 4 * N)]
    report = check_runs(save(vector_model(*tensors), tmp_path / "m.onnx"), tmp_path)
    nodes = converted_nodes(tmp_path / "converted.onnx")
    assert [(a.filename, a.offset) for a in nodes.values()] == [
        ("a.bin", 4),
        ("sub/b.bin", 0),
        ("sub/b.bin", 4 * N),
        ("sub/b.bin", 0),
    ]
    assert report.data_file is None
    assert report.count("referenced") == 4
    assert report.absolute_paths == ()


def test_a_safetensors_file_is_referenced_in_place(tmp_path):
    array = weights(N, seed=1)
    safetensors.numpy.save_file({"other": weights(7), "w": array}, tmp_path / "w.safetensors")
    data = (tmp_path / "w.safetensors").read_bytes()
    offset = data.index(array.tobytes())
    made = vector_model(external("w0", array, "w.safetensors", offset, 4 * N))
    check_runs(save(made, tmp_path / "m.onnx"), tmp_path)
    assert converted_nodes(tmp_path / "converted.onnx")["w0"].filename == "w.safetensors"


def test_copy_brings_external_payloads_into_the_data_file_and_the_same_bytes_once(tmp_path):
    arrays = [weights(N, seed=i) for i in range(2)]
    (tmp_path / "w.bin").write_bytes(arrays[0].tobytes() + arrays[1].tobytes())
    tensors = [
        external("w0", arrays[0], "w.bin"),
        external("w1", arrays[1], "w.bin", 4 * N),
        external("w2", arrays[0], "w.bin"),
    ]
    source = save(vector_model(*tensors), tmp_path / "m.onnx")
    expected = run_plain(source, X)
    (tmp_path / "out").mkdir()
    report = convert_model(source, tmp_path / "out" / "m.onnx", copy=True)
    assert [a.offset for a in converted_nodes(tmp_path / "out" / "m.onnx").values()] == [0, 8192, 0]
    assert report.data_bytes == 8192 + 4 * N
    os.unlink(tmp_path / "w.bin")
    assert same_bits(run_delayed(tmp_path / "out" / "m.onnx", X), expected)


def test_paths_are_relative_below_the_destination_and_absolute_otherwise_and_the_report_says_so(tmp_path):
    array = weights(N)
    (tmp_path / "far").mkdir()
    (tmp_path / "near" / "deep").mkdir(parents=True)
    (tmp_path / "near" / "deep" / "w.bin").write_bytes(array.tobytes())
    source = save(vector_model(external("w0", array, "w.bin")), tmp_path / "near" / "deep" / "m.onnx")
    expected = run_plain(source, X)
    report = convert_model(source, tmp_path / "near" / "m.onnx")
    assert converted_nodes(tmp_path / "near" / "m.onnx")["w0"].filename == "deep/w.bin"
    assert report.absolute_paths == ()
    report = convert_model(source, tmp_path / "far" / "m.onnx")
    path = str(tmp_path / "near" / "deep" / "w.bin")
    assert converted_nodes(tmp_path / "far" / "m.onnx")["w0"].filename == path
    assert report.absolute_paths == (path,)
    assert f"absolute paths, so the model needs them where they are: {path}" in str(report)
    assert same_bits(run_delayed(tmp_path / "far" / "m.onnx", X), expected)


def test_a_location_with_a_parent_behind_a_link_means_what_the_system_takes_it_for(tmp_path):
    array = weights(N)
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "link").symlink_to(tmp_path / "real" / "inner")
    (tmp_path / "real" / "w.bin").write_bytes(array.tobytes())
    source = save(vector_model(external("w0", array, "link/../w.bin")), tmp_path / "model" / "m.onnx")
    convert_model(source, tmp_path / "model" / "converted.onnx")
    assert converted_nodes(tmp_path / "model" / "converted.onnx")["w0"].filename == str(tmp_path / "real" / "w.bin")


def test_a_hub_cache_keeps_naming_its_links(tmp_path):
    array = weights(N)
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_bytes(vector_model(external("w0", array, "m.onnx_data")).SerializeToString())
    (blobs / "2").write_bytes(array.tobytes())
    (snapshot / "m.onnx").symlink_to("../../blobs/1")
    (snapshot / "m.onnx_data").symlink_to("../../blobs/2")
    convert_model(snapshot / "m.onnx", snapshot / "converted.onnx")
    assert converted_nodes(snapshot / "converted.onnx")["w0"].filename == "m.onnx_data"
    assert same_bits(run_delayed(snapshot / "converted.onnx", X), [X["x"] + array])


@pytest.mark.parametrize(
    ("content", "kind", "text"),
    [
        (None, FileNotFoundError, "does not exist"),
        (bytes(4 * N - 1), EOFError, rf"too short.*{4 * N} bytes needed, {4 * N - 1} found"),
    ],
)
@pytest.mark.parametrize("copy", [False, True])
def test_external_payloads_that_are_not_there_are_refused_before_anything_is_written(
    tmp_path, content, kind, text, copy
):
    if content is not None:
        (tmp_path / "w.bin").write_bytes(content)
    source = save(vector_model(external("w0", weights(N), "w.bin")), tmp_path / "m.onnx")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(kind, match=text) as caught:
        convert_model(source, tmp_path / "converted.onnx", copy=copy)
    assert isinstance(caught.value, ort_delayed.DelayedInitializerError)
    assert "'w0'" in str(caught.value)
    assert str(tmp_path / "w.bin") in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_malformed_tensor_is_refused_by_name(tmp_path):
    bad = TensorProto(name="w0", data_type=1, dims=[N], raw_data=bytes(4 * N + 4))
    with pytest.raises(ValueError, match=f"'w0' .* holds {4 * N + 4} bytes of values, {4 * N} are needed"):
        convert_model(save(vector_model(bad), tmp_path / "m.onnx"), tmp_path / "converted.onnx")


# Where constants stand


def branches_model():
    """Same-named weights in both branches, one captured from outside, Constants as outputs, an inner If."""
    inner = helper.make_graph(
        [node("Add", ["captured", "v"], ["i"])], "inner", [], [value("i", [N])], [initializer("v", weights(N, seed=3))]
    )
    then = helper.make_graph(
        [
            node("Add", ["captured", "w"], ["t0"]),
            node("If", ["flag"], ["t1"], then_branch=inner, else_branch=inner),
            node("Add", ["t0", "t1"], ["t"]),
        ],
        "then",
        [],
        [value("t", [N])],
        [initializer("w", weights(N, seed=1))],
    )
    other = helper.make_graph([constant("w", weights(N, seed=2))], "else", [], [value("w", [N])])
    return model(
        [node("If", ["flag"], ["b"], then_branch=then, else_branch=other), node("Add", ["x", "b"], ["y"])],
        [value("x", [N]), value("flag", [], TensorProto.BOOL)],
        [value("y", [N])],
        [initializer("captured", weights(N, seed=4))],
    )


@pytest.mark.parametrize("flag", [True, False])
def test_same_named_captured_and_yielded_weights_of_branches(tmp_path, flag):
    source = save(branches_model(), tmp_path / "m.onnx")
    report = check_runs(source, tmp_path, {**X, "flag": np.array(flag)})
    assert report.count("written") == 5
    assert report.tensor("w", "If '#0' 'then'").action == report.tensor("w", "If '#0' 'else'").action == "written"
    graph = onnx.load(tmp_path / "converted.onnx").graph
    assert is_delayed(graph.node[0])
    then, other = sorted((g for n in graph.node for g in bodies(n)), key=lambda g: g.name, reverse=True)
    assert [[n.op_type for n in g.node] for g in (then, other)] == [
        ["DelayedInitializer", "Add", "If", "Add"],
        ["DelayedInitializer"],
    ]


def test_weights_of_a_loop_body(tmp_path):
    body = helper.make_graph(
        [node("Add", ["a", "w"], ["a2"]), node("Add", ["a2", "c"], ["a3"]), node("Identity", ["keep"], ["keep2"])],
        "body",
        [value("i", [], 7), value("keep", [], 9), value("a", [N])],
        [value("keep2", [], 9), value("a3", [N])],
        [initializer("w", weights(N))],
    )
    body.node.insert(0, constant("c", weights(N, seed=2)))
    made = model(
        [node("Loop", ["trips", "", "x"], ["y"], body=body)],
        [value("x", [N])],
        [value("y", [N])],
        [initializer("trips", np.array(3))],
    )
    report = check_runs(save(made, tmp_path / "m.onnx"), tmp_path)
    assert {t.name for t in report.tensors if t.action == "written"} == {"w", "c"}


def test_weights_of_a_scan_body(tmp_path):
    body = helper.make_graph(
        [node("Add", ["s", "w"], ["s2"]), node("Add", ["s2", "e"], ["s3"]), node("Identity", ["s3"], ["o"])],
        "body",
        [value("s", [N]), value("e", [N])],
        [value("s3", [N]), value("o", [N])],
        [initializer("w", weights(N))],
    )
    made = model(
        [node("Scan", ["x", "all"], ["y", "z"], body=body, num_scan_inputs=1)],
        [value("x", [N])],
        [value("y", [N]), value("z", [2, N])],
        [initializer("all", weights(2, N))],
    )
    report = check_runs(save(made, tmp_path / "m.onnx"), tmp_path)
    assert {t.name for t in report.tensors if t.action == "written"} == {"w", "all"}


def functions_model(**settings):
    """A function with a Constant of its own, called twice, the second time through another function."""
    inner = helper.make_function(
        "local",
        "Inner",
        ["x"],
        ["y"],
        [constant("w", weights(N, seed=5)), node("Add", ["x", "w"], ["y"])],
        [helper.make_opsetid("", 17)],
    )
    branch = helper.make_graph([constant("b", weights(N, seed=6))], "branch", [], [value("b", None)])
    outer = helper.make_function(
        "local",
        "Outer",
        ["x", "flag", "shape", "given"],
        ["y"],
        [
            node("Inner", ["x"], ["a"], domain="local"),
            node("If", ["flag"], ["c"], then_branch=branch, else_branch=branch),
            node("Add", ["a", "c"], ["d"]),
            node("Reshape", ["d", "shape"], ["e"]),
            node("Add", ["e", "given"], ["y"]),
        ],
        [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)],
    )
    return model(
        [
            node("Inner", ["x"], ["i"], domain="local"),
            node("Outer", ["i", "flag", "shape", "given"], ["y"], domain="local"),
        ],
        [value("x", [N]), value("flag", [], TensorProto.BOOL)],
        [value("y", [N])],
        [initializer("shape", np.array([N])), initializer("given", weights(N, seed=7))],
        [inner, outer],
        **settings,
    )


def test_constants_of_functions_and_what_functions_are_given(tmp_path):
    source = save(functions_model(), tmp_path / "m.onnx")
    report = check_runs(source, tmp_path, {**X, "flag": np.array(True)}, min_bytes=8)
    assert report.tensor("w").graph == "function local::Inner"
    assert {t.name for t in report.tensors if t.action == "written"} == {"w", "b", "given"}
    # Inside the function it is a Reshape that reads it.
    assert "Reshape reads it as its input 'shape'" in report.tensor("shape").reason
    converted = onnx.load(tmp_path / "converted.onnx")
    for function in converted.functions:
        assert [o.domain for o in function.opset_import].count("ai.rt") == 1
    onnx.checker.check_model(converted, full_check=True)
    restored = onnx.load(tmp_path / "restored.onnx", load_external_data=False)
    assert all(o.domain != "ai.rt" for f in (*restored.functions, restored) for o in f.opset_import)


@pytest.mark.parametrize("attribute", ["value", "value_floats", "value_ints"])
def test_large_constant_nodes(tmp_path, attribute):
    values = {
        "value": numpy_helper.from_array(weights(N)),
        "value_floats": weights(N).tolist(),
        "value_ints": list(range(-5, N - 5)),
    }
    made = model(
        [
            node("Constant", [], ["c"], name="twice", doc_string="said", **{attribute: values[attribute]}),
            node("Constant", [], ["d"], name="twice", value=numpy_helper.from_array(weights(N, seed=8))),
            node("Cast", ["c"], ["f"], to=1),
            node("Add", ["f", "x"], ["e"]),
            node("Add", ["d", "e"], ["y"]),
        ],
        [value("x", [N])],
        [value("y", [N])],
    )
    report = check_runs(save(made, tmp_path / "m.onnx"), tmp_path)
    assert report.count("written") == 2
    nodes = onnx.load(tmp_path / "converted.onnx").graph.node
    assert nodes[0].doc_string == "said"
    # ONNX Runtime keeps no Constant as a node, so they may share a name; delayed nodes may not.
    assert nodes[0].name != nodes[1].name


def test_a_value_that_calls_of_a_function_give_stays(tmp_path):
    held = node("Constant", [], ["c"])
    held.attribute.add(name="value", ref_attr_name="given", type=onnx.AttributeProto.TENSOR)
    function = helper.make_function(
        "local", "F", ["x"], ["y"], [held, node("Add", ["x", "c"], ["y"])], [helper.make_opsetid("", 17)], ["given"]
    )
    call = node("F", ["x"], ["y"], domain="local", given=numpy_helper.from_array(weights(N)))
    made = model([call], [value("x", [N])], [value("y", [N])], [], [function])
    report = check_runs(save(made, tmp_path / "m.onnx"), tmp_path)
    assert [(t.name, t.action, t.reason) for t in report.tensors] == [
        ("c", "kept", "each call of the function gives its value")
    ]


# Names


@pytest.mark.parametrize("name", ["onnx::MatMul_1582", "a/b/c:0", "17", " ", "Wörter.weight", "delayed w0", "x[0]*?"])
def test_strange_names(tmp_path, name):
    report = check_runs(save(vector_model(initializer(name, weights(N))), tmp_path / "m.onnx"), tmp_path)
    assert report.tensor(name).action == "written"
    assert name in converted_nodes(tmp_path / "converted.onnx")


def test_node_names_that_a_delayed_node_would_take_stay_free(tmp_path):
    made = vector_model(initializer("w0", weights(N)))
    made.graph.node[0].name = "delayed w0"
    check_runs(save(made, tmp_path / "m.onnx"), tmp_path)
    names = [n.name for n in onnx.load(tmp_path / "converted.onnx").graph.node]
    assert len(set(names)) == 2


def test_shared_aliased_and_unused_weights(tmp_path):
    made = vector_model(initializer("w0", weights(N)), initializer("w1", weights(N, seed=1)))
    made.graph.node.extend([node("Identity", ["w1"], ["alias"]), node("Add", ["alias", "w0"], ["z"])])
    made.graph.output.append(value("z", [N]))
    made.graph.initializer.append(initializer("unused", weights(N)))
    report = check_runs(save(made, tmp_path / "m.onnx"), tmp_path)
    assert [t.name for t in report.tensors if t.action == "written"] == ["w0", "w1"]
    assert report.tensor("unused").reason == "nothing reads it"
    assert [t.name for t in onnx.load(tmp_path / "converted.onnx").graph.initializer] == ["unused"]


# What stays


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


# Everything else of the model


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


# Converting what has delayed nodes, and what has kept external tensors


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


def test_delayed_nodes_are_found_by_no_other_name(tmp_path):
    check_runs(save(functions_model(), tmp_path / "m.onnx"), tmp_path, {**X, "flag": np.array(False)})
    converted = onnx.load(tmp_path / "converted.onnx")
    every = [*iter_nodes(converted.graph.node), *(n for f in converted.functions for n in iter_nodes(f.node))]
    assert sum(map(is_delayed, every)) == 4
