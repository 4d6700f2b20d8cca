"""convert_model: constants of every graph, body and function, and their names."""

import numpy as np
import onnx
import pytest
from conversions import N, X, check_runs, converted_nodes, vector_model
from onnx import TensorProto, helper, numpy_helper
from weighted_models import (
    constant,
    initializer,
    model,
    node,
    save,
    value,
    weights,
)

from ort_delayed.graphs import bodies, iter_nodes
from ort_delayed.ops.attributes import is_delayed


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


def test_either_branch_of_an_if_in_a_function(tmp_path):
    check_runs(save(functions_model(), tmp_path / "m.onnx"), tmp_path, {**X, "flag": np.array(False)})
    converted = onnx.load(tmp_path / "converted.onnx")
    every = [*iter_nodes(converted.graph.node), *(n for f in converted.functions for n in iter_nodes(f.node))]
    assert sum(map(is_delayed, every)) == 4
