"""Which weights of a graph may say where a run is. Pure: it looks at the graph only; ``clock.py`` makes the nodes.

A delayed node runs right before the first node that uses its output (:mod:`ort_delayed.ordering`). Which small weights
may become delayed nodes is decided narrowly: where an optimizer wants a constant (a convolution's bias, a
quantisation scale, axes, shapes), a delayed node would change what it does, and with that perhaps the last bit of a
result. Scales and biases of norms, and vectors that are added or multiplied, are taken as any value by all fusions.

Where a stretch of large weights has no such small weight, one of the large ones is paced: it goes to its node through a
Reshape to its own shape, and that shape is what is delivered. ONNX Runtime's Reshape copies nothing. Where the weight
must stay a constant (it is packed, or an optimizer may fold something into it), what it is applied to goes through the
Reshape instead. Its shape is known only in a run: a zero is delivered, and added to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx

from ort_delayed.graphs import bodies, captured_names
from ort_delayed.loader.element_types import element_type_from_onnx

__all__ = ["Pace", "default_opset", "possible_paces", "possible_ticks"]

_LEAST_ELEMENTS, _MOST_BYTES = 8, 1 << 20
# (operator, place of the weight among its inputs)
_TAKE_ANY_VALUE = {("LayerNormalization", 1), ("LayerNormalization", 2), ("RMSNormalization", 1)}
_TAKE_ANY_VALUE |= {("SimplifiedLayerNormalization", 1), ("SkipSimplifiedLayerNormalization", 2)}
_TAKE_ANY_VALUE |= {("SkipLayerNormalization", 2), ("SkipLayerNormalization", 3), ("SkipLayerNormalization", 4)}
_ELEMENTWISE = {"Add", "Mul"}
# What these yield may be fused with a constant that is added or multiplied.
_FOLD_CONSTANTS = {"Conv", "ConvTranspose", "BatchNormalization", "ConvInteger", "MatMulInteger", "DequantizeLinear"}
_DEFAULT_DOMAINS = ("", "ai.onnx")
# ONNX Runtime's least, from which on Reshape takes the shape as an input, and Add broadcasts.
_LEAST_OPSET = 7
# Their weight, the second input, may as well come through a Reshape.
_TAKE_RESHAPED = {"MatMul", "Gemm", "LSTM", "GRU", "RNN"}
_CONVOLUTIONS = {"Conv", "ConvTranspose"}
# No optimizer looks from a convolution to these before it. (Pad, Transpose, DequantizeLinear, Reshape are no such.)
_NOT_FUSED_WITH_CONV = {"Add", "AveragePool", "Clip", "Concat", "Conv", "Elu", "HardSwish", "LeakyRelu", "MaxPool"}
_NOT_FUSED_WITH_CONV |= {"Mul", "PRelu", "Relu", "Sigmoid", "Softplus", "Tanh"}


def possible_ticks(graph: onnx.GraphProto) -> set[str]:
    """Names of the main graph's initializers that may be delivered by delayed nodes."""
    producers = {name: node.op_type for node in graph.node for name in node.output}
    possible = {tensor.name for tensor in graph.initializer if _is_small_vector(tensor)}
    possible -= {v.name for v in (*graph.input, *graph.output)}
    possible -= {a.tensor_name for a in graph.quantization_annotation}
    for node in graph.node:
        for body in bodies(node):
            possible -= captured_names(body)
        for place, name in enumerate(node.input):
            if name in possible and not _takes_any_value(node, place, producers):
                possible.discard(name)
    return possible


@dataclass(frozen=True, slots=True)
class Pace:
    """A value that can go to a node through a Reshape to its own shape, right before the node uses a large weight.

    Attributes:
        value: the value's name: the weight itself, or what the node applies it to.
        value_type: its type, None where it is not known.
        shape: the weight's shape, None where the value is no weight.
        node, place: the index of the node, and which of its inputs the value is.
    """

    value: str
    value_type: onnx.TypeProto | None
    shape: tuple[int, ...] | None
    node: int
    place: int


