"""Preparing: from a model with delayed nodes to the equivalent graph that ONNX Runtime gets.

Each delayed node becomes a kernel node that carries a handle to its payload, followed by a Reshape to the declared
shape. The Reshape is the guard: an op that fails must not raise (the process would abort), so it yields a tensor that
does not fit, and ONNX Runtime stops the run with an ordinary exception.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx

from ort_delayed.external_files import repoint_external_data
from ort_delayed.graphs import NamePool, bodies, iter_nodes
from ort_delayed.inlining import inline_delayed_functions
from ort_delayed.kernel_nodes import (
    guard_name,
    guard_node,
    kernel_node,
    let_wait,
    shape_constant,
    unfused_shape,
    unknown_condition,
)
from ort_delayed.load_times import awaited_activations, size_node
from ort_delayed.loader.element_types import ElementType, element_type_from_dtype, onnx_type_name
from ort_delayed.loader.files import OutsideDirectoryError, confining_directories, is_inside
from ort_delayed.loader.model_texts import fault_in_texts
from ort_delayed.loader.quoting import listed, quoted
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.ops.attributes import (
    DOMAIN,
    OP_TYPE,
    OP_VERSION,
    Attributes,
    check_carried,
    describe_node,
    is_delayed,
    read_attributes,
)
from ort_delayed.ops.errors import (
    DelayedInitializerError,
    DelayedInitializerTypeError,
    DelayedInitializerValueError,
    Payload,
    payload_error,
)
from ort_delayed.ops.kernel import HANDLE_ATTRIBUTE, Binding
from ort_delayed.ops.payloads import FilePayload, HeldPayload, read_payload
from ort_delayed.ordering import order_nodes, place_early

__all__ = ["PreparedModel", "has_delayed_nodes", "prepare"]

_DEFAULT_OPSET = 17  # for a model that imports no standard operators; the guards are some


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """What ONNX Runtime gets.

    Attributes:
        model: the equivalent model; carries handles of ``binding``.
        external_directory: where its external-data locations start, or None where it has none.
    """

    model: onnx.ModelProto
    external_directory: str | None


@dataclass(slots=True)
class _Context:
    """What preparing one model needs throughout."""

    model_directory: str
    within: tuple[str, ...] | None  # real directories
    spelled: tuple[str, ...]  # those, and the confining directory as the caller wrote it
    binding: Binding
    names: NamePool
    standard_opset: int
    held: dict[tuple[str, int, int, ElementType], npt.NDArray[np.generic]] = field(default_factory=dict)
    false: str | None = None  # a value of the main graph: False, which ONNX Runtime does not know to be constant


def has_delayed_nodes(model: onnx.ModelProto) -> bool:
    """Whether a delayed node, or something that poses as one, stands anywhere in the model."""
    return any(_poses_as_delayed(n) for n in _all_nodes(model))


def prepare(
    model: onnx.ModelProto,
    binding: Binding,
    *,
    model_directory: str,
    weights_dir: str | None = None,
    model_file: str | None = None,
) -> PreparedModel:
    """Prepare a model that has delayed nodes.

    Args:
        model: may be changed; its external data need not be loaded.
        binding: gets the payloads.
        model_directory: absolute directory that relative filenames and external-data locations are relative to.
        weights_dir: where given, no payload outside this directory is opened.
        model_file: the model's own file, where external data refers to the values in it.

    Raises:
        DelayedInitializerError: a delayed node is not what the specification allows, a ``cpu`` payload cannot be
            read, a filename leads out of ``weights_dir``. Each kind is the natural built-in error too.
        ExternalDataError: an external-data location leads out of the model's directory.
        FileNotFoundError: ``weights_dir`` does not exist.
    """
    if weights_dir is not None and not os.path.isdir(weights_dir):
        raise FileNotFoundError(errno.ENOENT, "weights_dir names no directory that exists", os.fspath(weights_dir))
    _check_text(model)
    _check_model(model)
    model = inline_delayed_functions(model)
    within = confining_directories(weights_dir) if weights_dir is not None else None
    context = _Context(
        model_directory,
        within,
        (*within, os.path.abspath(weights_dir)) if within is not None and weights_dir is not None else (),
        binding,
        NamePool(model),
        _import_opsets(model),
    )
    _prepare_graph(model.graph, frozenset(), context)
    if context.false is not None:
        model.graph.node.insert(0, _false_node(context.false, binding))
    return PreparedModel(model, repoint_external_data(model, model_directory, model_file=model_file))


def _all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    yield from iter_nodes(model.graph.node)
    for function in model.functions:
        yield from iter_nodes(function.node)


def _poses_as_delayed(node: onnx.NodeProto) -> bool:
    # What is not UTF-8 comes out of a proto as bytes; such a node of this domain is none that ONNX Runtime could run.
    return node.domain == DOMAIN and (isinstance(node.op_type, bytes) or node.op_type.startswith(OP_TYPE))


def _check_text(model: onnx.ModelProto) -> None:
    """Refuse names that are not UTF-8: a proto hands them out as bytes, and takes them from nobody."""
    fault = fault_in_texts(model)
    if fault is not None:
        raise DelayedInitializerValueError(fault)


def _check_model(model: onnx.ModelProto) -> None:
    for node in _all_nodes(model):
        if not _poses_as_delayed(node):
            continue
        if node.op_type != OP_TYPE or any(a.name == HANDLE_ATTRIBUTE for a in node.attribute):
            raise DelayedInitializerValueError(
                f"node {quoted(node.name)} of type {DOMAIN}::{node.op_type}: the model carries nodes or handles that "
                "only a model prepared by ort_delayed in memory has; it was prepared before, or is made to look so. "
                "Use the model that it was made from.",
                node=node.name,
            )
    versions = [o.version for o in model.opset_import if o.domain == DOMAIN]
    held_by_graph = any(_poses_as_delayed(n) for n in iter_nodes(model.graph.node))
    if (not versions and held_by_graph) or any(v < OP_VERSION for v in versions):
        raise DelayedInitializerValueError(
            f"the model has {OP_TYPE} nodes and must import the operator set {DOMAIN!r} in version {OP_VERSION}, "
            f"found {versions or 'no import of it'}"
        )


def _import_opsets(model: onnx.ModelProto) -> int:
    """Fix the imports that the prepared graph needs; returns the version of the standard operators."""
    standard = None
    for opset in model.opset_import:
        if opset.domain == DOMAIN:
            opset.version = OP_VERSION
        elif opset.domain in ("", "ai.onnx"):
            standard = opset.version
    if standard is None:
        model.opset_import.add(domain="", version=_DEFAULT_OPSET)
    return standard or _DEFAULT_OPSET


def _prepare_graph(graph: onnx.GraphProto, outer_constants: frozenset[str], context: _Context) -> bool:
    """Prepare a graph and the bodies below it; returns whether any delayed node stood there."""
    declared = {v.name: v for v in (*graph.output, *graph.value_info)}
    nodes: list[onnx.NodeProto] = []
    shapes: dict[tuple[int, ...], str] = {}
    found = False
    for node in graph.node:
        if is_delayed(node):
            found = True
            nodes.extend(_replace(node, declared, shapes, context))
        else:
            nodes.append(node)
    constants = outer_constants | {t.name for t in graph.initializer}
    # What a body takes as its inputs hides what the graphs around it call the same.
    order, known = order_nodes(nodes, constants - {i.name for i in graph.input if i.name in outer_constants})
    if found:
        nodes = _let_loads_wait(nodes, order, known, context)
    arranged: list[onnx.NodeProto] = []
    for node in nodes:
        below = [_prepare_graph(body, frozenset(known), context) for body in bodies(node)]
        if any(below) and node.op_type == "If" and node.input:
            arranged.append(_hide_condition(node, context))
        arranged.append(node)
        found |= any(below)
    if found:
        del graph.node[:]
        graph.node.extend(arranged)
    return found


def _let_loads_wait(
    nodes: Sequence[onnx.NodeProto], order: Sequence[int], known: set[str], context: _Context
) -> list[onnx.NodeProto]:
    """Give kernels the activation that they wait for; returns the nodes, those that hang on weights alone first."""
    front = [i for i in order if known.issuperset(nodes[i].output)]
    sizes: dict[str, onnx.NodeProto] = {}
    for index, activation in awaited_activations(nodes, front, known).items():
        if activation not in sizes:
            sizes[activation] = size_node(activation, context.names.fresh(f"{activation}/size"))
        let_wait(nodes[index], sizes[activation].output[0])
    in_front = set(front)
    early = [*sizes.values(), *(nodes[i] for i in front)]
    return place_early(early, [nodes[i] for i in order if i not in in_front])


def _hide_condition(node: onnx.NodeProto, context: _Context) -> onnx.NodeProto:
    if context.false is None:
        context.false = context.names.fresh("ort_delayed/false")
    condition = context.names.fresh(f"{node.input[0]}/at_run")
    unknown = unknown_condition(node.input[0], context.false, condition)
    node.input[0] = condition
    return unknown


def _false_node(output: str, binding: Binding) -> onnx.NodeProto:
    element_type = element_type_from_dtype(np.dtype(np.bool_))
    assert element_type is not None
    payload = Payload("the condition of an If", "", 0, 1)
    handle = binding.add(HeldPayload(element_type, (), np.zeros(1, np.bool_)), payload)
    return kernel_node(element_type, handle, output, name=output)


def _replace(
    node: onnx.NodeProto,
    declared: dict[str, onnx.ValueInfoProto],
    shapes: dict[tuple[int, ...], str],
    context: _Context,
) -> Iterator[onnx.NodeProto]:
    """The nodes that stand for a delayed node: the kernel, and the guard (with its constant shape, made once)."""
    where = describe_node(node)
    attributes = read_attributes(node)
    check_carried(attributes, where)
    output = node.output[0]
    if output in declared:
        _check_declaration(declared[output], attributes, where)
    handle, payload = _bind(attributes, where, output, context)
    raw = context.names.fresh(f"{output}/unchecked")
    kernel = kernel_node(attributes.element_type, handle, raw, name=node.name)
    kernel.doc_string = node.doc_string
    kernel.metadata_props.extend(node.metadata_props)
    shape_name = None
    if context.standard_opset >= 5:
        if attributes.shape not in shapes:
            shapes[attributes.shape] = context.names.fresh(f"shape/{'x'.join(map(str, attributes.shape))}")
            yield shape_constant(shapes[attributes.shape], attributes.shape)
        shape_name = shapes[attributes.shape]
    name = context.names.fresh(guard_name(payload))
    may_be_shape = attributes.element_type.name == "int64" and len(attributes.shape) == 1
    guarded = context.names.fresh(f"{output}/guarded") if may_be_shape else output
    yield kernel
    yield guard_node(raw, guarded, attributes.shape, shape_name, name=name, opset=context.standard_opset)
    if may_be_shape:
        once = context.names.fresh(f"{output}/once")
        yield shape_constant(once, (1,))
        yield unfused_shape(guarded, once, output)


def _check_declaration(value: onnx.ValueInfoProto, attributes: Attributes, where: str) -> None:
    """Refuse a value that the graph declares to be something else than the attributes say."""
    kind = value.type.WhichOneof("value")
    if kind is None:
        return
    declared = value.type.tensor_type.elem_type
    if kind != "tensor_type" or declared not in (onnx.TensorProto.UNDEFINED, attributes.element_type.onnx):
        found = onnx_type_name(declared) if kind == "tensor_type" else kind
        raise DelayedInitializerTypeError(
            f"{where}: the graph declares {quoted(value.name)} to be of type {found}, "
            f"the node's dtype is {onnx_type_name(attributes.element_type.onnx or 0)}",
            node=where,
        )
    if not value.type.tensor_type.HasField("shape"):
        return
    dims = value.type.tensor_type.shape.dim
    fits = len(dims) == len(attributes.shape) and all(
        d.dim_value == n for d, n in zip(dims, attributes.shape, strict=True) if d.HasField("dim_value")
    )
    if not fits:
        shown = [d.dim_value if d.HasField("dim_value") else (d.dim_param or "?") for d in dims]
        raise DelayedInitializerValueError(
            f"{where}: the graph declares {quoted(value.name)} to be of shape {listed(shown)}, "
            f"the node's is {listed(attributes.shape)}",
            node=where,
        )


def _bind(attributes: Attributes, where: str, name: str, context: _Context) -> tuple[int, Payload]:
    """Enter the payload of one node into the binding; a ``cpu`` payload is read now."""
    path = os.path.join(context.model_directory, attributes.filename)
    tensor = TensorOnDisk(name, path, attributes.offset, attributes.nbytes, attributes.shape, attributes.element_type)
    payload = Payload(where, path, tensor.offset, tensor.nbytes)
    try:
        if context.within is not None:
            _check_lexically(attributes, path, context)
        if attributes.load_device == "file":
            return context.binding.add(FilePayload(tensor, context.within), payload), payload
        elements = _held(tensor, context)
    except Exception as cause:
        if isinstance(cause, DelayedInitializerError):
            raise
        raise payload_error(payload, cause) from cause
    return context.binding.add(HeldPayload(tensor.element_type, tensor.shape, elements), payload), payload


def _held(tensor: TensorOnDisk, context: _Context) -> npt.NDArray[np.generic]:
    key = (os.path.realpath(tensor.path), tensor.offset, tensor.nbytes, tensor.element_type)
    if key not in context.held:
        elements = read_payload(tensor, context.within, lambda nbytes: np.empty(nbytes, np.uint8))
        elements.flags.writeable = False
        context.held[key] = elements
    return context.held[key]


def _check_lexically(attributes: Attributes, path: str, context: _Context) -> None:
    """Refuse what leads out of the confining directory by its spelling alone; links are checked when it is opened."""
    spelled = os.path.normpath(os.path.join(os.path.realpath(context.model_directory), attributes.filename))
    if not is_inside(spelled, context.spelled):
        raise OutsideDirectoryError(
            errno.EACCES,
            f"the filename {attributes.filename!r} leads to '{spelled}', outside the directory that the model is "
            f"confined to ('{context.spelled[-1]}')",
            path,
        )
