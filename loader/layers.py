"""From tensor names to layer groups, in the order in which a model is built: pure functions of the names.

Embeddings come first, numbered layers follow in numeric order, then the rest in natural order, and heads last. The
order depends on nothing else: not on the shards, the index, the locale or the hash seed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ort_delayed.loader.tensor_on_disk import TensorOnDisk

__all__ = ["LayerGroup", "LayerGroupSpec", "group_names", "group_tensors", "natural_key"]

# A number is a layer's behind one of these components: `encoder.layer.3`, `model.layers.3`, `h.3`, `block.3`.
_LAYER = re.compile(
    r"(?:^|\.)(?P<container>layers?|blocks?|h)\.(?P<number>[0-9]{1,9})(?=\.|$)", re.IGNORECASE | re.ASCII
)
_HEAD = r"(?<![^.])(?:cls|embed_out|heads?|qa_outputs|score)(?![^.])|classifier|classification_head|lm_head"
_EMBEDDING = r"embed|(?<![^.])(?:wte|wpe|shared)(?![^.])"
# Both for lower-case paths. Whichever comes first decides; looking at the first letter halves the time of a search.
_END = re.compile(rf"(?=[cehlqsw])(?:(?P<head>{_HEAD})|(?P<embedding>{_EMBEDDING}))")
_HEAD_AT_END = re.compile(rf"(?:{_HEAD})[^.]*$")
# Last components that are parameters of the module before them.
_PARAMETERS = {"weight", "bias", "gamma", "beta", "running_mean", "running_var", "num_batches_tracked"}
_PARAMETERS |= {"weight_scale", "weight_scale_inv", "input_scale", "qweight", "qzeros", "scales", "g_idx"}
_DIGITS = re.compile(r"([0-9]+)")

_FIRST, _NUMBERED, _REST, _LAST = range(4)
_Order = tuple[int, str, int, str]


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


def natural_key(text: str) -> tuple[str, str]:
    """A sort key by which ``layer.2`` comes before ``layer.10``; case counts only between names that are else equal.

    Numbers are compared by their digits, of which there may be any number.
    """
    return _natural(text), text


def _natural(text: str) -> str:
    # A number becomes a sign below every other, how many digits it has (as one character), and the digits.
    parts = _DIGITS.split(text.lower())
    for i in range(1, len(parts), 2):
        digits = parts[i].lstrip("0")
        parts[i] = f"\0{chr(min(len(digits), sys.maxunicode))}{digits}"
    return "".join(parts)


def group_tensors(tensors: Iterable[TensorOnDisk], layers_per_group: int = 1) -> tuple[LayerGroup, ...]:
    """The layer groups of ``tensors`` (names unique), ``layers_per_group`` consecutive ones joined into one."""
    by_name = {t.name: t for t in tensors}
    files_of: dict[frozenset[str], tuple[Path, ...]] = {}
    groups = []
    for name, names in group_names(by_name, layers_per_group):
        members = tuple([by_name[n] for n in names])
        paths = frozenset([t.path for t in members])
        if paths not in files_of:
            files_of[paths] = tuple(sorted(map(Path, paths)))
        spec = LayerGroupSpec(name, names, files_of[paths], sum([t.nbytes for t in members]))
        groups.append(LayerGroup(spec, members))
    return tuple(groups)


def group_names(names: Iterable[str], layers_per_group: int = 1) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The layer groups of tensor ``names``: pairs of the group's name and its tensors' names, both in order."""
    by_place: dict[_Place, list[str]] = {}
    for name in names:
        by_place.setdefault(_place(name), []).append(name)
    labels = _label_stacks({place.stack for place in by_place if place.kind == _NUMBERED})
    members: dict[str, list[str]] = {}
    order: dict[str, _Order] = {}
    for place, placed in by_place.items():
        group, key = _group(place, labels)
        if group in members:  # one stack under two paths, or a module that is called like a layer
            members[group].extend(placed)
            order[group] = min(order[group], key)
        else:
            members[group] = placed
            order[group] = key
    ordered = sorted(members, key=order.__getitem__)
    joined = []
    for start in range(0, len(ordered), layers_per_group):
        part = ordered[start : start + layers_per_group]
        name = part[0] if len(part) == 1 else f"{part[0]}..{part[-1]}"
        together = [n for g in part for n in members[g]]
        if len(together) > 1:
            together.sort(key=natural_key)
        joined.append((name, tuple(together)))
    return tuple(joined)


class _Place(NamedTuple):
    """Where a tensor belongs: its kind, and for numbered layers the stack (lower-case path before the number)."""

    kind: int
    stack: str = ""
    number: int = 0
    module: str = ""


def _place(name: str) -> _Place:
    path = name.replace("/", ".").strip(".")
    numbered = _LAYER.search(path)
    if numbered is not None:
        stack = path[: numbered.end("container")].lower()
        # The layers of a head (`classifier.layers.0`) are no stack of the model.
        if _HEAD_AT_END.search(stack.rpartition(".")[0]):
            return _Place(_LAST)
        return _Place(_NUMBERED, stack, int(numbered["number"]))
    end = _END.search(path.lower())
    if end is not None:
        return _Place(_FIRST if end["head"] is None else _LAST)
    module, _, parameter = path.rpartition(".")
    return _Place(_REST, module=module if module and parameter.lower() in _PARAMETERS else path)


def _group(place: _Place, labels: Mapping[str, tuple[int, str]]) -> tuple[str, _Order]:
    if place.kind == _FIRST:
        return "embeddings", (_FIRST, "", 0, "")
    if place.kind == _LAST:
        return "classifier", (_LAST, "", 0, "")
    if place.kind == _NUMBERED:
        rank, label = labels[place.stack]
        return f"{label}layer-{place.number:04d}", (_NUMBERED, f"{rank}{_natural(label)}", place.number, label)
    return place.module, (_REST, _natural(place.module), 0, place.module)


def _label_stacks(stacks: set[str]) -> dict[str, tuple[int, str]]:
    """What goes before ``layer-0000`` for each stack, with its rank: nothing where a model has but one stack."""
    merged = {stack: _longest_form(stack, stacks) for stack in stacks}
    distinct = sorted(set(merged.values()))
    if len(distinct) == 1:
        return dict.fromkeys(stacks, (0, ""))
    sides = [side for _, side in map(_side, distinct)]
    labels: dict[str, tuple[int, str]] = {}
    for stack in distinct:
        rank, side = _side(stack)
        prefix, _, container = stack.rpartition(".")
        label = side if side and sides.count(side) == 1 else prefix or container
        labels[stack] = (rank, f"{label}-")
    return {stack: labels[form] for stack, form in merged.items()}


def _longest_form(stack: str, stacks: set[str]) -> str:
    # Exporters write `encoder.layer.0` for a computed value beside `bert.encoder.layer.0` for a parameter: one stack.
    if "." not in stack:
        return stack
    longer = [s for s in stacks if s.endswith("." + stack) and _side(s) == _side(stack)]
    return longer[0] if len(longer) == 1 else stack


def _side(stack: str) -> tuple[int, str]:
    """Encoders before everything else, decoders behind; the first component that says so decides."""
    for component in stack.split("."):
        if component.endswith("encoder"):
            return 0, "encoder"
        if component.endswith("decoder"):
            return 2, "decoder"
    return 1, ""
