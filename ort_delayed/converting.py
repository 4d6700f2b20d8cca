"""``convert_model``: the constants of a model become ``ai.rt::DelayedInitializer`` nodes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, SupportsIndex

import onnx

from ort_delayed.conversion_plan import Decision, Layout, Select, find_candidates, plan_conversion
from ort_delayed.conversion_report import ConversionReport, TensorReport
from ort_delayed.delayed_nodes import (
    delayed_node_report,
    find_delayed_nodes,
    import_domain,
    plan_delayed_nodes,
    rename_files,
)
from ort_delayed.graphs import NamePool
from ort_delayed.kept_tensors import decision_report, inline_others, relocate
from ort_delayed.loader.element_types import onnx_type_name
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.model_outputs import check_destination, write_outputs
from ort_delayed.new_files import PendingDataFile
from ort_delayed.ops.attributes import LOAD_DEVICES
from ort_delayed.ops.node import make_node
from ort_delayed.payload_files import PayloadReader, check_payloads
from ort_delayed.reachable_files import plain_location
from ort_delayed.skeletons import Skeleton
from ort_delayed.value_uses import Scope, find_uses, iter_scopes

_CONSTANT_REASONS = {
    "sparse_value": "it is sparse",
    "value_float": "it is a single number",
    "value_int": "it is a single number",
    "value_string": "it is text",
    "value_strings": "it is text",
}

__all__ = ["MIN_BYTES", "convert_model"]

MIN_BYTES = 4096
"""Smallest payload that is delayed by default: one page. A smaller one costs a load a run and saves no page."""


def convert_model(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    load_device: str = "file",
    min_bytes: int = MIN_BYTES,
    select: Select = None,
    copy: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int], Any] | None = None,
) -> ConversionReport:
    """Write a model whose constants are delayed initializers; the source stays as it is.

    Initializers and Constant nodes of the main graph, of If, Loop and Scan bodies and of model-local functions become
    ``ai.rt::DelayedInitializer`` nodes. Payloads that stand in external files are referenced there. The others go to
    one data file beside the destination, ``NAME.<digest>.weights``, page-aligned, in order of first use. What ONNX
    Runtime needs while loading stays a constant; the report says why for each.

    Args:
        source: the model file.
        destination: the model file to write. Both files appear whole or not at all.
        load_device: ``"file"`` (read at every run) or ``"cpu"`` (read when the session is made).
        min_bytes: smallest payload, in bytes, that is delayed.
        select: which tensors are delayed, of those that can be: a callable ``(name, tensor) -> bool``, where
            ``tensor`` is a TensorProto with name, type and dims and without values, or a list of patterns as of
            ``fnmatch``; by default all.
        copy: copy payloads of external files to the data file too, so that the model needs nothing else.
        overwrite: replace a destination that exists, and its data file.
        progress: called with the bytes of the data file that are written, and those in all, as they grow.

    Returns:
        what was done with each tensor; it prints as a table.

    Raises:
        ValueError: a bad argument, source and destination are the same file, the source is no ONNX model, or a tensor
            of it is malformed.
        FileExistsError: the destination exists, and ``overwrite`` is false.
        DelayedInitializerError: an external payload cannot be read: also FileNotFoundError, EOFError and so on.
        OSError: reading or writing failed, for instance because the disk is full.
    """
    _check_arguments(load_device, min_bytes)
    place = check_destination(source, destination, overwrite=overwrite)
    with Skeleton(source) as skeleton:
        scopes = list(iter_scopes(skeleton.model))
        uses = find_uses(skeleton.model, scopes)
        candidates = find_candidates(skeleton, scopes, uses, min_bytes=min_bytes, select=select)
        layout = Layout()
        moved = skeleton.directory != place.directory
        decisions = plan_conversion(
            candidates, layout, directory=place.directory, moved=moved, copy=copy, reachable=plain_location
        )
        nodes = plan_delayed_nodes(
            find_delayed_nodes(scopes, skeleton.directory, relocated=moved or copy),
            layout,
            directory=place.directory,
            moved=moved,
            copy=copy,
        )
        check_payloads([*_payloads(decisions, moved or copy), *(n.payload for n in nodes if n.copied)])

        def fill(data: PendingDataFile) -> None:
            if progress is not None:
                data.on_progress = lambda done: progress(done, layout.end)
            with PayloadReader(skeleton) as reader:
                for d in decisions:
                    if d.in_data_file:
                        reader.append(data, d.offset or 0, d.candidate.stored, d.candidate.proto)
                for n in nodes:
                    if n.copied:
                        reader.append(data, n.offset, n.payload)

        def finish(data_name: str) -> None:
            with PayloadReader(skeleton) as reader:
                _apply(skeleton.model, scopes, decisions, data_name, load_device, reader)
                if moved or copy:
                    inline_others(skeleton, decisions, reader)
            rename_files(nodes, data_name)

        data_name = write_outputs(skeleton, place, fill if layout.end else None, finish)
        rows = [decision_report(d, data_name) for d in decisions]
        rows += [delayed_node_report(n, data_name) for n in nodes] + _other_constants(scopes)
        rows.sort(key=lambda row: row.action == "kept")
        data_path = os.path.join(place.directory, data_name) if data_name is not None else None
        return ConversionReport(skeleton.path, place.path, data_path, layout.end, tuple(rows), _unmatched(select, rows))


def _unmatched(select: Select, rows: Iterable[TensorReport]) -> tuple[str, ...]:
    """The patterns that no tensor's name matches."""
    if select is None or callable(select):
        return ()
    names = {row.name for row in rows}
    return tuple(dict.fromkeys(p for p in select if not any(fnmatchcase(name, p) for name in names)))


