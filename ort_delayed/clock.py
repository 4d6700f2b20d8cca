"""The clock of a run: small weights that delayed nodes deliver, so that each delivery says where the run is.

A delayed node runs right before the first node that uses its output (:mod:`ort_delayed.ordering`). Which small weights
may become delayed nodes is decided narrowly: where an optimizer wants a constant (a convolution's bias, a
quantisation scale, axes, shapes), a delayed node would change what it does, and with that perhaps the last bit of a
result. Scales and biases of norms, and vectors that are added or multiplied, are taken as any value by all fusions.

Where a stretch of large weights has no such small weight, one of the large ones is paced: it goes to its MatMul through
a Reshape to its own shape, and that shape is what is delivered. ONNX Runtime's Reshape copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx

from ort_delayed.graphs import NamePool, bodies, captured_names
from ort_delayed.kernel_nodes import guard_name, guard_node, kernel_node, shape_constant
from ort_delayed.loader.element_types import ElementType, element_type_from_onnx
from ort_delayed.loader.external_data import external_tensor, has_external_data
from ort_delayed.ops.attributes import DOMAIN, OP_VERSION
from ort_delayed.ops.buffers import BufferPool
from ort_delayed.ops.errors import Payload
from ort_delayed.ops.kernel import Binding
from ort_delayed.ops.payloads import read_payload
from ort_delayed.ordering import order_nodes

__all__ = ["install_clock", "possible_paces", "possible_ticks"]

_LEAST_ELEMENTS, _MOST_BYTES = 8, 1 << 20
# (operator, place of the weight among its inputs)
_TAKE_ANY_VALUE = {("LayerNormalization", 1), ("LayerNormalization", 2), ("RMSNormalization", 1)}
_TAKE_ANY_VALUE |= {("SimplifiedLayerNormalization", 1), ("SkipSimplifiedLayerNormalization", 2)}
_TAKE_ANY_VALUE |= {("SkipLayerNormalization", 2), ("SkipLayerNormalization", 3), ("SkipLayerNormalization", 4)}
_ELEMENTWISE = {"Add", "Mul"}
# What these yield may be fused with a constant that is added or multiplied.
_FOLD_CONSTANTS = {"Conv", "ConvTranspose", "BatchNormalization", "ConvInteger", "MatMulInteger", "DequantizeLinear"}


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


def possible_paces(graph: onnx.GraphProto) -> set[str]:
    """Names of the main graph's initializers that may go to the MatMul or Gemm that uses them through a Reshape."""
    possible = {tensor.name for tensor in graph.initializer if len(tensor.dims) >= 2 and min(tensor.dims) > 0}
    possible -= {v.name for v in (*graph.input, *graph.output)}
    possible -= {a.tensor_name for a in graph.quantization_annotation}
    used: set[str] = set()
    for node in graph.node:
        for body in bodies(node):
            possible -= captured_names(body)
        for place, name in enumerate(node.input):
            is_product = node.op_type in ("MatMul", "Gemm") and node.domain in ("", "ai.onnx") and place == 1
            if name in possible and (name in used or not is_product):
                possible.discard(name)
            used.add(name)
    return possible


def _is_small_vector(tensor: onnx.TensorProto) -> bool:
    element_type = element_type_from_onnx(tensor.data_type)
    if element_type is None or not element_type.delayed or not element_type.name.startswith("float"):
        return False
    dims = list(tensor.dims)
    return len(dims) == 1 and dims[0] >= _LEAST_ELEMENTS and element_type.nbytes(dims) <= _MOST_BYTES


def _takes_any_value(node: onnx.NodeProto, place: int, producers: Mapping[str, str]) -> bool:
    if (node.op_type, place) in _TAKE_ANY_VALUE:
        return True
    if node.op_type not in _ELEMENTWISE or node.domain not in ("", "ai.onnx"):
        return False
    others = {producers.get(name, "") for other, name in enumerate(node.input) if other != place}
    # Whether a bias behind a MatMul comes before or after the MatMul's weight depends on whether both become a Gemm.
    return others.isdisjoint(_FOLD_CONSTANTS) and not (node.op_type == "Add" and "MatMul" in others)


@dataclass(frozen=True, slots=True)
class _Tick:
    """A small weight that is resident; asking for its elements is the tick."""

    element_type: ElementType
    shape: tuple[int, ...]
    held: npt.NDArray[np.generic]
    on_tick: Callable[[], None]

    def elements(self, pool: BufferPool) -> npt.NDArray[np.generic]:
        """Say that the run has come here, and yield the weight."""
        self.on_tick()
        return self.held


