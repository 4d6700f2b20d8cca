"""The order in which a run uses a model's weights. Pure: it looks at the graph only.

ONNX Runtime's default order of execution is a depth-first walk backwards from the nodes whose outputs no node takes,
the last of them first; a node's producers are visited by descending place in the node list, and a node runs when all
it needs has run. Optimizers renumber nodes, so what comes out here is what ONNX Runtime does but for neighbours.
(Source: ``Graph::ReverseDFSFrom`` and ``GraphViewer`` of onnxruntime.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from ort_delayed.graphs import bodies, read_names

__all__ = [
    "ROW_READERS",
    "NodeVisit",
    "WeightUse",
    "execution_order",
    "nodes_in_order",
    "order_of_use",
    "scoped_initializers",
]

ROW_READERS = {("Gather", 0), ("GatherND", 0), ("GatherElements", 0), ("EmbedLayerNormalization", 2)}
"""Operators, with the input, that read single rows of a weight: an embedding."""


@dataclass(frozen=True, slots=True)
class WeightUse:
    """One node's use of one weight.

    Attributes:
        weight: the initializer, as :func:`scoped_initializers` names it.
        consumer: the node's name, or the name of its first output.
        op_type: the node's type.
        place: which of the node's inputs the weight is.
        by_rows: whether the node reads some rows only (an embedding).
    """

    weight: str
    consumer: str
    op_type: str
    place: int
    by_rows: bool


@dataclass(frozen=True, slots=True)
class NodeVisit:
    """A node, where it stands, and which weights it can name.

    Attributes:
        node: the node.
        graph: the graph or body that it stands in.
        weights: by the name that the node would use, the initializer as :func:`scoped_initializers` names it.
    """

    node: onnx.NodeProto
    graph: onnx.GraphProto
    weights: Mapping[str, str]


def scoped_initializers(graph: onnx.GraphProto, scope: str = "") -> Iterator[tuple[str, onnx.TensorProto]]:
    """Every initializer of a graph and the bodies below it, under a name that is its own.

    The main graph's keep their names; one of a body is preceded by where the body stands (``"if_3/then_branch/w"``).
    """
    for tensor in graph.initializer:
        yield scope + tensor.name, tensor
    for index, node in enumerate(graph.node):
        for number, body in enumerate(bodies(node)):
            yield from scoped_initializers(body, _scope(scope, node, index, number))


def order_of_use(graph: onnx.GraphProto) -> tuple[WeightUse, ...]:
    """The uses of all initializers, bodies included, in the order of a run. A body's uses stand where its node runs."""
    return tuple(_uses(nodes_in_order(graph)))


def execution_order(nodes: Sequence[onnx.NodeProto]) -> list[int]:
    """The indices of ``nodes`` in the order in which ONNX Runtime runs them."""
    producers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    inputs = [sorted({producers[n] for n in read_names(node) if n in producers}) for node in nodes]
    used = {producer for needed in inputs for producer in needed}
    order: list[int] = []
    visited = [False] * len(nodes)
    # (index, True) on the stack: all that the node needs has been put in order.
    stack = [(index, False) for index in range(len(nodes)) if index not in used]
    while stack:
        index, is_ready = stack.pop()
        if is_ready:
            order.append(index)
        elif not visited[index]:
            visited[index] = True
            stack.append((index, True))
            stack.extend((needed, False) for needed in inputs[index] if not visited[needed])
    return order


def nodes_in_order(graph: onnx.GraphProto) -> Iterator[NodeVisit]:
    """Every node of a graph and of the bodies below it, in the order of a run; a body's nodes follow its holder."""
    return _visits(graph, "", {})


def _uses(visits: Iterator[NodeVisit]) -> Iterator[WeightUse]:
    for visit in visits:
        node = visit.node
        for place, name in enumerate(node.input):
            if name in visit.weights:
                by_rows = (node.op_type, place) in ROW_READERS
                consumer = node.name or next(iter(node.output), "")
                yield WeightUse(visit.weights[name], consumer, node.op_type, place, by_rows)


def _visits(graph: onnx.GraphProto, scope: str, outer: Mapping[str, str]) -> Iterator[NodeVisit]:
    hidden = {v.name for v in graph.input} | {name for node in graph.node for name in node.output}
    visible = {name: weight for name, weight in outer.items() if name not in hidden}
    visible |= {tensor.name: scope + tensor.name for tensor in graph.initializer}
    for index in execution_order(graph.node):
        node = graph.node[index]
        yield NodeVisit(node, graph, visible)
        for number, body in enumerate(bodies(node)):
            yield from _visits(body, _scope(scope, node, index, number), visible)


def _scope(scope: str, node: onnx.NodeProto, index: int, number: int) -> str:
    return f"{scope}{node.name or f'{node.op_type}_{index}'}/{number}/"
