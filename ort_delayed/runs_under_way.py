"""What is under way in a session under a budget (runs, a construction), and how it is ended before its time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ort_delayed.loader.budget import RamBudgetExceeded, RamProbeUnavailable
from ort_delayed.memory_use import RunPeak

__all__ = ["RunUnderWay", "RunsUnderWay"]

_Failure = RamBudgetExceeded | RamProbeUnavailable


@dataclass(slots=True)
class RunUnderWay:
    """A run, or a construction: its peak, how it is ended before its time, and why it was."""

    peak: RunPeak
    cancel: Callable[[], None]
    failure: _Failure | None = None

    def raise_failure(self, cause: Exception | None = None) -> None:
        """Raise what this was ended for, if it was.

        The failure is no longer referred to then: a raised error refers to frames, and those to this. Such a cycle
        would keep the session, and its mappings, until garbage is collected at some odd moment.
        """
        failure, self.failure = self.failure, None
        if failure is None:
            return
        try:
            raise failure from (failure.__cause__ if failure.__cause__ is not None else cause)
        finally:
            del failure, cause  # the error refers to this frame


class RunsUnderWay:
    """All of one session's."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._runs: dict[int, RunUnderWay] = {}

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def beside(self) -> dict[int, int]:
        """Budgets in bytes of other sessions that had a run meanwhile, by session."""
        with self._lock:
            return {key: size for run in self._runs.values() for key, size in run.peak.beside.items()}

    @contextmanager
    def registered(self, run: RunUnderWay) -> Iterator[None]:
        """While this lasts the run is under way."""
        with self._lock:
            self._runs[id(run)] = run
        try:
            yield
        finally:
            with self._lock:
                self._runs.pop(id(run), None)

    def raise_any_failure(self) -> None:
        """Raise, inside an operator, what one of them is being ended for."""
        for run in list(self._runs.values()):
            if run.failure is not None:
                raise run.failure

    def end(self, failure: Callable[[], _Failure]) -> None:
        """End all of them before their time, each for a failure of its own."""
        with self._lock:
            for run in self._runs.values():
                if run.failure is None:
                    run.failure = failure()
                    run.cancel()

    def after_fork(self) -> None:
        """In a forked child: nothing of the parent's is under way, and its lock may be held for ever."""
        self._lock = threading.RLock()
        self._runs.clear()
