"""When each weight may be loaded: not before the activation that its first use needs has been computed.

The order of the node list (``ordering``) is not enough where ONNX Runtime puts nodes of its own between a weight and
its use: the Cast of float16 weights on the CPU, a fused pattern among weights, a Transpose that it moves. Such nodes
stand last in its node list, and what stands last is computed first. So a kernel also gets an input that it does not
use: the Size of an activation. Size costs nothing, and ONNX Runtime does not fold it, as it does Shape.

An additional consumer of a value can prevent a fusion, so only what a contraction (a MatMul, a Conv) takes as its
activation is used: no fusion that matters has that value in its interior. A weight that something else uses first (the
bias behind a MatMul, the scale of a normalization) waits for the nearest such value before its use.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx
from onnx import helper

from ort_delayed.graphs import bodies, read_names
from ort_delayed.ops.attributes import DOMAIN, OP_TYPE

__all__ = ["awaited_activations", "size_node"]

_CONTRACTIONS = {"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Gather", "LSTM", "GRU", "RNN"}
_CONTRACTIONS |= {"MatMulInteger", "QLinearMatMul", "ConvInteger", "QLinearConv", "MatMulNBits", "Attention"}


def awaited_activations(
    nodes: Sequence[onnx.NodeProto], front: Sequence[int], known: Collection[str]
) -> dict[int, str]:
    """The activation that each load has to wait for.

    Args:
        nodes: the nodes of one graph, kernels in place of delayed nodes.
        front: indices of those that depend on no graph input, in topological order.
        known: names that depend on no graph input.

    Returns:
        The name of an activation by the index of a kernel. A load that needs to wait for nothing is absent. Nothing
        is returned for a node list that is not in topological order.
    """
    in_front = set(front)
    rest = [i for i in range(len(nodes)) if i not in in_front]
    if not _is_sorted(nodes, rest):
        return {}
    behind = _loads_behind(nodes, front)
    awaited: dict[int, str] = {}
    claimed: set[int] = set()
    # For each value the latest activation of a contraction at or before it, and the place of that contraction.
    nearest: dict[str, tuple[int, str]] = {}
    # Around a quantized node no value may have another consumer, or ONNX Runtime does not use its quantized kernel.
    dequantized = {output for i in rest if nodes[i].op_type == "DequantizeLinear" for output in nodes[i].output}
    # These are fused with the contraction behind them, so what they take is awaited and not what they yield.
    moving = [nodes[i] for i in rest if nodes[i].op_type in ("Transpose", "Pad")]
    absorbed = {node.output[0]: node.input[0] for node in moving if node.input and node.output}
    produced = {output: i for i in rest for output in nodes[i].output}
    for index in rest:
        node = nodes[index]
        reads = read_names(node)
        found = max((nearest[name] for name in reads if name in nearest), default=None)
        activations = [name for name in _contracted(node) if name in reads and name not in known]
        if activations and not reads.isdisjoint(known) and dequantized.isdisjoint(activations):
            latest = max(activations, key=lambda name: produced.get(name, -1))
            found = (index, absorbed.get(latest, latest))
        if found is not None:
            nearest.update((output, found) for output in node.output if output)
        for load in set().union(*(behind.get(name, ()) for name in reads)) - claimed:
            claimed.add(load)
            if found is not None:
                awaited[load] = found[1]
    return awaited


def _contracted(node: onnx.NodeProto) -> list[str]:
    """What contractions take: this node if it is one, else those in its bodies."""
    if node.op_type in _CONTRACTIONS:
        return list(node.input)
    return [name for body in bodies(node) for inner in body.node for name in _contracted(inner)]


def size_node(activation: str, output: str) -> onnx.NodeProto:
    """The node that yields ``output`` as soon as ``activation`` is there."""
    return helper.make_node("Size", [activation], [output], name=output)


def _loads_behind(nodes: Sequence[onnx.NodeProto], front: Sequence[int]) -> dict[str, set[int]]:
    behind: dict[str, set[int]] = {}
    for index in front:
        node = nodes[index]
        if node.domain == DOMAIN and node.op_type.startswith(OP_TYPE):
            loads = {index}
        else:
            loads = set().union(*(behind.get(name, ()) for name in read_names(node)))
        if loads:
            behind.update((output, loads) for output in node.output if output)
    return behind


def _is_sorted(nodes: Sequence[onnx.NodeProto], indices: Sequence[int]) -> bool:
    to_come = {output for i in indices for output in nodes[i].output if output}
    for index in indices:
        if not to_come.isdisjoint(read_names(nodes[index])):
            return False
        to_come.difference_update(nodes[index].output)
    return True
