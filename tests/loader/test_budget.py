"""Budgets and the errors of exceeding them."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from ort_delayed.loader.budget import RamBudget, RamBudgetExceeded, format_bytes


def test_a_budget_is_a_positive_whole_number_of_bytes() -> None:
    assert RamBudget(5).max_bytes == 5
    assert RamBudget.from_bytes(5) == RamBudget(max_bytes=5)
    assert RamBudget(np.int64(5)).max_bytes == 5
    assert type(RamBudget(np.int64(5)).max_bytes) is int
    assert RamBudget(2e9).max_bytes == 2_000_000_000  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, True, False, 1.5, float("nan"), float("inf"), "5", None])
def test_other_budgets_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="positive whole number of bytes"):
        RamBudget(value)  # type: ignore[arg-type]


def test_budgets_in_mebibytes() -> None:
    assert RamBudget.from_mib(192).max_bytes == 192 * 1024 * 1024
    assert RamBudget.from_mib(0.5).max_bytes == 512 * 1024


@pytest.mark.parametrize("value", [0, -3, True, float("nan"), float("inf")])
def test_other_mebibytes_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="positive number of MiB"):
        RamBudget.from_mib(value)


@pytest.mark.parametrize("value", [2**63, 10**400])
def test_more_than_any_machine_has_is_no_budget(value: int) -> None:
    assert RamBudget(2**63 - 1).max_bytes == 2**63 - 1
    for make in (RamBudget, RamBudget.from_mib, lambda v: RamBudget.parse(f"{v}.5")):
        with pytest.raises(ValueError, match="a RAM budget must be"):
            make(value)


def test_less_than_a_byte_is_no_budget() -> None:
    with pytest.raises(ValueError, match="positive whole number"):
        RamBudget.from_mib(1e-9)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1000000", 10**6),
        ("192MiB", 192 << 20),
        (" 1.5 GB ", 1_500_000_000),
        ("2 gib", 2 << 30),
        ("7b", 7),
        ("3KB", 3000),
    ],
)
def test_budgets_are_parsed(text: str, count: int) -> None:
    assert RamBudget.parse(text).max_bytes == count


@pytest.mark.parametrize("text", ["", "MiB", "12 parsecs", "-5", "1e9", "1.5.2MB", "5 MiB more", "٣MiB"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="an amount such as"):
        RamBudget.parse(text)


def test_a_parsed_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        RamBudget.parse("0 MiB")


def test_a_budget_is_itself_or_bytes() -> None:
    budget = RamBudget(9)
    assert RamBudget.of(budget) is budget
    assert RamBudget.of(9) == budget


def test_exceeding_says_everything() -> None:
    error = RamBudgetExceeded(budget_bytes=10, observed_bytes=7, requested_bytes=5, operation="mapping layer group 'x'")
    assert isinstance(error, MemoryError)
    assert (error.budget_bytes, error.observed_bytes, error.requested_bytes) == (10, 7, 5)
    assert error.operation == "mapping layer group 'x'"
    assert error.needed_bytes == 12
    assert "while mapping layer group 'x'" in str(error)
    assert "at least 12 bytes are needed here" in str(error)


def test_exceeding_has_the_defaults_that_callers_know() -> None:
    error = RamBudgetExceeded(budget_bytes=1, observed_bytes=2)
    assert (error.requested_bytes, error.operation) == (0, "operation")


@pytest.mark.parametrize("again", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_exceeding_survives_copying_and_pickling(again: object) -> None:
    error = RamBudgetExceeded(budget_bytes=10, observed_bytes=7, requested_bytes=5, operation="x")
    other = again(error)  # type: ignore[operator]
    assert type(other) is RamBudgetExceeded
    assert str(other) == str(error)
    assert other.requested_bytes == 5


def test_bytes_are_shown_in_a_readable_unit() -> None:
    assert format_bytes(17) == "17 bytes"
    assert format_bytes(3 << 19) == "1.50 MiB"


def test_units_of_one_letter_are_binary() -> None:
    assert RamBudget.parse("64M").max_bytes == 64 << 20
    assert RamBudget.parse("1.5g").max_bytes == 3 << 29
    assert RamBudget.parse("512k").max_bytes == 512 << 10