def _check_arguments(load_device: str, min_bytes: int) -> None:
    if load_device not in LOAD_DEVICES:
        raise ValueError(f"load_device must be {' or '.join(map(repr, LOAD_DEVICES))}, found {load_device!r}")
    if isinstance(min_bytes, bool) or not isinstance(min_bytes, SupportsIndex):
        raise TypeError(f"min_bytes must be a whole number of bytes, found {min_bytes!r}")
    if min_bytes < 0:
        raise ValueError(f"min_bytes must be a number of bytes from 0 on, found {min_bytes}")


def _payloads(decisions: Iterable[Decision], relocated: bool) -> Iterator[TensorOnDisk]:
    """The payloads of other files that the new model will need, or that are copied."""
    for decision in decisions:
        candidate = decision.candidate
        if candidate.external and candidate.stored is not None and (decision.action != "kept" or relocated):
            yield candidate.stored


def _apply(
    model: onnx.ModelProto,
    scopes: Sequence[Scope],
    decisions: Sequence[Decision],
    data_name: str,
    load_device: str,
    reader: PayloadReader,
) -> None:
    """Change the model as decided, in place: the scopes stay what they are."""
    names = NamePool(model)
    delayed: dict[Scope, list[Decision]] = {scope: [] for scope in scopes}
    for decision in decisions:
        if decision.action == "kept":
            relocate(decision, data_name, reader)
        else:
            delayed[decision.candidate.scope].append(decision)
    for scope, own in delayed.items():
        if own:
            _put_nodes(scope, own, data_name, load_device, names)
            import_domain(scope.root.function or model)


def _put_nodes(scope: Scope, decisions: Sequence[Decision], data_name: str, load_device: str, names: NamePool) -> None:
    """Delayed nodes instead of initializers and Constant nodes, in front of the node list, in the given order."""
    constants = {n.output[0]: n for n in scope.nodes if n.op_type == "Constant" and len(n.output) == 1}
    initializers = {t.name: t for t in scope.graph.initializer} if scope.graph is not None else {}
    occurrences = Counter(node.name for node in scope.nodes)
    for decision in decisions:
        candidate = decision.candidate
        new = make_node(
            candidate.name,
            filename=decision.filename or data_name,
            shape=candidate.shape,
            dtype=candidate.onnx_type,
            offset=decision.offset or 0,
            load_device=load_device,
        )
        if candidate.kind == "Constant":
            # Changed in place: its name, its documentation and its metadata stay.
            node = constants[candidate.name]
            del node.attribute[:]
            node.op_type, node.domain = new.op_type, new.domain
            # ONNX Runtime lets Constants share a name, since it keeps none of them as a node.
            if node.name and occurrences[node.name] > 1:
                node.name = names.fresh(node.name)
            node.attribute.extend(new.attribute)
        else:
            tensor = initializers[candidate.name]
            new.name = names.fresh(f"delayed {candidate.name}")
            if tensor.HasField("doc_string"):
                new.doc_string = tensor.doc_string
            new.metadata_props.extend(tensor.metadata_props)
            scope.nodes.append(new)
    if scope.graph is not None:
        _remove_initializers(scope.graph, {d.candidate.name for d in decisions if d.candidate.kind == "initializer"})
    rank = {d.candidate.name: number for number, d in enumerate(decisions)}
    scope.nodes.sort(key=lambda node: rank.get(node.output[0], len(rank)) if node.output else len(rank))


def _remove_initializers(graph: onnx.GraphProto, names: set[str]) -> None:
    """Take initializers away, and the inputs of the same name that IR versions before 4 demanded."""
    for values in (graph.initializer, graph.input):
        gone = [index for index, value in enumerate(values) if value.name in names]
        if values is graph.input:
            graph.value_info.extend(graph.input[index] for index in gone)
        for index in reversed(gone):
            del values[index]


def _other_constants(scopes: Sequence[Scope]) -> list[TensorReport]:
    """Rows for constants that no delayed node can stand for."""
    rows = []
    for scope in scopes:
        for sparse in scope.graph.sparse_initializer if scope.graph is not None else ():
            kind = onnx_type_name(sparse.values.data_type)
            rows.append(
                _kept(sparse.values.name, scope, "sparse initializer", kind, tuple(sparse.dims), "it is sparse")
            )
        for node in scope.nodes:
            if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
                continue
            for attribute in node.attribute:
                reason = _CONSTANT_REASONS.get(attribute.name)
                if attribute.ref_attr_name:
                    reason = "each call of the function gives its value"
                if reason is not None:
                    rows.append(_kept(", ".join(node.output), scope, "Constant", attribute.name, (), reason))
    return rows


def _kept(name: str, scope: Scope, kind: str, element_type: str, shape: tuple[int, ...], reason: str) -> TensorReport:
    return TensorReport(name, scope.label, kind, element_type, shape, 0, "kept", reason)