def possible_paces(
    model: onnx.ModelProto, weights: Collection[str], *, is_optimized: bool = False, at_most_extended: bool = False
) -> dict[str, Pace]:
    """How weights of the main graph may be paced, by their names; of those that one node uses, only the first.

    Args:
        model: the model.
        weights: the initializers that are large; those of one dimension, or of several nodes, are none to be paced.
        is_optimized: no optimizer comes: every weight stays a constant, and what it is applied to may be paced.
        at_most_extended: optimizers beyond ``ORT_ENABLE_EXTENDED`` are left out, which change the layout of images.
    """
    graph = model.graph
    opset = default_opset(model)
    if opset < _LEAST_OPSET:
        return {}
    possible = {t.name: t for t in graph.initializer if t.name in weights and len(t.dims) >= 2 and min(t.dims) > 0}
    unknown = {v.name for v in (*graph.input, *graph.output)} | {a.tensor_name for a in graph.quantization_annotation}
    unknown.update(name for node in graph.node for body in bodies(node) for name in captured_names(body))
    uses = Counter(name for node in graph.node for name in node.input)
    activations = _Activations(graph, opset)
    paces: dict[str, Pace] = {}
    for index, node in enumerate(graph.node):
        place, name = next(((p, n) for p, n in enumerate(node.input) if n in possible), (0, ""))
        if not name or name in unknown or uses[name] > 1:
            continue
        tensor, found = possible[name], None
        if is_optimized:
            found = activations.of(index)
        elif place == 1 and node.domain in _DEFAULT_DOMAINS and node.op_type in _TAKE_RESHAPED:
            value_type = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
            found = Pace(name, value_type, tuple(tensor.dims), index, place)
        elif place == 1 and node.domain in _DEFAULT_DOMAINS and node.op_type in _CONVOLUTIONS and at_most_extended:
            found = activations.of(index, behind=_NOT_FUSED_WITH_CONV)
        if found is not None:
            paces[name] = found
    return paces


class _Activations:
    """What the nodes of a graph apply weights to."""

    def __init__(self, graph: onnx.GraphProto, opset: int) -> None:
        self._graph = graph
        self._opset = opset
        self._types = {v.name: v.type for v in (*graph.input, *graph.value_info, *graph.output)}
        self._producers = {name: node.op_type for node in graph.node for name in node.output}
        self._constants = {tensor.name for tensor in graph.initializer}
        self._constants.update(name for node in graph.node if node.op_type == "Constant" for name in node.output)

    def of(self, index: int, *, behind: Collection[str] | None = None) -> Pace | None:
        """How the first input of a node that is no constant may be paced; None where it is known to be no tensor.

        ``behind``: the operators that may yield it; any where None.
        """
        node = self._graph.node[index]
        place, name = next(((p, n) for p, n in enumerate(node.input) if n and n not in self._constants), (0, ""))
        if not name or (behind is not None and self._producers.get(name) not in (*behind, None)):
            return None
        value_type = self._types.get(name)
        is_tensor = self._must_be_tensor(node, place) if value_type is None else value_type.HasField("tensor_type")
        return Pace(name, value_type, None, index, place) if is_tensor else None

    def _must_be_tensor(self, node: onnx.NodeProto, place: int) -> bool:
        """Whether no sequence, map or optional value is taken there, as far as ONNX knows the operator."""
        domain = "" if node.domain in _DEFAULT_DOMAINS else node.domain
        if not onnx.defs.has(node.op_type, self._opset, domain):
            return True  # one of ONNX Runtime's own, which all take tensors
        inputs = onnx.defs.get_schema(node.op_type, self._opset, domain).inputs
        return bool(inputs) and all(t.startswith("tensor(") for t in inputs[min(place, len(inputs) - 1)].types)


def _is_small_vector(tensor: onnx.TensorProto) -> bool:
    element_type = element_type_from_onnx(tensor.data_type)
    if element_type is None or not element_type.delayed or not element_type.name.startswith("float"):
        return False
    dims = list(tensor.dims)
    return len(dims) == 1 and dims[0] >= _LEAST_ELEMENTS and element_type.nbytes(dims) <= _MOST_BYTES


def _takes_any_value(node: onnx.NodeProto, place: int, producers: Mapping[str, str]) -> bool:
    if (node.op_type, place) in _TAKE_ANY_VALUE:
        return True
    if node.op_type not in _ELEMENTWISE or node.domain not in _DEFAULT_DOMAINS:
        return False
    others = {producers.get(name, "") for other, name in enumerate(node.input) if other != place}
    # Whether a bias behind a MatMul comes before or after the MatMul's weight depends on whether both become a Gemm.
    return others.isdisjoint(_FOLD_CONSTANTS) and not (node.op_type == "Add" and "MatMul" in others)


def default_opset(model: onnx.ModelProto) -> int:
    """A model's version of ONNX's own operators."""
    return next((o.version for o in model.opset_import if o.domain in _DEFAULT_DOMAINS), 17)
