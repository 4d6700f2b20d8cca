"""Cancelling a load beyond the budget: the flag is set while ONNX Runtime builds, and cleared whatever happens."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from typing import Any

import pytest

import ort_delayed
from ort_delayed.load_watch import load_cancelled_beyond_budget
from ort_delayed.loader import PeakRamProbe


class Options:
    """Session options that remember how their flag was set."""

    def __init__(self) -> None:
        self.flags: list[bool] = []
        self.cancelled = threading.Event()

    def set_load_cancellation_flag(self, flag: bool) -> None:
        self.flags.append(flag)
        if flag:
            self.cancelled.set()


def probe(readings: dict[str, Any]) -> PeakRamProbe:
    made = PeakRamProbe(1000, rss_sampler=lambda: readings["rss"])
    made.start()
    return made


def load_until_cancelled(options: Options, readings: dict[str, Any], rss: int | None, failure: Exception) -> None:
    """What ONNX Runtime does: takes memory, and fails once the flag is set."""
    with load_cancelled_beyond_budget(options, probe(readings), "loading it"):
        readings["rss"] = rss
        assert options.cancelled.wait(30)
        raise failure


@pytest.mark.parametrize(
    ("rss", "expected"), [(1001, ort_delayed.RamBudgetExceeded), (None, ort_delayed.RamProbeUnavailable)]
)
def test_the_load_is_cancelled_while_it_goes_on(rss: int | None, expected: type[Exception]) -> None:
    options, cause = Options(), RuntimeError("the load was cancelled")
    with pytest.raises(expected) as caught:
        load_until_cancelled(options, {"rss": 0}, rss, cause)
    assert caught.value.__cause__ is cause
    assert options.flags == [True, False]


def test_a_load_that_was_too_quick_to_be_cancelled_fails_all_the_same() -> None:
    options, readings = Options(), {"rss": 0}
    with (
        pytest.raises(ort_delayed.RamBudgetExceeded),
        load_cancelled_beyond_budget(options, probe(readings), "loading it"),
    ):
        readings["rss"] = 1001
    assert options.flags[-1] is False


class Session:
    """Something that only a frame refers to."""


@pytest.mark.parametrize("fails", [True, False])
def test_a_cancelled_session_goes_at_once_and_not_with_the_garbage(fails: bool) -> None:
    options, readings, sessions = Options(), {"rss": 0}, []

    def load() -> None:
        session = Session()
        sessions.append(weakref.ref(session))
        with load_cancelled_beyond_budget(options, probe(readings), "loading it"):
            readings["rss"] = 1001
            assert options.cancelled.wait(30)
            if fails:
                raise RuntimeError("the load was cancelled")

    gc.disable()
    try:
        with contextlib.suppress(ort_delayed.RamBudgetExceeded):
            load()
        assert sessions[0]() is None
    finally:
        gc.enable()


def test_a_load_that_fails_for_itself_keeps_its_own_exception() -> None:
    options, mine = Options(), ValueError("mine")
    with (
        pytest.raises(ValueError, match="mine") as caught,
        load_cancelled_beyond_budget(options, probe({"rss": 0}), "loading it"),
    ):
        raise mine
    assert caught.value is mine
    assert options.flags == [False]


def test_no_thread_remains() -> None:
    def watching() -> int:
        return sum(t.name == "ort_delayed load watch" for t in threading.enumerate())

    with load_cancelled_beyond_budget(Options(), probe({"rss": 0}), "loading it"):
        assert watching() == 1
    assert watching() == 0
