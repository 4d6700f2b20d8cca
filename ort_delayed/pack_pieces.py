"""Cutting a model into pieces that ONNX Runtime packs one at a time, so that packing takes the memory of one. Pure.

What a kernel makes of a weight depends on the node and on the constants that it reads, and on nothing else of the
graph. So a piece is a model of a few nodes: their weights are initializers, all else that they read are inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from ort_delayed.graphs import bodies
from ort_delayed.loader.element_types import ELEMENT_TYPES
from ort_delayed.use_order import ROW_READERS, NodeVisit

__all__ = ["PIECE_BYTES", "Piece", "PieceModel", "ValueTypes", "element_of", "piece_model", "plan_pieces"]

PIECE_BYTES = 64 << 20
"""Weights are packed together up to so many raw bytes; ONNX Runtime then holds about twice that."""

ValueTypes = Mapping[str, str]
"""ONNX Runtime's type strings (``"tensor(float)"``) of the values of one graph, by name."""

_ORT_TYPES = {f"tensor({t.ort})": t.onnx for t in ELEMENT_TYPES if t.ort is not None}


@dataclass(frozen=True, slots=True)
class Piece:
    """Weights that come next in order of first use, with every node that may pack one of them.

    Attributes:
        weights: scoped names, in order of first use.
        visits: the nodes; none where no kernel packs these weights.
    """

    weights: tuple[str, ...]
    visits: tuple[NodeVisit, ...]


@dataclass(frozen=True, slots=True)
class PieceModel:
    """A piece as a model.

    Attributes:
        model: the model; external locations are those of the initializers.
        weights: the scoped name of each weight, by its name in the model.
    """

    model: onnx.ModelProto
    weights: Mapping[str, str]


def element_of(type_string: str) -> int | None:
    """The ``TensorProto.DataType`` value of one of ONNX Runtime's type strings; None for what is no tensor."""
    return _ORT_TYPES.get(type_string)


def plan_pieces(
    visits: Sequence[NodeVisit], sizes: Mapping[str, int], *, pack: bool = True, piece_bytes: int = PIECE_BYTES
) -> tuple[Piece, ...]:
    """Cut a model into pieces. Nodes that share a weight are in one piece, so that its packed forms come together.

    Args:
        visits: every node, in the order of a run.
        sizes: the weights that are worth a place of their own, by scoped name, with their raw bytes.
        pack: whether anything is packed; otherwise no piece has nodes.
        piece_bytes: raw bytes up to which weights are put together.
    """
    leaders = {name: name for name in sizes}

    def leader(name: str) -> str:
        while leaders[name] != name:
            name = leaders[name]
        return name

    order: dict[str, None] = {}
    packing: list[tuple[NodeVisit, str]] = []
    for visit in visits:
        used = [w for w in _weights_of(visit) if w in sizes]
        order.update(dict.fromkeys(used))
        if pack and used and _may_pack(visit):
            first = leader(used[0])
            for other in used[1:]:
                leaders[leader(other)] = first
            packing.append((visit, used[0]))
    clusters: dict[str, list[str]] = {}
    for name in order:
        clusters.setdefault(leader(name), []).append(name)
    nodes: dict[str, list[NodeVisit]] = {}
    for visit, name in packing:
        nodes.setdefault(leader(name), []).append(visit)
    return tuple(_join(clusters, nodes, sizes, piece_bytes))


def piece_model(
    piece: Piece,
    initializers: Mapping[str, onnx.TensorProto],
    types: Mapping[int, ValueTypes],
    like: onnx.ModelProto,
) -> PieceModel | None:
    """Make the model of a piece, or None where it has no node that could stand in it.

    Args:
        piece: the piece.
        initializers: by scoped name.
        types: the types of the values of each graph, by the graph's ``id``.
        like: the model that the piece is cut from; gives operator sets and IR version.
    """
    graph = onnx.GraphProto(name="piece")
    renamed: dict[str, str] = {}
    for number, visit in enumerate(piece.visits):
        known = types.get(id(visit.graph), {})
        inputs = _input_values(visit, known, f"x{number}_")
        if inputs is None:
            continue
        node = graph.node.add()
        node.CopyFrom(visit.node)
        node.name = f"node_{number}"
        for place, name in enumerate(visit.node.input):
            weight = visit.weights.get(name)
            if weight is not None:
                node.input[place] = renamed.setdefault(weight, f"w{len(renamed)}")
            elif name:
                node.input[place] = f"x{number}_{place}"
        graph.input.extend(inputs)
        for place, name in enumerate(visit.node.output):
            if name:
                node.output[place] = f"y{number}_{place}"
                graph.output.add(name=node.output[place])
    for weight, name in renamed.items():
        tensor = graph.initializer.add()
        tensor.CopyFrom(initializers[weight])
        tensor.name = name
    if not graph.node:
        return None
    model = onnx.ModelProto(ir_version=like.ir_version, graph=graph)
    model.opset_import.extend(like.opset_import)
    return PieceModel(model, {name: weight for weight, name in renamed.items()})


def _join(
    clusters: Mapping[str, list[str]],
    nodes: Mapping[str, list[NodeVisit]],
    sizes: Mapping[str, int],
    piece_bytes: int,
) -> Iterator[Piece]:
    weights: list[str] = []
    visits: list[NodeVisit] = []
    size = 0
    for key, cluster in clusters.items():
        more = sum(sizes[w] for w in cluster)
        if weights and size + more > piece_bytes:
            yield Piece(tuple(weights), tuple(visits))
            weights, visits, size = [], [], 0
        weights += cluster
        visits += nodes.get(key, [])
        size += more
    if weights:
        yield Piece(tuple(weights), tuple(visits))


def _weights_of(visit: NodeVisit) -> Iterator[str]:
    for name in visit.node.input:
        if name in visit.weights:
            yield visit.weights[name]


def _may_pack(visit: NodeVisit) -> bool:
    """Whether it is worth asking: kernels that read rows pack nothing, and a node with bodies is none of a piece."""
    node = visit.node
    if next(bodies(node), None) is not None:
        return False
    return any(
        name in visit.weights and (node.op_type, place) not in ROW_READERS for place, name in enumerate(node.input)
    )


def _input_values(visit: NodeVisit, known: ValueTypes, prefix: str) -> list[onnx.ValueInfoProto] | None:
    """What stands for the values that the node computes with; None where one is no tensor of a known type."""
    values = []
    for place, name in enumerate(visit.node.input):
        if not name or name in visit.weights:
            continue
        element = element_of(known.get(name, ""))
        if element is None:
            return None
        value = onnx.ValueInfoProto(name=f"{prefix}{place}")
        value.type.tensor_type.elem_type = element
        values.append(value)
    return values
