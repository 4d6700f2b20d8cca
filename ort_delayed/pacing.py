"""Which weights of a graph may say where a run is. Pure: it looks at the graph only; ``clock.py`` makes the nodes.

A delayed node runs right before the first node that uses its output (:mod:`ort_delayed.ordering`). Which small weights
may become delayed nodes is decided narrowly: where an optimizer wants a constant (a convolution's bias, a
quantisation scale, axes, shapes), a delayed node would change what it does, and with that perhaps the last bit of a
result. Scales and biases of norms, and vectors that are added or multiplied, are taken as any value by all fusions.

Where a stretch of large weights has no such small weight, one of the large ones is paced: it goes to its node through a
Reshape to its own shape, and that shape is what is delivered. ONNX Runtime's Reshape copies nothing. In a packed model
the weight must stay a constant, so what it is applied to goes through the Reshape instead. Its shape is known only in a
run: a zero is delivered, and added to it. Where optimizers come that would not do: the shapes of all that follows are
no longer known, and fusions that ask for them are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import onnx

from ort_delayed.graphs import bodies, captured_names
from ort_delayed.loader.element_types import element_type_from_onnx
from ort_delayed.use_order import execution_order

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
# Behind the product of a constant weight this is folded into the weight, behind a convolution those are.
_FOLDED_INTO_WEIGHTS = {"BatchNormalization"}
_FOLDED_INTO_KERNELS = {"BatchNormalization", *_ELEMENTWISE}


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
    values = _Values(model, opset)
    paces: dict[str, Pace] = {}
    for index, node in enumerate(graph.node):
        place, name = next(((p, n) for p, n in enumerate(node.input) if n in possible), (0, ""))
        if not name or name in unknown or uses[name] > 1:
            continue
        if is_optimized:
            found = values.last_of(index)
            if found is not None:
                paces[name] = found
        elif place == 1 and _takes_reshaped(node, possible[name], values, at_most_extended=at_most_extended):
            tensor = possible[name]
            value_type = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
            paces[name] = Pace(name, value_type, tuple(tensor.dims), index, place)
    return paces


def _takes_reshaped(node: onnx.NodeProto, weight: onnx.TensorProto, values: _Values, *, at_most_extended: bool) -> bool:
    """Whether a node computes the same, and optimizers do the same to it, where its weight is no constant."""
    if node.domain not in _DEFAULT_DOMAINS:
        return False
    if node.op_type in _TAKE_RESHAPED:
        return not values.is_taken_by(node, _FOLDED_INTO_WEIGHTS)
    is_plain = node.op_type in _CONVOLUTIONS and weight.data_type == onnx.TensorProto.FLOAT
    return is_plain and at_most_extended and not values.is_taken_by(node, _FOLDED_INTO_KERNELS)


class _Values:
    """Who yields the values of a graph, and who takes them."""

    def __init__(self, model: onnx.ModelProto, opset: int) -> None:
        graph = model.graph
        self._graph = graph
        self._opset = opset
        self._functions = {(f.domain, f.name) for f in model.functions}
        self._types = {v.name: v.type for v in (*graph.input, *graph.value_info, *graph.output)}
        self._constants = {tensor.name for tensor in graph.initializer}
        self._constants.update(name for node in graph.node if node.op_type == "Constant" for name in node.output)
        self._consumers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self._consumers.setdefault(name, []).append(node)

    @cached_property
    def _computed(self) -> dict[str, int]:
        """When each value is computed; only packed models ask."""
        order = execution_order(self._graph.node)
        return {name: when for when, index in enumerate(order) for name in self._graph.node[index].output}

    def is_taken_by(self, node: onnx.NodeProto, op_types: Collection[str]) -> bool:
        """Whether one of these operators takes what a node yields, with nothing else but constants."""
        return any(
            consumer.op_type in op_types
            and all(name in self._constants or name in node.output for name in consumer.input)
            for name in node.output
            for consumer in self._consumers.get(name, ())
        )

    def last_of(self, index: int) -> Pace | None:
        """How the input of a node that is computed last may be paced; None where it may be no tensor."""
        node = self._graph.node[index]
        places = [p for p, n in enumerate(node.input) if n and n not in self._constants]
        if not places or (node.domain, node.op_type) in self._functions:
            return None
        # Earlier, all that yields the other inputs would run between the tick and the node.
        place = max(places, key=lambda p: self._computed.get(node.input[p], -1))
        name = node.input[place]
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
