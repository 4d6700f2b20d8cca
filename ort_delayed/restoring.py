"""``restore_model``: delayed nodes become ordinary initializers again, which any runtime can load."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx

from ort_delayed.conversion_plan import Layout, find_candidates, plan_conversion
from ort_delayed.conversion_report import ConversionReport, TensorReport
from ort_delayed.delayed_nodes import DelayedNode, find_delayed_nodes
from ort_delayed.graphs import iter_nodes
from ort_delayed.inlining import inline_delayed_functions
from ort_delayed.kept_tensors import decision_report, inline_others, put_inline, relocate
from ort_delayed.loader.external_data import set_external_data
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.model_outputs import check_destination, write_outputs
from ort_delayed.new_files import PendingDataFile
from ort_delayed.ops.attributes import DOMAIN, describe_node, is_delayed
from ort_delayed.ops.errors import DelayedInitializerValueError
from ort_delayed.payload_files import PayloadReader, check_payloads
from ort_delayed.reachable_files import plain_location
from ort_delayed.skeletons import Skeleton
from ort_delayed.value_uses import Scope, Uses, find_uses, iter_scopes

__all__ = ["refer_to_payloads", "restore_model"]

_INLINE_BYTES = 1024
"""Smaller payloads go into the model: ONNX Runtime needs some while loading, and none of them is worth a file."""

_DEFAULT_OPSET = 17  # for a function that imports no standard operators; a Constant is one


@dataclass(frozen=True, slots=True)
class _Restored:
    """What is done with one delayed node.

    Attributes:
        node: the node.
        action: ``"referenced"``, ``"written"`` to the data file, or ``"inlined"``.
        reason: what a report has to say about that.
        location: the file as the new model names it; None for the data file and for inline values.
        offset: the payload's first byte in that file.
    """

    node: DelayedNode
    action: str
    reason: str = ""
    location: str | None = None
    offset: int = 0


def restore_model(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], Any] | None = None,
) -> ConversionReport:
    """Write a model whose delayed nodes are initializers again; the source stays as it is.

    Payloads below the destination's directory that every runtime can reach stay where they are and become external
    data. The others are copied to one data file beside the destination, ``NAME.<digest>.weights``. Payloads smaller
    than 1 KiB, and those that ONNX Runtime needs while loading, go into the model. In functions, which have no
    initializers, Constant nodes take their place.

    Args:
        source: the model file, converted by this project or not.
        destination: the model file to write. Both files appear whole or not at all.
        overwrite: replace a destination that exists, and its data file.
        progress: called with the bytes of the data file that are written, and those in all, as they grow.

    Returns:
        what was done with each tensor; it prints as a table.

    Raises:
        ValueError: source and destination are the same file, or the source is no ONNX model.
        FileExistsError: the destination exists, and ``overwrite`` is false.
        DelayedInitializerError: a delayed node is not what the specification allows, or its payload cannot be read:
            also FileNotFoundError, EOFError and so on.
        OSError: reading or writing failed, for instance because the disk is full.
    """
    place = check_destination(source, destination, overwrite=overwrite)
    with Skeleton(source) as skeleton:
        skeleton.model = _without_reference_attributes(skeleton.model)
        scopes = list(iter_scopes(skeleton.model))
        uses = find_uses(skeleton.model, scopes)
        layout = Layout()
        nodes = find_delayed_nodes(scopes, skeleton.directory, relocated=True)
        _check_names(nodes)
        nodes.sort(key=lambda n: uses.order.get((n.scope, n.payload.name), len(uses.order)))
        restored = [_plan(n, uses, layout, place.directory) for n in nodes]
        constants = find_candidates(skeleton, scopes, uses, min_bytes=0, select=())
        candidates = [replace(c, keep="it is external data already") for c in constants]
        decisions = plan_conversion(
            candidates, layout, directory=place.directory, moved=True, copy=False, reachable=plain_location
        )
        external = [d for d in decisions if d.candidate.external and d.candidate.stored is not None]
        payloads = [n.payload for n in nodes] + [d.candidate.stored for d in external if d.candidate.stored]
        check_payloads(payloads)

        def fill(data: PendingDataFile) -> None:
            if progress is not None:
                data.on_progress = lambda done: progress(done, layout.end)
            with PayloadReader(skeleton) as reader:
                writes: list[tuple[int, TensorOnDisk]] = [
                    (r.offset, r.node.payload) for r in restored if r.action == "written"
                ]
                writes += [
                    (d.offset or 0, d.candidate.stored) for d in external if d.in_data_file and d.candidate.stored
                ]
                for offset, stored in sorted(writes, key=lambda write: write[0]):
                    reader.append(data, offset, stored)

        def finish(data_name: str) -> None:
            with PayloadReader(skeleton) as reader:
                for decision in external:
                    relocate(decision, data_name, reader)
                inline_others(skeleton, decisions, reader)
                _apply(skeleton.model, scopes, restored, data_name, reader)

        data_name = write_outputs(skeleton, place, fill if layout.end else None, finish)
        rows = [_report(r, data_name) for r in restored] + [decision_report(d, data_name) for d in external]
        data_path = os.path.join(place.directory, data_name) if data_name is not None else None
        return ConversionReport(skeleton.path, place.path, data_path, layout.end, tuple(rows))


def refer_to_payloads(skeleton: Skeleton) -> None:
    """Make initializers of the delayed nodes of a skeleton, in place: external data that names its file absolutely.

    Small payloads, and those that ONNX Runtime needs while loading, are read and go into the model.

    Raises:
        DelayedInitializerError: as :func:`restore_model`.
    """
    skeleton.model = _without_reference_attributes(skeleton.model)
    scopes = list(iter_scopes(skeleton.model))
    uses = find_uses(skeleton.model, scopes)
    restored = []
    nodes = find_delayed_nodes(scopes, skeleton.directory, relocated=True)
    _check_names(nodes)
    for node in nodes:
        payload = node.payload
        small = payload.nbytes < _INLINE_BYTES or uses.reason_to_stay_constant(node.scope, payload.name) is not None
        where = (None, 0) if small else (payload.path, payload.offset)
        restored.append(_Restored(node, "inlined" if small else "referenced", "", *where))
    check_payloads(r.node.payload for r in restored)
    with PayloadReader(skeleton) as reader:
        _apply(skeleton.model, scopes, restored, "", reader)


def _without_reference_attributes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with functions inlined where each call gives a delayed node other attributes."""
    for function in model.functions:
        for node in iter_nodes(function.node):
            if is_delayed(node) and any(a.ref_attr_name for a in node.attribute):
                return _check_resolved(inline_delayed_functions(model))
    return model


