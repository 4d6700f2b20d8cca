"""The RAM budget: how much incremental resident memory a piece of work may use, and what it means to exceed it."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import SupportsIndex

__all__ = ["HARDLY_MEANT_BYTES", "RamBudget", "RamBudgetExceeded", "RamProbeUnavailable", "format_bytes"]

_MIB = 1 << 20
HARDLY_MEANT_BYTES = 64 << 10
"""A budget of less was probably meant in MiB."""
_MOST_BYTES = 2**63 - 1
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
# A unit of one letter is binary, as for containers and services.
_UNITS |= {"k": 1 << 10, "m": _MIB, "g": 1 << 30, "t": 1 << 40}
_UNITS |= {"kib": 1 << 10, "mib": _MIB, "gib": 1 << 30, "tib": 1 << 40}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)[ \t]*([A-Za-z]*)", re.ASCII)


class RamProbeUnavailable(RuntimeError):  # noqa: N818  (a public name that callers catch)
    """Resident memory cannot be measured, so a budget cannot be kept and no weights are read."""


class RamBudgetExceeded(MemoryError):  # noqa: N818  (a public name that callers catch)
    """An operation took, or would take, more resident memory than its budget.

    Attributes:
        budget_bytes: the budget.
        observed_bytes: resident bytes above the baseline: now where something was requested, else the peak.
        requested_bytes: further bytes that the operation needs; 0 if the budget was exceeded already.
        operation: what was being done, as a phrase behind "while".
        advice: what to do, as a sentence, where that is known.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        observed_bytes: int,
        requested_bytes: int = 0,
        operation: str = "operation",
        advice: str = "",
    ) -> None:
        self.budget_bytes = budget_bytes
        self.observed_bytes = observed_bytes
        self.requested_bytes = requested_bytes
        self.operation = operation
        self.advice = advice
        needed = observed_bytes + requested_bytes
        found = f"{observed_bytes} bytes of resident memory above the baseline"
        if requested_bytes:
            found += f" and {requested_bytes} that are needed next make {needed}"
        super().__init__(
            f"RAM budget exceeded while {operation}: {found}, the budget is {budget_bytes} bytes; "
            f"at least {needed} bytes are needed here"
            + (" (a budget is a number of bytes; did you mean MiB?)" if budget_bytes < HARDLY_MEANT_BYTES else "")
            + (f". {advice}" if advice else "")
        )

    @property
    def needed_bytes(self) -> int:
        """The bytes that this operation had come to need when it was refused: a budget below them does not do."""
        return self.observed_bytes + self.requested_bytes

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are copied and sent between processes by calling the type with `args`, which are not ours.
        return _rebuild, (self.budget_bytes, self.observed_bytes, self.requested_bytes, self.operation, self.advice)


def _rebuild(budget: int, observed: int, requested: int, operation: str, advice: str) -> RamBudgetExceeded:
    return RamBudgetExceeded(
        budget_bytes=budget,
        observed_bytes=observed,
        requested_bytes=requested,
        operation=operation,
        advice=advice,
    )


@dataclass(frozen=True)
class RamBudget:
    """Most bytes of resident memory that a piece of work may add to the process.

    Attributes:
        max_bytes: bytes above the resident set size at the start of the work; positive.

    Raises:
        ValueError: ``max_bytes`` is a bool, not a whole number, or not positive.
    """

    max_bytes: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_bytes", _whole(self.max_bytes, "bytes"))

    @classmethod
    def from_bytes(cls, max_bytes: int) -> RamBudget:
        """A budget of ``max_bytes`` bytes."""
        return cls(max_bytes)

    @classmethod
    def from_mib(cls, max_mib: float) -> RamBudget:
        """A budget of ``max_mib`` mebibytes (2**20 bytes), rounded down to bytes."""
        # NaN and infinity do not pass, nor do integers that no float can be as large as.
        if isinstance(max_mib, bool) or not 0 < max_mib <= _MOST_BYTES:
            raise ValueError(f"a RAM budget must be a positive number of MiB, found {max_mib!r}")
        return cls(int(max_mib * _MIB))

    @classmethod
    def of(cls, budget: RamBudget | int) -> RamBudget:
        """The budget itself, or the budget of that many bytes."""
        return budget if isinstance(budget, RamBudget) else cls(budget)

    @classmethod
    def parse(cls, text: str) -> RamBudget:
        """The budget that a text such as ``"192MiB"``, ``"1.5 GB"`` or ``"1000000"`` (bytes) names.

        Raises:
            ValueError: the text is not an amount with one of the units B, kB, MB, GB, TB, KiB, MiB, GiB, TiB;
                K, M, G and T are those of the latter four.
        """
        found = _AMOUNT.fullmatch(text.strip())
        unit = _UNITS.get(found[2].lower()) if found else None
        if found is None or unit is None:
            raise ValueError(f"a RAM budget is an amount such as '192MiB', '1.5GB' or '1000000' bytes, found {text!r}")
        return cls(int(Fraction(found[1]) * unit))


def _whole(value: SupportsIndex | float, unit: str) -> int:
    whole: int | None = None
    if isinstance(value, float):
        whole = int(value) if value.is_integer() else None
    elif not isinstance(value, bool):
        try:
            whole = operator.index(value)
        except TypeError:
            whole = None
    if whole is not None and whole > _MOST_BYTES:
        raise ValueError(f"a RAM budget must be less than 2**63 {unit}, more than any machine has")
    if whole is None or whole <= 0:
        advice = "; RamBudget.parse takes a text, RamBudget.from_mib a number of MiB" if isinstance(value, str) else ""
        raise ValueError(f"a RAM budget must be a positive whole number of {unit}, found {value!r}{advice}")
    return whole


def format_bytes(count: int) -> str:
    """``count`` bytes as a message says it: ``"17 bytes"``, ``"12.50 MiB"``."""
    return f"{count / _MIB:.2f} MiB" if count >= _MIB // 10 else f"{count} bytes"
