"""Keeping to a RAM budget: measure resident memory, reserve before an allocation, check after it.

A probe fails closed: where resident memory cannot be measured, it raises and nothing is loaded. A peak *between* two
checks counts, because the kernel's high-water mark says so, or, where there is none, a polling thread has seen it.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from ort_delayed.loader.budget import RamBudget, RamBudgetExceeded, RamProbeUnavailable
from ort_delayed.loader.platform import release_free_memory
from ort_delayed.loader.resident_memory import PeakWindow, current_rss_bytes

__all__ = ["PeakRamProbe", "PeakRamReport", "PeakSource", "RssSampler"]

RssSampler = Callable[[], "int | None"]
"""Returns the resident set size in bytes, None if it is not known."""

PeakSource = Literal["kernel-high-water-mark", "highest-sample", "rss-sampler"]
"""Where a peak comes from: exact; the highest of our own samples; the highest that the caller's sampler returned."""


@dataclass(frozen=True)
class PeakRamReport:
    """Resident memory of one piece of work, in bytes.

    Attributes:
        budget_bytes: what it may add to the process.
        baseline_rss_bytes: resident set size at the start, less what was charged to the work already.
        peak_rss_bytes: the highest resident set size since then.
        peak_source: how the peak is known.
    """

    budget_bytes: int
    baseline_rss_bytes: int
    peak_rss_bytes: int
    peak_source: PeakSource = "highest-sample"

    @property
    def peak_incremental_bytes(self) -> int:
        """The peak above the baseline, never negative."""
        return max(self.peak_rss_bytes - self.baseline_rss_bytes, 0)

    @property
    def within_budget(self) -> bool:
        """Whether the peak stayed within the budget."""
        return self.peak_incremental_bytes <= self.budget_bytes


