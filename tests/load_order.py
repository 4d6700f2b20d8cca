"""Seeing in what order ONNX Runtime loads delayed weights, and which loaded weights wait for their use.

A run is observed through ONNX Runtime's own profile: which kernels ran, in which order. What each kernel is is read
from the optimized model that ONNX Runtime writes for the same session, so that fused nodes are what they have become.

A loaded weight *waits* from its load until the first node that uses it together with something that depends on the
graph's inputs (an activation node) starts. Nodes that depend on weights alone (a Transpose, a Cast, a product of two
weights) belong to the activation node that they are for; weights that one such node takes are loaded one after the
other before it, which nothing can avoid. What must not happen is that any *other* activation node starts meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

import ort_delayed

__all__ = ["Observed", "observe"]


@dataclass
class Observed:
    """One run: the kernels in order, and each moment at which a weight waited for another node than its own."""

    events: list[str]
    loads: list[str]
    waiting_elsewhere: list[str] = field(default_factory=list)
    most_waiting_elsewhere: int = 0


@dataclass
class _Node:
    proto: onnx.NodeProto
    is_load: bool
    weight_only: bool
    reads: frozenset[str]  # loads that it uses through weight-only nodes
    used: bool = True  # whether an activation node uses what it yields


def observe(
    path: str,
    feeds: dict[str, Any],
    level: onnxruntime.GraphOptimizationLevel,
    directory: Path,
) -> Observed:
    """Run the model at ``path`` once, sequentially, and report on the order of its loads."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    prepared = ort_delayed.prepare_model(path, options)
    optimized = directory / "optimized.onnx"
    options.optimized_model_filepath = str(optimized)
    options.enable_profiling = True
    options.profile_file_prefix = str(directory / "profile")
    session = onnxruntime.InferenceSession(prepared, options, providers=["CPUExecutionProvider"])
    session.run(None, feeds)
    profile = json.loads(Path(session.end_profiling()).read_text())
    nodes = _nodes(onnx.load(optimized))
    events = sorted((e for e in profile if e["name"].endswith("_kernel_time")), key=lambda e: e["ts"])
    return _judge([e["name"].removesuffix("_kernel_time") for e in events], nodes)


def _judge(events: list[str], candidates: dict[str, list[_Node]]) -> Observed:
    # Fused nodes of the two branches of an If can have one name; the one whose weights were loaded is meant.
    ran = set(events)
    nodes = {e: next(n for n in candidates[e] if n.reads <= ran) for e in ran}
    observed = Observed(events, [e for e in events if nodes[e].is_load])
    waiting: set[str] = set()
    for event in events:
        node = nodes[event]
        if node.is_load and node.used:
            waiting.add(event)
        if not node.weight_only:
            observed.most_waiting_elsewhere = max(observed.most_waiting_elsewhere, len(waiting - node.reads))
            for other in sorted(waiting - node.reads):
                observed.waiting_elsewhere.append(f"'{other}' waited while '{event}' ({node.proto.op_type}) ran")
            waiting -= node.reads
    return observed


def _nodes(model: onnx.ModelProto) -> dict[str, list[_Node]]:
    found: dict[str, list[_Node]] = {}
    _walk(model.graph, {}, {t.name for t in model.graph.initializer}, found)
    return found


def _walk(
    graph: onnx.GraphProto, outer: dict[str, frozenset[str]], constants: set[str], found: dict[str, list[_Node]]
) -> None:
    loads = dict(outer)  # value name: the loads behind it, for values that depend on no input
    constants = constants | {t.name for t in graph.initializer}
    here: list[_Node] = []
    assert len({n.name for n in graph.node}) == len(graph.node), "two nodes of one graph have the same name"
    for proto in _in_topological_order(graph):
        assert proto.name, f"a node without a name cannot be found in the profile: {proto}"
        inputs = _inputs(proto)
        is_kernel = proto.domain == "ai.rt"
        # The one byte that keeps conditions unknown is no weight; it is loaded once, whenever that is.
        is_load = is_kernel and proto.output[0] != "ort_delayed/false"
        weight_only = is_kernel or all(i in loads or i in constants for i in inputs)
        reads = frozenset({proto.name}) if is_load else frozenset().union(*(loads.get(i, ()) for i in inputs))
        if weight_only:
            loads.update((o, reads) for o in proto.output)
        node = _Node(proto, is_load, weight_only, reads)
        found.setdefault(proto.name, []).append(node)
        here.append(node)
        for body in _bodies(proto):
            _walk(body, loads, constants, found)
    used = frozenset().union(*(n.reads for n in here if not n.weight_only))
    for node in here:
        node.used = not node.is_load or node.proto.name in used


def _in_topological_order(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    pending = list(graph.node)
    produced = {o for n in pending for o in n.output}
    while pending:
        ready = [n for n in pending if not any(i in produced for i in _inputs(n))]
        assert ready, "the graph has a cycle"
        for node in ready:
            produced -= set(node.output)
        pending = [n for n in pending if n not in ready]
        yield from ready


def _inputs(node: onnx.NodeProto) -> set[str]:
    names = {i for i in node.input if i}
    for body in _bodies(node):
        own = (
            {i.name for i in body.input} | {t.name for t in body.initializer} | {o for n in body.node for o in n.output}
        )
        names |= {i for n in body.node for i in _inputs(n)} - own
        names |= {o.name for o in body.output} - own
    return names


def _bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [a.g for a in node.attribute if a.HasField("g")]
