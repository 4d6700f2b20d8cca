"""What loads wait for: the graphs of ``test_load_order`` show that it is enough; here is what it costs."""

from __future__ import annotations

import time

from delayed_models import node, value
from onnx import helper

from ort_delayed.load_times import awaited_activations


def test_bodies_in_bodies_are_looked_through_once() -> None:
    """The more often for each level above them, 28 levels would take hours."""
    inner = helper.make_graph([node("MatMul", ["x", "w"], ["o"])], "body", [], [value("o", None)])
    for _ in range(28):
        choice = node("If", ["c"], ["o"], then_branch=inner, else_branch=helper.make_graph([], "else", [], []))
        inner = helper.make_graph([choice], "body", [], [value("o", None)])
    load = helper.make_node("DelayedInitializer", [], ["w"], domain="ai.rt")
    start = time.process_time()
    assert awaited_activations([load, *inner.node], [0], {"w"}) == {0: "x"}
    assert time.process_time() - start < 10


def test_nodes_that_lack_what_they_need_are_left_to_onnxruntime() -> None:
    load = helper.make_node("DelayedInitializer", [], ["w"], domain="ai.rt")
    nodes = [load, node("Transpose", [], ["t"]), node("Pad", ["x"], []), node("MatMul", ["x", "w"], ["y"])]
    assert awaited_activations(nodes, [0], {"w"}) == {0: "x"}
