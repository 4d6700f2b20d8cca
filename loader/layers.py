"""From tensor names to layer groups, in the order in which a model is built: pure functions of the names.

Embeddings come first, numbered layers follow in numeric order, then the rest in natural order, and heads last. The
order depends on nothing else: not on the shards, the index, the locale or the hash seed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ort_delayed.loader.tensor_on_disk import TensorOnDisk

__all__ = ["LayerGroup", "LayerGroupSpec", "group_names", "group_tensors", "natural_key"]

# Components before a number that make it the number of a layer: `encoder.layer.3`, `model.layers.3`, `h.3`, `block.3`.
_CONTAINERS = {"layer", "layers", "block", "blocks", "h"}
_EMBEDDINGS = {"wte", "wpe", "shared"}
_HEADS = {"cls", "embed_out", "head", "heads", "qa_outputs", "score"}
_HEAD_PARTS = ("classifier", "classification_head", "lm_head")
# Last components that are parameters of the module before them.
_PARAMETERS = {"weight", "bias", "gamma", "beta", "running_mean", "running_var", "num_batches_tracked"}
_PARAMETERS |= {"weight_scale", "weight_scale_inv", "input_scale", "qweight", "qzeros", "scales", "g_idx"}
_LAYER_NUMBER = re.compile(r"[0-9]{1,9}")
_DIGITS = re.compile(r"([0-9]+)")

_FIRST, _NUMBERED, _REST, _LAST = range(4)
_Stack = tuple[str, ...]
# Text and numbers in turn, text first, so that two keys always compare like with like.
_NaturalKey = tuple["tuple[int, str] | str", ...]
_Order = tuple[int, int, _NaturalKey, int, _NaturalKey, str]


@dataclass(frozen=True)
class LayerGroupSpec:
    """One layer group, without any weights.

    Attributes:
        name: ``"embeddings"``, ``"layer-0003"``, ``"classifier"``, a module's name, or the first and the last of
            several joined groups as ``"layer-0001..layer-0002"``.
        tensor_names: its tensors, in natural order.
        source_files: the files that hold them, sorted.
        mapped_bytes: the sum of the tensors' sizes.
    """

    name: str
    tensor_names: tuple[str, ...]
    source_files: tuple[Path, ...]
    mapped_bytes: int


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A layer group with the records of its tensors, in the order of ``spec.tensor_names``."""

    spec: LayerGroupSpec
    tensors: tuple[TensorOnDisk, ...]


def natural_key(text: str) -> tuple[_NaturalKey, str]:
    """A sort key by which ``layer.2`` comes before ``layer.10``; case counts only between names that are else equal.

    Numbers are compared by their digits, of which there may be any number.
    """
    return _natural(text), text


def _natural(text: str) -> _NaturalKey:
    parts: list[tuple[int, str] | str] = list(_DIGITS.split(text.lower()))
    for i in range(1, len(parts), 2):
        digits = str(parts[i]).lstrip("0")
        parts[i] = (len(digits), digits)
    return tuple(parts)


def group_tensors(tensors: Iterable[TensorOnDisk], layers_per_group: int = 1) -> tuple[LayerGroup, ...]:
    """The layer groups of ``tensors`` (names unique), ``layers_per_group`` consecutive ones joined into one."""
    by_name = {t.name: t for t in tensors}
    paths = {path: Path(path) for path in {t.path for t in by_name.values()}}
    groups = []
    for name, names in group_names(by_name, layers_per_group):
        members = tuple(by_name[n] for n in names)
        files = tuple(sorted({paths[t.path] for t in members}))
        spec = LayerGroupSpec(name, names, files, sum(t.nbytes for t in members))
        groups.append(LayerGroup(spec, members))
    return tuple(groups)


