"""Walking models: bodies at any depth, what a body captures, names that are free."""

from __future__ import annotations

import time

import numpy as np
import onnx
from delayed_models import FLOAT, function, model, node, value
from onnx import helper

from ort_delayed.graphs import NamePool, bodies, captured_names, iter_graphs, iter_nodes, read_names


def nested() -> onnx.NodeProto:
    """If(c): Loop over a body that reads the outer ``w`` and ``v``, and its own ``s``."""
    body = helper.make_graph(
        [
            node("Identity", ["go"], ["go_on"]),
            node("Add", ["s", "w"], ["t"]),
            node("Add", ["t", "i"], ["u"]),
            node("Add", ["u", "v"], ["n"]),
        ],
        "body",
        [value("trip", []), value("go", []), value("s", None)],
        [value("go_on", []), value("n", None)],
        [helper.make_tensor("i", FLOAT, [1], [1.0])],
    )
    loop = helper.make_graph([node("Loop", ["m", "", "x"], ["l"], body=body)], "then", [], [value("l", None)])
    other = helper.make_graph([], "else", [], [value("x", None)])
    return node("If", ["c"], ["y"], then_branch=loop, else_branch=other, name="if")


def test_bodies_and_walks() -> None:
    graph = helper.make_graph([nested()], "main", [], [])
    assert sorted(g.name for g in bodies(graph.node[0])) == ["else", "then"]
    assert next(iter_graphs(graph)) is graph
    assert sorted(g.name for g in iter_graphs(graph)) == ["body", "else", "main", "then"]
    assert sorted(n.op_type for n in iter_nodes(graph.node)) == ["Add", "Add", "Add", "Identity", "If", "Loop"]


def test_what_is_captured() -> None:
    node_ = nested()
    assert read_names(node_) == {"c", "m", "x", "w", "v"}
    then, other = (next(g for g in bodies(node_) if g.name == n) for n in ("then", "else"))
    assert captured_names(then) == {"m", "x", "w", "v"}
    assert captured_names(other) == {"x"}  # as an output, without a node


def test_sparse_initializers_are_the_bodys_own() -> None:
    values = helper.make_tensor("sparse", FLOAT, [1], [1.0])
    indices = helper.make_tensor("at", onnx.TensorProto.INT64, [1], [0])
    graph = helper.make_graph([node("Identity", ["sparse"], ["o"])], "b", [], [value("o", None)])
    graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))
    assert captured_names(graph) == set()


def test_fresh_names_are_used_nowhere() -> None:
    made = model(
        [nested(), node("Constant", [], ["k"], value=onnx.numpy_helper.from_array(np.zeros(1, np.float32)))],
        [value("x", None)],
        [value("y", None)],
        initializers=[helper.make_tensor("init", FLOAT, [1], [0.0])],
        functions=[function("F", ["p"], ["q"], [node("Relu", ["p"], ["q"], name="r")])],
    )
    pool = NamePool(made)
    for taken in ("x", "y", "w", "s", "trip", "init", "p", "q", "r", "if", "k", "n"):
        assert pool.fresh(taken) == f"{taken}_1"
        assert pool.fresh(taken) == f"{taken}_2"
    assert pool.fresh("new") == "new"
    assert pool.fresh("new") == "new_1"


def test_a_name_that_is_wanted_often_is_found_at_once() -> None:
    pool = NamePool(model([]))
    start = time.process_time()
    names = {pool.fresh("w") for _ in range(30_000)}
    assert len(names) == 30_000
    assert time.process_time() - start < 5