def _check_resolved(model: onnx.ModelProto) -> onnx.ModelProto:
    for function in model.functions:
        for node in iter_nodes(function.node):
            if is_delayed(node) and any(a.ref_attr_name for a in node.attribute):
                where = describe_node(node)
                raise DelayedInitializerValueError(
                    f"{where} in function {function.domain}::{function.name}: its attributes are given by calls, and "
                    "nothing calls the function; remove it from the model",
                    node=where,
                )
    return model


def _check_names(nodes: Iterable[DelayedNode]) -> None:
    """Refuse a node whose value has a name that something else of its graph yields, as every session refuses it."""
    taken: dict[Scope, set[str]] = {}
    for n in nodes:
        graph = n.scope.graph
        if graph is None:
            continue
        if n.scope not in taken:
            taken[n.scope] = {value.name for value in (*graph.initializer, *graph.input)}
            taken[n.scope].update(sparse.values.name for sparse in graph.sparse_initializer)
        if n.payload.name in taken[n.scope]:
            where = describe_node(n.node)
            raise DelayedInitializerValueError(
                f"{where} in {n.scope.label}: an initializer, an input or another delayed node there has the name of "
                "what it yields; a graph may yield each name once",
                node=where,
            )
        taken[n.scope].add(n.payload.name)


