"""Collecting all that does not fit between a model and its weights, and saying it in one message, with what to do."""

from __future__ import annotations

from collections.abc import Sequence

from ort_delayed.install_errors import WeightMismatchError
from ort_delayed.loader.quoting import listed
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.rename_hints import find_hints, is_transpose, prefix_advice

__all__ = ["Mismatches", "describe_shape"]

_SHOWN = 8

_TRANSPOSED_ADVICE = (
    "A transposed weight cannot be installed as it stands: exporters fold the Transpose of a linear layer into its "
    "weight. Export the model with optimize=False (torch.onnx.export), which keeps names and layouts, or leave "
    "weights= out to install the model's own external data."
)
_RENAMED_ADVICE = (
    "Give name_map a mapping (or a callable) from initializer to tensor name; None leaves an initializer as the model "
    "has it."
)
_UNKNOWN_ADVICE = "If the model really does without these tensors, pass allow_unused_tensors=True."


def describe_shape(tensor: TensorOnDisk) -> str:
    """``"float32 [3, 4]"``."""
    return f"{tensor.element_type} {listed(tensor.shape)}"


class Mismatches:
    """What does not fit, in the order in which it was found.

    Args:
        source: how the message names the weights.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._missing: dict[str, tuple[TensorOnDisk, str]] = {}
        self._unknown: list[TensorOnDisk] = []
        self._unknown_keys: list[str] = []
        self._mismatched: dict[str, str] = {}
        self._transposed: dict[str, str] = {}
        self._unknown_is_fatal = False

    def add_missing(self, expected: TensorOnDisk | str, wanted: str) -> None:
        """The weights have no tensor ``wanted`` for an initializer."""
        if isinstance(expected, str):
            self.add_other(wanted, expected)
            return
        label = f"'{expected.name}' ({describe_shape(expected)})"
        if wanted != expected.name:
            label += f", which name_map calls '{wanted}'"
        self._missing[expected.name] = (expected, label)

    def add_unknown(self, tensors: Sequence[TensorOnDisk], *, fatal: bool) -> None:
        """Tensors of the weights that no initializer takes; not ``fatal``: they are only named beside other faults."""
        self._unknown.extend(tensors)
        self._unknown_is_fatal = fatal

    def add_unknown_keys(self, names: Sequence[str]) -> None:
        """Initializers that ``name_map`` names and the model does not have."""
        self._unknown_keys.extend(names)

    def add_other(self, name: str, reason: str) -> None:
        """Another reason why an initializer cannot be installed."""
        self._mismatched.setdefault(name, reason)

    def fits(self, expected: TensorOnDisk | str, found: TensorOnDisk) -> bool:
        """Whether a tensor has the initializer's type and shape; if not, it is noted."""
        if isinstance(expected, str):
            self.add_other(found.name, expected)
            return False
        if (expected.element_type, expected.shape) == (found.element_type, found.shape):
            return True
        text = f"'{expected.name}' is {describe_shape(expected)}, tensor '{found.name}' is {describe_shape(found)}"
        if is_transpose(expected, found):
            text += ": it is stored transposed"
            self._transposed[expected.name] = found.name
        elif expected.shape == found.shape:
            text += ": convert one of them to the other's element type"
        self.add_other(expected.name, text)
        return False

    def raise_if_any(self) -> None:
        """Raise what has been noted.

        Raises:
            WeightMismatchError: something has.
        """
        unknown_counts = bool(self._unknown) and self._unknown_is_fatal
        if not (self._missing or self._mismatched or self._unknown_keys or unknown_counts):
            return
        message = self._message()
        raise WeightMismatchError(
            message,
            missing=tuple(self._missing),
            unknown=(*(t.name for t in self._unknown), *self._unknown_keys),
            mismatched=tuple(self._mismatched),
            transposed=tuple(self._transposed),
        )

    def _message(self) -> str:
        hints = find_hints((expected for expected, _ in self._missing.values()), self._unknown)
        self._transposed |= {hint.name: hint.transposed[0] for hint in hints if hint.transposed}
        prefix = prefix_advice(hints)
        lines = [f"{self._source} cannot be installed into the model; nothing has been copied."]
        lines += _section("Initializers that the weights do not have", [label for _, label in self._missing.values()])
        lines += _section(
            "Tensors that the model does not know",
            [f"'{t.name}' ({describe_shape(t)})" for t in self._unknown],
        )
        lines += _section(
            "Names in name_map that are no initializers of the model", [f"'{n}'" for n in self._unknown_keys]
        )
        lines += _section("Initializers that do not fit", list(self._mismatched.values()))
        lines += _section("Initializers that may be renamed or transposed weights", [str(h) for h in hints])
        if self._transposed:
            lines.append(_TRANSPOSED_ADVICE)
        if prefix is not None:
            lines.append(prefix)
        if self._missing or self._unknown_keys:
            lines.append(_RENAMED_ADVICE)
        if self._unknown and self._unknown_is_fatal:
            lines.append(_UNKNOWN_ADVICE)
        return "\n".join(lines)


def _section(title: str, entries: Sequence[str]) -> list[str]:
    if not entries:
        return []
    more = f"; and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return [f"{title} ({len(entries)}): {'; '.join(entries[:_SHOWN])}{more}."]
