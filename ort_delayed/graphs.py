"""Walking ONNX models: nested bodies, what a node reads, all names, free names. Plain functions over protos."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from ort_delayed.loader.node_bodies import node_bodies

__all__ = ["NamePool", "bodies", "captured_names", "iter_graphs", "iter_nodes", "read_names"]

bodies = node_bodies


def iter_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph itself, then every body below it, outer before inner."""
    pending = [graph]
    while pending:
        current = pending.pop()
        yield current
        for node in current.node:
            pending.extend(bodies(node))


def iter_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Every node of a node list and of all bodies below it."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        yield node
        for body in bodies(node):
            pending.extend(body.node)


def captured_names(graph: onnx.GraphProto) -> set[str]:
    """Names that a body reads from the graphs around it."""
    own = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    own |= {t.values.name for t in graph.sparse_initializer}
    for node in graph.node:
        own.update(node.output)
    read: set[str] = {o.name for o in graph.output}
    for node in graph.node:
        read |= read_names(node)
    return {name for name in read - own if name}


def read_names(node: onnx.NodeProto) -> set[str]:
    """Names that a node reads: its inputs, and what its bodies capture."""
    names = {name for name in node.input if name}
    for body in bodies(node):
        names |= captured_names(body)
    return names


class NamePool:
    """Hands out value and node names that no graph or function of a model uses yet."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._taken: set[str] = set()
        self._numbers: dict[str, int] = {}  # the last number given to each name that was wanted
        for graph in iter_graphs(model.graph):
            self._take_graph(graph)
        for function in model.functions:
            self._taken.update(function.input, function.output)
            for node in function.node:
                self._take_node(node)
                for body in bodies(node):
                    for graph in iter_graphs(body):
                        self._take_graph(graph)

    def fresh(self, wanted: str) -> str:
        """``wanted`` itself if it is free, else with the first free number behind it."""
        name, number = wanted, self._numbers.get(wanted, 0)
        while name in self._taken:
            number += 1
            name = f"{wanted}_{number}"
        self._numbers[wanted] = number
        self._taken.add(name)
        return name

    def _take_graph(self, graph: onnx.GraphProto) -> None:
        self._taken.update(v.name for v in (*graph.input, *graph.output, *graph.value_info))
        self._taken.update(t.name for t in graph.initializer)
        self._taken.update(t.values.name for t in graph.sparse_initializer)
        for node in graph.node:
            self._take_node(node)

    def _take_node(self, node: onnx.NodeProto) -> None:
        self._taken.add(node.name)
        self._taken.update(node.input)
        self._taken.update(node.output)
