"""The clock of a run: delayed nodes whose deliveries say where the run is (:mod:`ort_delayed.pacing`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx

from ort_delayed.graphs import NamePool
from ort_delayed.kernel_nodes import guard_name, guard_node, kernel_node, shape_constant
from ort_delayed.loader.element_types import ElementType, element_type_from_onnx
from ort_delayed.loader.external_data import external_tensor, has_external_data
from ort_delayed.ops.attributes import DOMAIN, OP_VERSION
from ort_delayed.ops.buffers import BufferPool
from ort_delayed.ops.errors import Payload
from ort_delayed.ops.kernel import Binding
from ort_delayed.ops.payloads import read_payload
from ort_delayed.ordering import order_nodes, place_early
from ort_delayed.pacing import Pace, default_opset

__all__ = ["install_clock"]


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
    model: onnx.ModelProto,
    ticks: Mapping[str, Callable[[], None]],
    binding: Binding,
    external_directory: str | None,
    paces: Mapping[str, Pace],
) -> None:
    """Let delayed nodes call a function right before weights are used.

    The nodes are put in the order in which what hangs on weights alone (a Transpose, a DequantizeLinear) runs right
    before its use as well, whether there are ticks or not.

    Args:
        model: a prepared model, changed in place.
        ticks: by name, what is called, on the thread of the run, before each is used. The names are initializers of
            :func:`~ort_delayed.pacing.possible_ticks`, or of ``paces``. What is raised stops the run.
        binding: gets the payloads.
        external_directory: what locations of external data are relative to.
        paces: those of :func:`~ort_delayed.pacing.possible_paces`, under any names.
    """
    graph, names = model.graph, NamePool(model)
    opset = default_opset(model)
    if ticks and not any(o.domain == DOMAIN for o in model.opset_import):
        model.opset_import.add(domain=DOMAIN, version=OP_VERSION)
    small = {t.name: t for t in graph.initializer if t.name in ticks and t.name not in paces}
    nodes: list[onnx.NodeProto] = []
    waiting: list[onnx.NodeProto] = []
    for name, on_tick in ticks.items():
        if name in small:
            nodes.extend(_delivery(small[name], on_tick, binding, external_directory, names, opset))
        else:
            kernel, *those = _pace(name, paces[name], on_tick, binding, names, graph)
            nodes.append(kernel)
            waiting.extend(those)
    kept = [t for t in graph.initializer if t.name not in small]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    nodes.extend(graph.node)
    order, _ = order_nodes(nodes, {t.name for t in graph.initializer})
    arranged = place_early(waiting, [nodes[i] for i in order])
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
    name: str, pace: Pace, on_tick: Callable[[], None], binding: Binding, names: NamePool, graph: onnx.GraphProto
) -> tuple[onnx.NodeProto, ...]:
    """The kernel, and the nodes that let a value wait for it, behind which the node is changed to take the value."""
    payload = Payload(f"the shape of '{name}', which paces the run", "", 0, 8 * len(pace.shape or (0,)))
    delivered = np.array(pace.shape or (0,), np.int64)
    element_type = _element_type(onnx.TensorProto.INT64)
    handle = binding.add(_Tick(element_type, delivered.shape, delivered, on_tick), payload)
    shape, paced = names.fresh(f"{name}/shape"), names.fresh(f"{name}/paced")
    nodes: list[onnx.NodeProto] = []

    def add_node(op_type: str, inputs: Sequence[str], output: str, node_name: str) -> None:
        nodes.append(onnx.NodeProto(op_type=op_type, name=names.fresh(node_name), input=inputs, output=[output]))

    # No guard behind this kernel: the nodes below refuse a failed one, and ONNX Runtime's ReshapeFusion would take
    # two Reshapes for a chain although the first one yields the shape of the second.
    kernel_output = shape if pace.shape is not None else names.fresh(f"{name}/zero")
    nodes.append(kernel_node(element_type, handle, kernel_output, name=names.fresh(f"{name}/tick")))
    if pace.shape is None:
        own_shape = names.fresh(f"{name}/own shape")
        add_node("Shape", [pace.value], own_shape, own_shape)
        add_node("Add", [own_shape, kernel_output], shape, guard_name(payload))
    # A zero among the dimensions keeps the value's own, which is zero then.
    add_node("Reshape", [pace.value, shape], paced, guard_name(payload))
    # Fusions ask for the shape of what a MatMul takes, which cannot be inferred from a shape that is delivered.
    if pace.value_type is not None:
        graph.value_info.add(name=paced).type.CopyFrom(pace.value_type)
    graph.node[pace.node].input[pace.place] = paced
    return tuple(nodes)


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