def _plan(node: DelayedNode, uses: Uses, layout: Layout, directory: str) -> _Restored:
    payload = node.payload
    if payload.nbytes < _INLINE_BYTES:
        return _Restored(node, "inlined", f"smaller than {_INLINE_BYTES} bytes")
    reason = uses.reason_to_stay_constant(node.scope, payload.name)
    if reason is not None:
        return _Restored(node, "inlined", reason)
    location = plain_location(payload.path, directory)
    if location is not None:
        return _Restored(node, "referenced", "", location, payload.offset)
    offset = layout.place_stored((payload.path, payload.offset), payload.nbytes)
    return _Restored(node, "written", f"'{node.attributes.filename}' is out of reach from there", None, offset)


def _apply(
    model: onnx.ModelProto,
    scopes: Sequence[Scope],
    restored: Iterable[_Restored],
    data_name: str,
    reader: PayloadReader,
) -> None:
    for r in restored:
        tensor = _tensor(r, data_name, reader)
        # ONNX Runtime inlines functions, and with them only nodes: in a function, bodies included, a Constant it is.
        if r.node.scope.root.function is not None:
            _put_constant(r.node, tensor)
        elif r.node.scope.graph is not None:
            _put_initializer(model, r.node.scope.graph, r.node.node, tensor)
    for scope in scopes:
        if scope.graph is not None and scope.root.function is None:
            gone = [index for index, node in enumerate(scope.nodes) if is_delayed(node)]
            for index in reversed(gone):
                del scope.nodes[index]
    for holder in (model, *model.functions):
        for index in reversed([i for i, opset in enumerate(holder.opset_import) if opset.domain == DOMAIN]):
            del holder.opset_import[index]
    for function in model.functions:
        if any(n.op_type == "Constant" for n in iter_nodes(function.node)):
            _import_standard(function, model)


def _tensor(restored: _Restored, data_name: str, reader: PayloadReader) -> onnx.TensorProto:
    payload, element_type = restored.node.payload, restored.node.attributes.element_type
    tensor = onnx.TensorProto(name=payload.name, data_type=element_type.onnx, dims=payload.shape)
    if restored.action == "inlined":
        put_inline(tensor, reader.read(payload) if payload.nbytes else b"")
    else:
        location = restored.location if restored.location is not None else data_name
        set_external_data(tensor, location, restored.offset, payload.nbytes)
    return tensor


def _put_initializer(
    model: onnx.ModelProto, graph: onnx.GraphProto, node: onnx.NodeProto, tensor: onnx.TensorProto
) -> None:
    if node.HasField("doc_string"):
        tensor.doc_string = node.doc_string
    tensor.metadata_props.extend(node.metadata_props)
    graph.initializer.append(tensor)
    if model.ir_version >= 4:
        return
    # Before IR version 4 every initializer is listed as an input.
    for index, value in enumerate(graph.value_info):
        if value.name == tensor.name:
            graph.input.append(value)
            del graph.value_info[index]
            return
    graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))


def _put_constant(delayed: DelayedNode, tensor: onnx.TensorProto) -> None:
    """The node becomes a Constant in place: its name, its documentation and its metadata stay."""
    node = delayed.node
    del node.attribute[:]
    node.op_type, node.domain = "Constant", ""
    attribute = node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR)
    attribute.t.CopyFrom(tensor)


def _import_standard(function: onnx.FunctionProto, model: onnx.ModelProto) -> None:
    if all(opset.domain not in ("", "ai.onnx") for opset in function.opset_import):
        versions = [opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")]
        function.opset_import.add(domain="", version=versions[0] if versions else _DEFAULT_OPSET)


def _report(restored: _Restored, data_name: str | None) -> TensorReport:
    payload = restored.node.payload
    path = data_name if restored.action == "written" else restored.location
    return TensorReport(
        payload.name,
        restored.node.scope.label,
        "delayed node",
        payload.element_type.name,
        payload.shape,
        payload.nbytes,
        restored.action,
        restored.reason,
        path,
        restored.offset if path is not None else None,
    )