class PeakRamProbe:
    """Measures and enforces a budget of incremental resident memory, from :meth:`start` to :meth:`stop`.

    As a context manager it starts on entry and stops on exit; behind an exception it takes a last measurement
    without raising another.

    Args:
        budget: bytes, or a :class:`RamBudget`.
        rss_sampler: returns the resident set size; then nothing else is consulted.
        poll_interval_seconds: how often a thread samples between checks, None for never. With the kernel's
            high-water mark no thread is needed and none is started.

    Raises:
        ValueError: the budget is not a positive number of bytes, or the interval not positive.
    """

    def __init__(
        self,
        budget: RamBudget | int,
        *,
        rss_sampler: RssSampler | None = None,
        poll_interval_seconds: float | None = 0.01,
    ) -> None:
        if poll_interval_seconds is not None and (
            isinstance(poll_interval_seconds, bool) or not poll_interval_seconds > 0
        ):
            raise ValueError(f"poll_interval_seconds must be positive or None, found {poll_interval_seconds!r}")
        self.budget = RamBudget.of(budget)
        self._sampler = rss_sampler
        self._interval = poll_interval_seconds
        self._window: PeakWindow | None = None
        self._baseline: int | None = None
        self._peak = 0
        self._stopped = False
        self._lock = threading.Lock()
        self._sampling = threading.Lock()
        self._stopping = threading.Event()
        self._poller: threading.Thread | None = None
        self._poll_error: RamProbeUnavailable | None = None

    @property
    def started(self) -> bool:
        """Whether a baseline has been taken."""
        return self._baseline is not None

    @property
    def report(self) -> PeakRamReport:
        """What has been measured so far; RuntimeError before :meth:`start`."""
        baseline = self._started_baseline()
        self._take_mark()
        source: PeakSource = "highest-sample"
        if self._sampler is not None:
            source = "rss-sampler"
        elif self._window is not None and self._window.exact:
            source = "kernel-high-water-mark"
        with self._lock:
            return PeakRamReport(self.budget.max_bytes, baseline, self._peak, source)

    def start(self, *, charged_bytes: int = 0) -> int:
        """Take the baseline and return it, in bytes; freed memory goes back to the system first, where it can.

        Args:
            charged_bytes: resident bytes that count against the budget although they were allocated before;
                the baseline lies that much lower.

        Raises:
            RuntimeError: the probe has been started already.
            RamProbeUnavailable: resident memory cannot be measured.
        """
        if self.started:
            raise RuntimeError("the RAM probe is already started")
        if self._sampler is None:
            # What the C library keeps of memory that was freed would hide as much of what the work takes.
            release_free_memory()
        sample = self._sample()
        if self._sampler is None:
            self._window = PeakWindow()
        with self._lock:
            self._peak = sample
            self._baseline = sample - charged_bytes
        exact = self._window is not None and self._window.exact
        if self._interval is not None and not exact:
            self._poller = threading.Thread(target=self._poll, name="ort-delayed-rss-poll", daemon=True)
            self._poller.start()
        return self._baseline

    def checkpoint(self, operation: str = "checking memory") -> int:
        """Measure, and return the resident set size in bytes.

        Raises:
            RamBudgetExceeded: the peak so far is above the budget.
            RamProbeUnavailable: resident memory cannot be measured.
        """
        self._started_baseline()
        if self._poll_error is not None:
            # Anew each time: an error that is raised refers to frames, and those to this probe.
            raise RamProbeUnavailable(*self._poll_error.args) from self._poll_error.__cause__
        current = self._sample()
        self._record(current)
        observed = self.report.peak_incremental_bytes
        if observed > self.budget.max_bytes:
            raise RamBudgetExceeded(budget_bytes=self.budget.max_bytes, observed_bytes=observed, operation=operation)
        return current

    def reserve(self, requested_bytes: int, operation: str) -> None:
        """Check, and refuse ``operation`` before it begins if ``requested_bytes`` more do not fit now.

        Raises:
            ValueError: ``requested_bytes`` is not a non-negative whole number.
            RamBudgetExceeded, RamProbeUnavailable: as for :meth:`checkpoint`, or the request does not fit.
        """
        try:
            requested = -1 if isinstance(requested_bytes, bool) else operator.index(requested_bytes)
        except TypeError:
            requested = -1
        if requested < 0:
            raise ValueError(f"requested_bytes must be a whole number of bytes from 0 on, found {requested_bytes!r}")
        used = max(self.checkpoint(operation) - self._started_baseline(), 0)
        if used + requested > self.budget.max_bytes:
            raise RamBudgetExceeded(
                budget_bytes=self.budget.max_bytes,
                observed_bytes=used,
                requested_bytes=requested,
                operation=operation,
            )

    def stop(self) -> PeakRamReport:
        """Check a last time and return the report; raises as :meth:`checkpoint` does. The report stays readable."""
        try:
            self._stop_polling()
            self.checkpoint("finishing")
            return self.report
        finally:
            self._finish()

    def __enter__(self) -> PeakRamProbe:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
            return
        self.abandon()

    def abandon(self) -> None:
        """Stop behind a failure: take a last measurement if that is possible, and raise nothing."""
        if not self.started or self._stopped or sys.is_finalizing():  # then nothing may wait for a lock
            return
        self._stop_polling()
        with contextlib.suppress(RamProbeUnavailable):  # what is already propagating matters more
            self._record(self._sample())
        self._finish()

    def _started_baseline(self) -> int:
        if self._baseline is None:
            raise RuntimeError("the RAM probe has not been started")
        return self._baseline

    def _sample(self) -> int:
        refusal = "no weights are read without a RAM limit that can be enforced"
        try:
            # One at a time: a caller's sampler need not be safe to call from two threads.
            with self._sampling:
                value = (self._sampler or current_rss_bytes)()
            if value is None or isinstance(value, bool) or (sample := int(value)) < 0:
                raise ValueError(f"the sampler returned {value!r}")
        except Exception as error:
            raise RamProbeUnavailable(f"resident memory cannot be measured ({error}): {refusal}") from error
        return sample

    def _record(self, sample: int) -> None:
        with self._lock:
            self._peak = max(self._peak, sample)

    def _take_mark(self) -> None:
        mark = self._window.read() if self._window is not None else None
        if mark is not None:
            self._record(mark)

    def _finish(self) -> None:
        self._stopped = True
        if self._window is not None:
            self._window.close()
            self._take_mark()

    def _poll(self) -> None:
        assert self._interval is not None
        while not self._stopping.wait(self._interval):
            try:
                self._record(self._sample())
            except RamProbeUnavailable as error:
                self._poll_error = error
                return

    def _stop_polling(self) -> None:
        self._stopping.set()
        if self._poller is not None:
            self._poller.join()
            self._poller = None
