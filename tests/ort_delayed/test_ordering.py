"""The order of a node list: what depends on no graph input stands in front, the rest keeps its order."""

from __future__ import annotations

from delayed_models import delayed, node, value
from onnx import helper

from ort_delayed.ordering import order_nodes


def names(nodes: list, constants: tuple[str, ...] = ()) -> tuple[list[str], set[str]]:
    order, known = order_nodes(nodes, constants)
    assert sorted(order) == list(range(len(nodes)))
    return [nodes[i].output[0] for i in order], known


def test_a_weight_and_all_that_hangs_on_it_alone_come_first() -> None:
    nodes = [
        node("Relu", ["x"], ["a"]),
        delayed("w", [3, 3]),
        node("Transpose", ["w"], ["w_t"]),
        node("MatMul", ["a", "w_t"], ["b"]),
        delayed("v", [3, 3]),
        node("MatMul", ["b", "v"], ["y"]),
    ]
    assert names(nodes) == (["w", "w_t", "v", "a", "b", "y"], {"w", "w_t", "v"})


def test_constants_count_as_known() -> None:
    nodes = [node("Add", ["x", "c"], ["a"]), delayed("w", [1]), node("Mul", ["w", "c"], ["m"])]
    assert names(nodes)[0] == ["w", "a", "m"]
    assert names(nodes, ("c",))[0] == ["w", "m", "a"]


def test_nodes_in_no_order_are_put_in_one() -> None:
    nodes = [node("Cast", ["t"], ["c"]), node("Transpose", ["w"], ["t"]), node("Relu", ["x"], ["r"]), delayed("w", [1])]
    assert names(nodes)[0] == ["w", "t", "c", "r"]


def test_what_a_body_captures_counts() -> None:
    def branch(reads: str) -> object:
        return helper.make_graph([node("Identity", [reads], ["o"])], "b", [], [value("o", None)])

    on_input = node("If", ["c"], ["i"], then_branch=branch("w"), else_branch=branch("x"))
    on_weights = node("If", ["c"], ["k"], then_branch=branch("w"), else_branch=branch("w"))
    nodes = [on_input, on_weights, delayed("w", [1])]
    assert names(nodes, ("c",))[0] == ["w", "k", "i"]


def test_an_optional_input_or_output_left_out_is_no_name() -> None:
    nodes = [node("Clip", ["x", "", "w"], ["y"]), node("Dropout", ["w"], ["d", ""]), delayed("w", [])]
    assert names(nodes) == (["w", "d", "y"], {"w", "d"})
