"""The clock of a run: small weights that delayed nodes deliver, so that each delivery says where the run is.

A delayed node runs right before the first node that uses its output (:mod:`ort_delayed.ordering`). Which small weights
may become delayed nodes is decided narrowly: where an optimizer wants a constant (a convolution's bias, a
quantisation scale, axes, shapes), a delayed node would change what it does, and with that perhaps the last bit of a
result. Scales and biases of norms, and vectors that are added or multiplied, are taken as any value by all fusions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

__all__ = ["install_clock", "possible_ticks"]

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
    others = [name for other, name in enumerate(node.input) if other != place]
    return not any(producers.get(name, "") in _FOLD_CONSTANTS for name in others)


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
) -> int:
    """Replace initializers of the main graph by delayed nodes that call a function when they run.

    Args:
        model: a prepared model, changed in place.
        ticks: initializers (see :func:`possible_ticks`), and what is called, on the thread of the run, before each is
            yielded. What it raises stops the run.
        binding: gets the payloads.
        external_directory: what locations of external data are relative to.

    Returns:
        Bytes of the small weights, which are resident from now on.
    """
    if not ticks:
        return 0
    graph, names = model.graph, NamePool(model)
    opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    if not any(o.domain == DOMAIN for o in model.opset_import):
        model.opset_import.add(domain=DOMAIN, version=OP_VERSION)
    shapes: dict[tuple[int, ...], str] = {}
    nodes: list[onnx.NodeProto] = []
    resident = 0
    for tensor in (t for t in graph.initializer if t.name in ticks):
        element_type = element_type_from_onnx(tensor.data_type)
        assert element_type is not None
        shape, held = tuple(tensor.dims), _elements(tensor, external_directory)
        resident += held.nbytes
        payload = Payload(f"the small weight '{tensor.name}', which paces the run", "", 0, held.nbytes)
        handle = binding.add(_Tick(element_type, shape, held, ticks[tensor.name]), payload)
        if opset >= 5 and shape not in shapes:
            shapes[shape] = names.fresh(f"shape/{'x'.join(map(str, shape))}")
            nodes.append(shape_constant(shapes[shape], shape))
        unchecked = names.fresh(f"{tensor.name}/unchecked")
        nodes.append(kernel_node(element_type, handle, unchecked, name=names.fresh(f"{tensor.name}/tick")))
        guard = names.fresh(guard_name(payload))
        nodes.append(guard_node(unchecked, tensor.name, shape, shapes.get(shape), name=guard, opset=opset))
    kept = [t for t in graph.initializer if t.name not in ticks]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    nodes.extend(graph.node)
    order, _ = order_nodes(nodes, {t.name for t in graph.initializer})
    arranged = [nodes[i] for i in order]
    del graph.node[:]
    graph.node.extend(arranged)
    return resident


def _elements(tensor: onnx.TensorProto, external_directory: str | None) -> npt.NDArray[np.generic]:
    if has_external_data(tensor):
        found = external_tensor(tensor, external_directory or "")
        elements = read_payload(found, None, lambda nbytes: np.empty(nbytes, np.uint8))
    else:
        elements = np.ascontiguousarray(onnx.numpy_helper.to_array(tensor)).reshape(-1)
    elements.flags.writeable = False
    return elements
