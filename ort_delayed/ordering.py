"""The order of a graph's nodes that makes ONNX Runtime load each delayed weight right before its first use.

ONNX Runtime derives its order of execution by walking backwards from the outputs and visiting a node's producers by
descending index in the node list. A delayed node has no inputs, so nothing but this rule says when it runs: listed
right before its consumer, as converters do, all of them run first. With every node that depends on no graph input (a
delayed node and all that hangs on it alone) before every other node, each runs right before what uses it. Where that is
not enough, ``load_times`` makes loads wait; such nodes stand as early as what they wait for allows.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Sequence

import onnx

from ort_delayed.graphs import read_names

__all__ = ["order_nodes", "place_early"]


def order_nodes(nodes: Sequence[onnx.NodeProto], constants: Collection[str]) -> tuple[list[int], set[str]]:
    """Order a node list with the nodes that depend on no graph input in front.

    Args:
        nodes: the nodes of one graph, in any order.
        constants: names that depend on no graph input to begin with: the graph's initializers, and such names of the
            graphs around it.

    Returns:
        The indices of ``nodes`` in their new order, and the names that depend on no graph input (``constants`` and
        what the nodes in front yield). The front is in topological order; the rest keeps its order.
    """
    known = set(constants)
    waiting: dict[int, int] = {}
    consumers: dict[str, list[int]] = {}
    ready: list[int] = []
    for index, node in enumerate(nodes):
        missing = read_names(node) - known
        waiting[index] = len(missing)
        for name in missing:
            consumers.setdefault(name, []).append(index)
        if not missing:
            ready.append(index)
    front: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        front.append(index)
        for name in nodes[index].output:
            if not name or name in known:
                continue
            known.add(name)
            for consumer in consumers.get(name, ()):
                waiting[consumer] -= 1
                if waiting[consumer] == 0:
                    heapq.heappush(ready, consumer)
    in_front = set(front)
    return front + [i for i in range(len(nodes)) if i not in in_front], known


def place_early(early: Sequence[onnx.NodeProto], others: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Merge two node lists: each of ``early`` as soon as what it reads is there, ``others`` in their order.

    ``early`` must be in topological order, apart from what it reads of ``others``.
    """
    produced = {output for node in (*early, *others) for output in node.output if output}
    waiting: dict[int, int] = {}
    readers: dict[str, list[int]] = {}
    merged: list[onnx.NodeProto] = []

    def place(node: onnx.NodeProto) -> None:
        ready = deque([node])
        while ready:
            current = ready.popleft()
            merged.append(current)
            for name in current.output:
                for index in readers.get(name, ()) if name else ():
                    waiting[index] -= 1
                    if waiting[index] == 0:
                        ready.append(early[index])

    for index, node in enumerate(early):
        reads = read_names(node) & produced
        waiting[index] = len(reads)
        for name in reads:
            readers.setdefault(name, []).append(index)
    for node in [node for index, node in enumerate(early) if not waiting[index]]:
        place(node)
    for node in others:
        place(node)
    return merged