def group_names(names: Iterable[str], layers_per_group: int = 1) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The layer groups of tensor ``names``: pairs of the group's name and its tensors' names, both in order."""
    places = {name: _place(name) for name in names}
    labels = _label_stacks({p.stack for p in places.values() if p.kind == _NUMBERED})
    members: dict[str, list[str]] = {}
    order: dict[str, _Order] = {}
    for name, place in places.items():
        group, key = _group(place, labels)
        members.setdefault(group, []).append(name)
        order[group] = min(order.get(group, key), key)
    ordered = sorted(members, key=order.__getitem__)
    joined = []
    for start in range(0, len(ordered), layers_per_group):
        part = ordered[start : start + layers_per_group]
        name = part[0] if len(part) == 1 else f"{part[0]}..{part[-1]}"
        joined.append((name, tuple(sorted((n for g in part for n in members[g]), key=natural_key))))
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor belongs: its kind, and for numbered layers the stack (components before the number)."""

    kind: int
    stack: _Stack = ()
    number: int = 0
    module: str = ""


def _place(name: str) -> _Place:
    components = name.replace("/", ".").strip(".").split(".")
    lowered = [c.lower() for c in components]
    for i in range(len(components) - 1):
        if lowered[i] in _CONTAINERS and _LAYER_NUMBER.fullmatch(lowered[i + 1]):
            # The layers of a head (`classifier.layers.0`) are no stack of the model.
            if i > 0 and _is_head(lowered[i - 1]):
                return _Place(_LAST)
            return _Place(_NUMBERED, tuple(lowered[: i + 1]), int(lowered[i + 1]))
    for component in lowered:
        if _is_head(component):
            return _Place(_LAST)
        if "embed" in component or component in _EMBEDDINGS:
            return _Place(_FIRST)
    if len(components) > 1 and lowered[-1] in _PARAMETERS:
        components.pop()
    return _Place(_REST, module=".".join(components))


def _is_head(component: str) -> bool:
    return component in _HEADS or any(part in component for part in _HEAD_PARTS)


def _group(place: _Place, labels: dict[_Stack, tuple[int, str]]) -> tuple[str, _Order]:
    if place.kind == _FIRST:
        return "embeddings", (_FIRST, 0, (), 0, (), "")
    if place.kind == _LAST:
        return "classifier", (_LAST, 0, (), 0, (), "")
    if place.kind == _NUMBERED:
        side, label = labels[place.stack]
        return f"{label}layer-{place.number:04d}", (_NUMBERED, side, _natural(label), place.number, (), label)
    return place.module, (_REST, 0, (), 0, *natural_key(place.module))


def _label_stacks(stacks: set[_Stack]) -> dict[_Stack, tuple[int, str]]:
    """What goes before ``layer-0000`` for each stack, with its rank: nothing where a model has but one stack."""
    merged = {stack: _longest_form(stack, stacks) for stack in stacks}
    distinct = sorted(set(merged.values()))
    if len(distinct) == 1:
        return dict.fromkeys(stacks, (0, ""))
    sides = [_side(stack) for stack in distinct]
    labels: dict[_Stack, tuple[int, str]] = {}
    for stack, (rank, side) in zip(distinct, sides, strict=True):
        unique = side and [s for _, s in sides].count(side) == 1
        labels[stack] = (rank, f"{side if unique else '.'.join(stack[:-1]) or stack[-1]}-")
    return {stack: labels[form] for stack, form in merged.items()}


def _longest_form(stack: _Stack, stacks: set[_Stack]) -> _Stack:
    # Exporters write `encoder.layer.0` for a computed value beside `bert.encoder.layer.0` for a parameter: one stack.
    longer = [s for s in stacks if len(s) > len(stack) > 1 and s[-len(stack) :] == stack and _side(s) == _side(stack)]
    return longer[0] if len(longer) == 1 else stack


def _side(stack: Sequence[str]) -> tuple[int, str]:
    """Encoders before everything else, decoders behind; the first component that says so decides."""
    for component in stack:
        if component.endswith("encoder"):
            return 0, "encoder"
        if component.endswith("decoder"):
            return 2, "decoder"
    return 1, ""
