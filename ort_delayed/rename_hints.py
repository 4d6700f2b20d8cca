"""What an exporter may have made of a weight: guesses from names, element types and shapes, for messages.

Exporters put prefixes before the names of a checkpoint, rename weights, and store linear layers transposed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ort_delayed.loader.tensor_on_disk import TensorOnDisk

__all__ = ["Hint", "find_hints", "is_transpose", "prefix_advice"]

_Form = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Hint:
    """What one initializer may be.

    Attributes:
        name: the initializer.
        prefixed: the tensor whose name differs by a prefix only, of the same type and shape; or None.
        renamed: tensors of the same type and shape.
        transposed: tensors of the same type and the reversed shape, where the two differ.
        is_square: whether ``renamed`` may be transposed as well, which the shape does not show.
    """

    name: str
    prefixed: str | None
    renamed: tuple[str, ...]
    transposed: tuple[str, ...]
    is_square: bool

    def __str__(self) -> str:
        if self.prefixed is not None:
            return f"'{self.name}': renamed, from '{self.prefixed}'"
        how = "renamed or transposed, which a square does not show" if self.is_square else "renamed"
        parts = [_candidates(how, self.renamed), _candidates("transposed", self.transposed)]
        return f"'{self.name}': {'; '.join(filter(None, parts))}"


def is_transpose(expected: TensorOnDisk, found: TensorOnDisk) -> bool:
    """Whether a tensor has the element type and the reversed shape, in two dimensions, and that is another shape."""
    return (
        expected.element_type is found.element_type
        and len(expected.shape) == 2
        and expected.shape == found.shape[::-1]
        and expected.shape != found.shape
    )


def find_hints(missing: Iterable[TensorOnDisk], unknown: Sequence[TensorOnDisk]) -> list[Hint]:
    """For each missing initializer the unknown tensors that it may be; nothing where there is none."""
    by_form: dict[_Form, list[str]] = {}
    for tensor in unknown:
        by_form.setdefault((tensor.element_type, tensor.shape), []).append(tensor.name)
    hints = []
    for wanted in missing:
        same = by_form.get((wanted.element_type, wanted.shape), [])
        is_matrix = len(wanted.shape) == 2
        is_square = is_matrix and wanted.shape[0] == wanted.shape[1]
        turned = by_form.get((wanted.element_type, wanted.shape[::-1]), []) if is_matrix and not is_square else []
        if same or turned:
            prefixed = [name for name in same if _prefix(wanted.name, name) is not None]
            only = prefixed[0] if len(prefixed) == 1 else None
            hints.append(Hint(wanted.name, only, tuple(same), tuple(turned), is_square))
    return hints


def prefix_advice(hints: Iterable[Hint]) -> str | None:
    """A ``name_map`` for the prefix by which most names differ; None where there is none."""
    prefixes: Counter[tuple[bool, str]] = Counter()
    for hint in hints:
        prefix = _prefix(hint.name, hint.prefixed) if hint.prefixed is not None else None
        if prefix is not None:
            prefixes[prefix] += 1
    if not prefixes:
        return None
    (is_models, text), count = prefixes.most_common(1)[0]
    change = f"name.removeprefix({text!r})" if is_models else f"{text!r} + name"
    return f"{count} names differ by a prefix only: name_map=lambda name: {change} takes them."


def _prefix(initializer: str, tensor: str) -> tuple[bool, str] | None:
    """The prefix by which two names differ, and whether it is the model's name that has it; None if they do not."""
    if initializer.endswith("." + tensor):
        return True, initializer[: -len(tensor)]
    if tensor.endswith("." + initializer):
        return False, tensor[: -len(initializer)]
    return None


def _candidates(how: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" or one of {len(names) - 3} more" if len(names) > 3 else ""
    return f"{how}, from {' or '.join(repr(n) for n in names[:3])}{more}"
