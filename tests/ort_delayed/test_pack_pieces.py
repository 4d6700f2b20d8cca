"""ort_delayed/pack_pieces.py: cutting a model, without ONNX Runtime."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper
from packable_models import PACKABLE

from ort_delayed.pack_pieces import Piece, element_of, piece_model, plan_pieces
from ort_delayed.use_order import nodes_in_order, scoped_initializers


def graph_of(*nodes: onnx.NodeProto, weights: int) -> onnx.ModelProto:
    initializers = [TensorProto(name=f"w{i}", data_type=1, dims=[4, 4]) for i in range(weights)]
    graph = helper.make_graph(list(nodes), "g", [], [], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def product(left: str, right: str, out: str) -> onnx.NodeProto:
    return helper.make_node("MatMul", [left, right], [out])


def pieces(model: onnx.ModelProto, sizes: dict[str, int], *, pack: bool = True, piece_bytes: int = 100) -> list[Piece]:
    return list(plan_pieces(list(nodes_in_order(model.graph)), sizes, pack=pack, piece_bytes=piece_bytes))


def test_weights_are_put_together_in_order_of_use_up_to_a_size() -> None:
    model = graph_of(product("x", "w2", "a"), product("a", "w0", "b"), product("b", "w1", "y"), weights=3)
    found = pieces(model, {"w0": 50, "w1": 60, "w2": 50})
    assert [p.weights for p in found] == [("w2", "w0"), ("w1",)]
    assert [len(p.visits) for p in found] == [2, 1]


def test_a_weight_larger_than_a_piece_is_one() -> None:
    model = graph_of(product("x", "w0", "a"), product("a", "w1", "y"), weights=2)
    assert [p.weights for p in pieces(model, {"w0": 500, "w1": 1})] == [("w0",), ("w1",)]


def test_nodes_that_share_a_weight_are_in_one_piece() -> None:
    model = graph_of(
        product("x", "w0", "a"),
        product("a", "w1", "b"),
        product("b", "w0", "c"),
        helper.make_node("LSTM", ["c", "w2", "w3"], ["y"]),
        weights=4,
    )
    found = pieces(model, {f"w{i}": 60 for i in range(4)})
    assert [p.weights for p in found] == [("w0",), ("w1",), ("w2", "w3")]
    assert [len(p.visits) for p in found] == [2, 1, 1]


def test_an_embedding_is_not_asked_for() -> None:
    model = graph_of(helper.make_node("Gather", ["w0", "ids"], ["x"]), product("x", "w1", "y"), weights=2)
    (found,) = pieces(model, {"w0": 1, "w1": 1})
    assert found.weights == ("w0", "w1")
    assert [v.node.op_type for v in found.visits] == ["MatMul"]


def test_without_packing_no_piece_has_nodes() -> None:
    model = graph_of(product("x", "w0", "y"), weights=1)
    assert [(p.weights, p.visits) for p in pieces(model, {"w0": 1}, pack=False)] == [(("w0",), ())]


def test_a_piece_is_a_model_of_nodes_that_stand_alone() -> None:
    model = graph_of(product("x", "w0", "a"), product("a", "w1", "y"), weights=2)
    (piece,) = pieces(model, {"w0": 1, "w1": 1})
    types = {id(model.graph): {"x": "tensor(float)", "a": "tensor(float)"}}
    made = piece_model(piece, dict(scoped_initializers(model.graph)), types, model)
    assert made is not None
    graph = made.model.graph
    assert sorted(made.weights.values()) == ["w0", "w1"]
    assert len(graph.input) == 2
    assert len(graph.output) == 2
    assert not {n.output[0] for n in graph.node} & {name for n in graph.node for name in n.input}
    assert all(i.type.tensor_type.elem_type == TensorProto.FLOAT for i in graph.input)


def test_a_node_whose_inputs_are_no_tensors_of_a_known_type_is_left_out() -> None:
    model = graph_of(product("x", "w0", "y"), weights=1)
    (piece,) = pieces(model, {"w0": 1})
    for known in ({}, {"x": "seq(tensor(float))"}):
        assert piece_model(piece, dict(scoped_initializers(model.graph)), {id(model.graph): known}, model) is None


def test_weights_of_bodies_keep_apart_what_has_one_name() -> None:
    model = PACKABLE["branches"]().model
    visits = list(nodes_in_order(model.graph))
    sizes = {name: 1 for name, _ in scoped_initializers(model.graph)}
    (piece,) = plan_pieces(visits, sizes)
    assert set(piece.weights) == {"If_1/0/w", "If_1/1/w", "outer"}
    types = {id(v.graph): {"h": "tensor(float)", "i": "tensor(float)"} for v in visits}
    made = piece_model(piece, dict(scoped_initializers(model.graph)), types, model)
    assert made is not None
    assert len(made.model.graph.initializer) == 3
    assert len(made.model.graph.node) == 4


def test_type_strings() -> None:
    assert element_of("tensor(float)") == TensorProto.FLOAT
    assert element_of("tensor(float16)") == TensorProto.FLOAT16
    assert element_of("optional(tensor(float))") is None
    assert element_of("") is None