def install_clock(
    model: onnx.ModelProto, ticks: Mapping[str, Callable[[], None]], binding: Binding, external_directory: str | None
) -> None:
    """Let delayed nodes call a function right before weights are used.

    The nodes are put in the order in which what hangs on weights alone (a Transpose, a DequantizeLinear) runs right
    before its use as well, whether there are ticks or not.

    Args:
        model: a prepared model, changed in place.
        ticks: initializers of the main graph, and what is called, on the thread of the run, before each is used. Those
            of :func:`possible_ticks` are delivered by delayed nodes, others must be of :func:`possible_paces`. What
            is raised stops the run.
        binding: gets the payloads.
        external_directory: what locations of external data are relative to.
    """
    graph, names = model.graph, NamePool(model)
    small = possible_ticks(graph)
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 17)
    if ticks and not any(o.domain == DOMAIN for o in model.opset_import):
        model.opset_import.add(domain=DOMAIN, version=OP_VERSION)
    nodes: list[onnx.NodeProto] = []
    for tensor in (t for t in graph.initializer if t.name in ticks):
        if tensor.name in small:
            nodes.extend(_delivery(tensor, ticks[tensor.name], binding, external_directory, names, opset))
        else:
            nodes.extend(_pace(tensor, ticks[tensor.name], binding, names, graph))
    kept = [t for t in graph.initializer if t.name not in ticks or t.name not in small]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    nodes.extend(graph.node)
    order, _ = order_nodes(nodes, {t.name for t in graph.initializer})
    arranged = [nodes[i] for i in order]
    del graph.node[:]
    graph.node.extend(arranged)


def _delivery(
    tensor: onnx.TensorProto,
    on_tick: Callable[[], None],
    binding: Binding,
    external_directory: str | None,
    names: NamePool,
    opset: int,
) -> Iterator[onnx.NodeProto]:
    """The nodes that yield a small weight in place of its initializer."""
    shape, held = tuple(tensor.dims), _elements(tensor, external_directory)
    payload = Payload(f"the small weight '{tensor.name}', which paces the run", "", 0, held.nbytes)
    element_type = _element_type(tensor.data_type)
    handle = binding.add(_Tick(element_type, shape, held, on_tick), payload)
    shape_name = None
    if opset >= 5:
        shape_name = names.fresh(f"{tensor.name}/shape")
        yield shape_constant(shape_name, shape)
    unchecked = names.fresh(f"{tensor.name}/unchecked")
    yield kernel_node(element_type, handle, unchecked, name=names.fresh(f"{tensor.name}/tick"))
    yield guard_node(unchecked, tensor.name, shape, shape_name, name=names.fresh(guard_name(payload)), opset=opset)


def _pace(
    tensor: onnx.TensorProto, on_tick: Callable[[], None], binding: Binding, names: NamePool, graph: onnx.GraphProto
) -> Iterator[onnx.NodeProto]:
    """The nodes between a large weight and its only consumer, which is changed to take what they yield."""
    shape = tuple(tensor.dims)
    payload = Payload(f"the shape of '{tensor.name}', which paces the run", "", 0, 8 * len(shape))
    element_type = _element_type(onnx.TensorProto.INT64)
    handle = binding.add(_Tick(element_type, (len(shape),), np.array(shape, np.int64), on_tick), payload)
    shape_name = names.fresh(f"{tensor.name}/shape")
    # No guard behind this kernel: the Reshape below refuses a failed one, and ONNX Runtime's ReshapeFusion would take
    # two Reshapes for a chain although the first one yields the shape of the second.
    yield kernel_node(element_type, handle, shape_name, name=names.fresh(f"{tensor.name}/tick"))
    paced = names.fresh(f"{tensor.name}/paced")
    reshape = onnx.NodeProto(op_type="Reshape", name=names.fresh(guard_name(payload)))
    reshape.input.extend([tensor.name, shape_name])
    reshape.output.append(paced)
    # Fusions ask for the shape of what a MatMul takes, which cannot be inferred from a shape that is delivered.
    graph.value_info.append(onnx.helper.make_tensor_value_info(paced, tensor.data_type, shape))
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name == tensor.name:
                node.input[place] = paced
    yield reshape


def _element_type(data_type: int) -> ElementType:
    element_type = element_type_from_onnx(data_type)
    assert element_type is not None
    return element_type


def _elements(tensor: onnx.TensorProto, external_directory: str | None) -> npt.NDArray[np.generic]:
    if has_external_data(tensor):
        found = external_tensor(tensor, external_directory or "")
        elements = read_payload(found, None, lambda nbytes: np.empty(nbytes, np.uint8))
    else:
        elements = np.ascontiguousarray(onnx.numpy_helper.to_array(tensor)).reshape(-1)
    elements.flags.writeable = False
    return elements
