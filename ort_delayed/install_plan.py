"""Which initializer gets which tensor: a pure plan, made and checked before any weight is read.

Without a weight source every external initializer gets the bytes that its own entry names. With one, every
initializer whose name the source knows gets that tensor, inline ones too: a checkpoint's bias of two floats, which
exporters keep inline, must not silently stay the model's old one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx

from ort_delayed.loader.element_types import ElementType, element_type_from_onnx, onnx_type_name
from ort_delayed.loader.external_data import external_tensor, has_external_data
from ort_delayed.loader.shards import shard_path
from ort_delayed.loader.sources import DiscoveredWeights
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.value_uses import Scope, Uses, find_uses, iter_scopes
from ort_delayed.weight_mismatches import Mismatches, describe_shape

__all__ = ["Assignment", "NameMap", "plan_from_model", "plan_from_weights"]

NameMap = Mapping[str, str | None] | Callable[[str], str | None]
"""From an initializer's name to the tensor's in the weight source; None: the initializer stays as the model has it."""

_INLINE_BYTES = 64 << 10
"""Largest initializer that is put inline because ONNX Runtime needs its value while loading (shapes, axes, pads)."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One initializer and where its bytes come from.

    Attributes:
        scope: the graph that the initializer stands in.
        tensor: the initializer, alive in the model.
        source: where the bytes stand; it is named as the initializer.
        is_own: whether these are the bytes that the model's own external-data entry names.
        inline: whether the bytes go into the proto, because ONNX Runtime reads them while loading (or they are
            small, and stand there already); otherwise they are copied into a value that the session uses in place.
    """

    scope: Scope
    tensor: onnx.TensorProto = field(compare=False, repr=False)
    source: TensorOnDisk
    is_own: bool
    inline: bool

    @property
    def is_main(self) -> bool:
        """Whether the initializer stands in the main graph."""
        return self.scope.parent is None


def plan_from_model(
    model: onnx.ModelProto, directory: str, *, can_carry: Callable[[ElementType], bool]
) -> tuple[Assignment, ...]:
    """Every external initializer of the model's graphs with the bytes that its own entry names.

    Args:
        model: the model; nothing is changed.
        directory: absolute directory that its external-data locations are relative to.
        can_carry: whether ONNX Runtime has values of an element type.

    Raises:
        ExternalDataError: an entry does not say where its bytes are.
        LocalWeightsRequired: a location is a URL or absolute.
        WeightMismatchError: an element type that ONNX Runtime has no tensors for.
    """
    scopes = list(iter_scopes(model))
    uses = find_uses(model, scopes)
    assignments = [
        _assign(scope, tensor, _own_bytes(tensor, directory), uses, is_own=True)
        for scope, tensor in _initializers(scopes)
        if has_external_data(tensor)
    ]
    mismatches = Mismatches("the model's external data")
    _check_types(assignments, can_carry, mismatches)
    mismatches.raise_if_any()
    return tuple(assignments)


def plan_from_weights(
    model: onnx.ModelProto,
    directory: str,
    weights: DiscoveredWeights,
    name_map: NameMap | None,
    *,
    allow_unused_tensors: bool,
    can_carry: Callable[[ElementType], bool],
) -> tuple[Assignment, ...]:
    """Every initializer with the tensor that the weight source has for it.

    An external initializer must have one, unless ``name_map`` says None for it: then it gets the bytes that its own
    entry names. An inline initializer that the source does not know stays as it is.

    Raises:
        WeightMismatchError: missing initializers, unknown tensors (unless ``allow_unused_tensors``), other types or
            shapes; all of them in one message.
        ExternalDataError, LocalWeightsRequired: as for :func:`plan_from_model`.
    """
    scopes = list(iter_scopes(model))
    uses = find_uses(model, scopes)
    tensors = {t.name: t for t in weights.tensors}
    taken: set[str] = set()
    initializers = list(_initializers(scopes))
    mismatches = Mismatches(f"the weights in '{weights.source}'")
    wanted_names = _wanted_names([t.name for _, t in initializers], name_map, mismatches)
    assignments = []
    for scope, tensor in initializers:
        wanted = wanted_names[tensor.name]
        if wanted is None:
            if has_external_data(tensor):
                assignments.append(_assign(scope, tensor, _own_bytes(tensor, directory), uses, is_own=True))
            continue
        found = tensors.get(wanted)
        if found is None:
            if has_external_data(tensor) or _is_explicit(name_map, tensor.name):
                mismatches.add_missing(_expected(tensor), wanted)
            continue
        taken.add(found.name)
        if mismatches.fits(_expected(tensor), found):
            assignments.append(_assign(scope, tensor, found, uses, is_own=False))
    mismatches.add_unknown([t for t in weights.tensors if t.name not in taken], fatal=not allow_unused_tensors)
    _check_types(assignments, can_carry, mismatches)
    mismatches.raise_if_any()
    return tuple(assignments)


def _initializers(scopes: Sequence[Scope]) -> Iterator[tuple[Scope, onnx.TensorProto]]:
    for scope in scopes:
        # ONNX Runtime inlines functions under new names: what stands in a body there keeps to its file.
        if scope.graph is not None and scope.root.function is None:
            for tensor in scope.graph.initializer:
                yield scope, tensor


def _own_bytes(tensor: onnx.TensorProto, directory: str) -> TensorOnDisk:
    record = external_tensor(tensor, directory)
    location = next(e.value for e in reversed(tensor.external_data) if e.key == "location")
    shard_path(location, directory, f"initializer '{tensor.name}'")  # refuses URLs and absolute paths
    return record


def _assign(scope: Scope, tensor: onnx.TensorProto, source: TensorOnDisk, uses: Uses, *, is_own: bool) -> Assignment:
    needed = uses.reason_to_stay_constant(scope, tensor.name) is not None and source.nbytes <= _INLINE_BYTES
    stays = not has_external_data(tensor) and source.nbytes <= _INLINE_BYTES
    return Assignment(scope, tensor, replace(source, name=tensor.name), is_own, inline=needed or stays)


def _wanted_names(names: Sequence[str], name_map: NameMap | None, mismatches: Mismatches) -> dict[str, str | None]:
    if name_map is None:
        return {name: name for name in names}
    if not isinstance(name_map, Mapping):
        return {name: name_map(name) for name in names}
    mismatches.add_unknown_keys(sorted(name_map.keys() - set(names)))
    return {name: name_map.get(name, name) for name in names}


def _is_explicit(name_map: NameMap | None, name: str) -> bool:
    return isinstance(name_map, Mapping) and name in name_map


def _expected(tensor: onnx.TensorProto) -> TensorOnDisk | str:
    """What the model declares the initializer to be, as a record without a place; or why it is nothing."""
    element_type = element_type_from_onnx(tensor.data_type)
    if element_type is None:
        return f"initializer '{tensor.name}' is of type {onnx_type_name(tensor.data_type)}, which has no raw storage"
    return TensorOnDisk(tensor.name, "", 0, element_type.nbytes(tensor.dims), tuple(tensor.dims), element_type)


def _check_types(
    assignments: Sequence[Assignment], can_carry: Callable[[ElementType], bool], mismatches: Mismatches
) -> None:
    carried: dict[ElementType, bool] = {}
    for assignment in assignments:
        source = assignment.source
        if not assignment.inline and not _carried(source.element_type, can_carry, carried):
            mismatches.add_other(
                source.name,
                f"'{source.name}' is {describe_shape(source)}: this onnxruntime has no values of that element type "
                "that could be installed; a newer one may have, and a session without installing needs none",
            )


def _carried(
    element_type: ElementType, can_carry: Callable[[ElementType], bool], known: dict[ElementType, bool]
) -> bool:
    if element_type not in known:
        known[element_type] = can_carry(element_type)
    return known[element_type]
