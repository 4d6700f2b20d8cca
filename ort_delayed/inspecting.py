"""``inspect_weights``: what a model or a checkpoint holds and where the bytes are, without reading any weight."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import onnx

from ort_delayed.conversion_plan import find_candidates
from ort_delayed.delayed_nodes import find_delayed_nodes
from ort_delayed.loader.element_types import element_type_from_onnx, onnx_type_name
from ort_delayed.loader.layers import group_names
from ort_delayed.loader.sources import discover_weights, local_source, select_source
from ort_delayed.skeletons import Skeleton
from ort_delayed.value_uses import Scope, find_uses, iter_scopes

__all__ = [
    "InspectedTensor",
    "Inspection",
    "ModelValue",
    "TensorGroup",
    "WeightFile",
    "inspect_weights",
    "model_values",
]


@dataclass(frozen=True, slots=True)
class InspectedTensor:
    """One tensor of a model or a checkpoint.

    Attributes:
        name: its name.
        graph: where it stands: ``"main graph"``, a body, a function; empty for a checkpoint.
        kind: ``"initializer"``, ``"Constant"``, ``"delayed node"``, or ``"tensor"`` for a checkpoint.
        element_type: its element type, ``"float32"``.
        shape: elements per axis.
        nbytes: bytes of its raw values; 0 for types without.
        storage: ``"inline"`` in the model file, ``"external"`` in another, ``"cpu"`` or ``"file"`` for a delayed node's
            load device, ``"checkpoint"``.
        path: the file that holds the bytes.
        offset: the first byte in that file, or None where small values stand among the graph.
        group: the layer group that its name belongs to.
    """

    name: str
    graph: str
    kind: str
    element_type: str
    shape: tuple[int, ...]
    nbytes: int
    storage: str
    path: str
    offset: int | None
    group: str = ""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one layer group: its name, how many, their bytes, and their element types, sorted."""

    name: str
    tensors: int
    nbytes: int
    element_types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file that tensors are in.

    Attributes:
        path: the file.
        nbytes: its size, None where it cannot be found.
        tensors: how many tensors are in it.
        tensor_bytes: bytes of it that belong to tensors; what several share counts once.
    """

    path: str
    nbytes: int | None
    tensors: int
    tensor_bytes: int


@dataclass(frozen=True, slots=True)
class ModelValue:
    """An input or output of a model: its name, element type and shape; an axis without a number has a name or ``?``."""

    name: str
    element_type: str
    shape: tuple[int | str, ...] | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """What :func:`inspect_weights` found. Sizes in bytes.

    Attributes:
        source: the file, index or directory that was read.
        source_format: ``"onnx"`` or ``"safetensors"``.
        inputs: what the model takes; empty for a checkpoint.
        outputs: what it yields; empty for a checkpoint.
        tensors: every tensor: a model's in order of first use, a checkpoint's in order of its groups.
        groups: the layer groups, in the order in which they are streamed.
        files: the files, the model file first.
        total_bytes: the sum of all tensors.
        shared_bytes: what of it several tensors have in common, and is in a file once.
        is_packed: whether ``pack_model`` wrote the model.
    """

    source: str
    source_format: str
    inputs: tuple[ModelValue, ...]
    outputs: tuple[ModelValue, ...]
    tensors: tuple[InspectedTensor, ...]
    groups: tuple[TensorGroup, ...]
    files: tuple[WeightFile, ...]
    total_bytes: int
    shared_bytes: int
    is_packed: bool = False

    def storage_bytes(self, storage: str) -> int:
        """Bytes of all tensors with that storage."""
        return sum(t.nbytes for t in self.tensors if t.storage == storage)


def inspect_weights(source: str | os.PathLike[str]) -> Inspection:
    """Find out what a model or a checkpoint holds.

    Args:
        source: an ONNX model, converted, packed or neither; a ``.safetensors`` file, an index, or a directory.

    Raises:
        NotAModelError: an ``.onnx`` file that is none.
        DelayedInitializerError, ExternalDataError: a tensor does not say where its bytes are.
        ShardFormatError, LocalWeightsRequired, FileNotFoundError, OSError: as for ``StreamingWeightLoader``.
    """
    local = local_source(source)
    selected = select_source(local)
    if selected.is_file() and not selected.name.lower().endswith((".safetensors", ".json")):
        return _inspect_model(str(selected))
    found = discover_weights(local)
    tensors = [
        InspectedTensor(t.name, "", "tensor", t.element_type.name, t.shape, t.nbytes, "checkpoint", t.path, t.offset)
        for t in found.tensors
    ]
    return _inspection(str(found.source), "safetensors", tensors)


def model_values(path: str | os.PathLike[str]) -> tuple[tuple[ModelValue, ...], tuple[ModelValue, ...]]:
    """The inputs and the outputs of a model file, as it declares them.

    Raises:
        NotAModelError, OSError: the file is no ONNX model, or cannot be opened.
    """
    with Skeleton(path) as skeleton:
        return _values(skeleton.model.graph)


def _values(graph: onnx.GraphProto) -> tuple[tuple[ModelValue, ...], tuple[ModelValue, ...]]:
    constants = {t.name for t in graph.initializer}
    return tuple(_value(v) for v in graph.input if v.name not in constants), tuple(_value(v) for v in graph.output)


def _inspect_model(path: str) -> Inspection:
    with Skeleton(path) as skeleton:
        model = skeleton.model
        scopes = list(iter_scopes(model))
        uses = find_uses(model, scopes)
        found: dict[tuple[Scope, str], InspectedTensor] = {}
        for c in find_candidates(skeleton, scopes, uses, min_bytes=0, select=None):
            where = c.stored.path if c.stored is not None else skeleton.path
            offset = c.stored.offset if c.stored is not None else None
            storage = "external" if c.external else "inline"
            found[c.scope, c.name] = InspectedTensor(
                c.name, c.scope.label, c.kind, c.element_type, c.shape, c.nbytes, storage, where, offset
            )
        for n in find_delayed_nodes(scopes, skeleton.directory, relocated=False):
            p, device = n.payload, n.attributes.load_device
            found[n.scope, p.name] = InspectedTensor(
                p.name,
                n.scope.label,
                "delayed node",
                p.element_type.name,
                p.shape,
                p.nbytes,
                device,
                p.path,
                p.offset,
            )
        last = len(uses.order)
        keys = sorted(found, key=lambda key: uses.order.get(key, last))
        inputs, outputs = _values(model.graph)
        return _inspection(
            skeleton.path,
            "onnx",
            [found[key] for key in keys],
            inputs=inputs,
            outputs=outputs,
            # A key that is not UTF-8 comes as bytes.
            is_packed=any(str(p.key).startswith("ort_delayed.packed") for p in model.metadata_props),
        )


def _inspection(
    source: str,
    source_format: str,
    tensors: list[InspectedTensor],
    *,
    inputs: tuple[ModelValue, ...] = (),
    outputs: tuple[ModelValue, ...] = (),
    is_packed: bool = False,
) -> Inspection:
    groups = group_names(dict.fromkeys(t.name for t in tensors))
    group_of = {name: group for group, names in groups for name in names}
    grouped = tuple(_in_group(t, group_of[t.name]) for t in tensors)
    if source_format != "onnx":
        rank = {name: i for i, name in enumerate(name for _, names in groups for name in names)}
        grouped = tuple(sorted(grouped, key=lambda t: rank[t.name]))
    members: dict[str, list[InspectedTensor]] = {group: [] for group, _ in groups}
    for tensor in grouped:
        members[tensor.group].append(tensor)
    files = _files(source if source_format == "onnx" else None, grouped)
    in_files = sum(f.tensor_bytes for f in files) + sum(t.nbytes for t in grouped if t.offset is None)
    total = sum(t.nbytes for t in grouped)
    return Inspection(
        source,
        source_format,
        inputs,
        outputs,
        grouped,
        tuple(_group(name, own) for name, own in members.items()),
        files,
        total,
        total - in_files,
        is_packed,
    )


def _in_group(t: InspectedTensor, group: str) -> InspectedTensor:
    return InspectedTensor(
        t.name, t.graph, t.kind, t.element_type, t.shape, t.nbytes, t.storage, t.path, t.offset, group
    )


def _group(name: str, own: list[InspectedTensor]) -> TensorGroup:
    types = tuple(sorted({t.element_type for t in own}))
    return TensorGroup(name, len(own), sum(t.nbytes for t in own), types)


def _files(model: str | None, tensors: Iterable[InspectedTensor]) -> tuple[WeightFile, ...]:
    ranges: dict[str, list[tuple[int, int]]] = {} if model is None else {model: []}
    counts: dict[str, int] = {}
    for t in tensors:
        ranges.setdefault(t.path, [])
        counts[t.path] = counts.get(t.path, 0) + 1
        if t.offset is not None:
            ranges[t.path].append((t.offset, t.offset + t.nbytes))
    return tuple(
        WeightFile(path, _size(path), counts.get(path, 0), _covered_bytes(own)) for path, own in ranges.items()
    )


def _covered_bytes(ranges: list[tuple[int, int]]) -> int:
    covered, end = 0, 0
    for start, stop in sorted(ranges):
        covered += max(stop - max(start, end), 0)
        end = max(end, stop)
    return covered


def _size(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except OSError:
        return None


def _value(value: onnx.ValueInfoProto) -> ModelValue:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return ModelValue(value.name, kind or "unknown", None)
    tensor = value.type.tensor_type
    found = element_type_from_onnx(tensor.elem_type)
    name = found.name if found is not None else onnx_type_name(tensor.elem_type)
    if not tensor.HasField("shape"):
        return ModelValue(value.name, name, None)
    shape = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim)
    return ModelValue(value.name, name, shape)
