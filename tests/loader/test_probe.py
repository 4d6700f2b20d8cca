"""The probe: baseline, reservations, checks, and what happens between them."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from subprocesses import run_snippet

from ort_delayed.loader import platform, probe
from ort_delayed.loader.budget import RamBudget, RamBudgetExceeded, RamProbeUnavailable
from ort_delayed.loader.probe import PeakRamProbe, PeakRamReport

MIB = 1 << 20


class Rss:
    """A resident set size that the test sets."""

    def __init__(self, value: int) -> None:
        self.value: int | None = value

    def __call__(self) -> int | None:
        return self.value


def test_a_run_within_its_budget() -> None:
    rss = Rss(1000)
    tested = PeakRamProbe(100, rss_sampler=rss, poll_interval_seconds=None)
    assert tested.budget == RamBudget(100)
    assert not tested.started
    assert tested.start() == 1000
    assert tested.started
    rss.value = 1070
    tested.reserve(30, "mapping")
    assert tested.checkpoint("mapping") == 1070
    rss.value = 1010
    report = tested.stop()
    assert report == PeakRamReport(100, 1000, 1070, "rss-sampler")
    assert report.peak_incremental_bytes == 70
    assert report.within_budget


def test_a_projected_excess_is_refused_before_it_happens() -> None:
    rss = Rss(1000)
    tested = PeakRamProbe(100, rss_sampler=rss, poll_interval_seconds=None)
    tested.start()
    rss.value = 1070
    with pytest.raises(RamBudgetExceeded) as caught:
        tested.reserve(31, "mapping layer group 'x'")
    error = caught.value
    assert (error.budget_bytes, error.observed_bytes, error.requested_bytes) == (100, 70, 31)
    assert error.operation == "mapping layer group 'x'"
    assert tested.report.within_budget


def test_a_reservation_counts_from_what_is_resident_now() -> None:
    rss = Rss(1000)
    tested = PeakRamProbe(100, rss_sampler=rss, poll_interval_seconds=None)
    tested.start()
    rss.value = 1090
    tested.checkpoint()
    rss.value = 1000
    tested.reserve(100, "mapping again")
    assert tested.report.peak_incremental_bytes == 90


def test_an_observed_excess_is_refused_and_stays_on_record() -> None:
    rss = Rss(1000)
    tested = PeakRamProbe(100, rss_sampler=rss, poll_interval_seconds=None)
    tested.start()
    rss.value = 1101
    with pytest.raises(RamBudgetExceeded, match="while applying") as caught:
        tested.checkpoint("applying")
    assert (caught.value.observed_bytes, caught.value.requested_bytes) == (101, 0)
    rss.value = 1000
    with pytest.raises(RamBudgetExceeded, match="while finishing"):
        tested.stop()
    assert not tested.report.within_budget


def test_memory_that_was_charged_counts() -> None:
    tested = PeakRamProbe(100, rss_sampler=Rss(1000), poll_interval_seconds=None)
    assert tested.start(charged_bytes=60) == 940
    tested.reserve(40, "mapping")
    with pytest.raises(RamBudgetExceeded):
        tested.reserve(41, "mapping")


def test_less_memory_than_at_the_start_is_no_credit() -> None:
    rss = Rss(1000)
    tested = PeakRamProbe(100, rss_sampler=rss, poll_interval_seconds=None)
    tested.start()
    rss.value = 500
    with pytest.raises(RamBudgetExceeded):
        tested.reserve(101, "mapping")
    assert tested.stop().peak_incremental_bytes == 0


@pytest.mark.parametrize("value", [None, -1, True, "many"])
def test_no_measurement_no_load(value: object) -> None:
    tested = PeakRamProbe(100, rss_sampler=lambda: value)  # type: ignore[arg-type, return-value]
    with pytest.raises(RamProbeUnavailable, match="no weights are read"):
        tested.start()
    assert not tested.started


def test_a_sampler_that_raises_is_no_measurement() -> None:
    def broken() -> int:
        raise OSError("no /proc")

    with pytest.raises(RamProbeUnavailable, match="no /proc") as caught:
        PeakRamProbe(100, rss_sampler=broken).start()
    assert isinstance(caught.value.__cause__, OSError)


def test_without_a_platform_measurement_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "resident_bytes", lambda: None)
    with pytest.raises(RamProbeUnavailable):
        PeakRamProbe(100).start()


def test_a_sampler_is_all_that_is_consulted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise AssertionError("consulted")

    for name in ("resident_bytes", "peak_resident_bytes", "reset_peak_resident_bytes"):
        monkeypatch.setattr(platform, name, refuse)
    with PeakRamProbe(100, rss_sampler=Rss(5)) as tested:
        tested.reserve(1, "x")
        tested.checkpoint()
    assert tested.report.peak_rss_bytes == 5


@pytest.mark.parametrize("value", [0, -0.5, True, float("nan")])
def test_intervals_are_positive(value: float) -> None:
    with pytest.raises(ValueError, match="poll_interval_seconds"):
        PeakRamProbe(100, poll_interval_seconds=value)


@pytest.mark.parametrize("value", [-1, True, 1.5, None])
def test_reservations_are_whole_and_not_negative(value: object) -> None:
    tested = PeakRamProbe(100, rss_sampler=Rss(5))
    tested.start()
    with pytest.raises(ValueError, match="requested_bytes"):
        tested.reserve(value, "x")  # type: ignore[arg-type]
    tested.stop()


def test_the_order_of_calls_is_checked() -> None:
    tested = PeakRamProbe(100, rss_sampler=Rss(5))
    for call in (tested.checkpoint, tested.stop, lambda: tested.report, lambda: tested.reserve(1, "x")):
        with pytest.raises(RuntimeError, match="not been started"):
            call()
    tested.start()
    with pytest.raises(RuntimeError, match="already started"):
        tested.start()
    tested.stop()


def test_a_poll_thread_sees_peaks_between_checks_and_ends() -> None:
    seen = threading.Event()
    rss = Rss(1000)

    def sampler() -> int | None:
        value = rss.value
        if value == 1500:
            seen.set()
        return value

    tested = PeakRamProbe(100, rss_sampler=sampler, poll_interval_seconds=0.001)
    tested.start()
    rss.value = 1500
    assert seen.wait(20)
    rss.value = 1000
    with pytest.raises(RamBudgetExceeded) as caught:
        tested.stop()
    assert caught.value.observed_bytes == 500
    assert not any(t.name == "ort-delayed-rss-poll" for t in threading.enumerate())


def test_a_poll_thread_that_cannot_measure_fails_the_next_check() -> None:
    failed = threading.Event()
    rss = Rss(1000)

    def sampler() -> int | None:
        if threading.current_thread().name == "ort-delayed-rss-poll":
            failed.set()
            return None
        return rss.value

    tested = PeakRamProbe(100, rss_sampler=sampler, poll_interval_seconds=0.001)
    tested.start()
    assert failed.wait(20)
    assert tested._poller is not None
    tested._poller.join(20)
    errors = []
    for _ in range(2):
        with pytest.raises(RamProbeUnavailable, match="the sampler returned None") as caught:
            tested.checkpoint()
        errors.append(caught.value)
    assert errors[0] is not errors[1]  # which would keep alive every frame that it was raised through
    tested.abandon()


def test_samplers_are_never_called_twice_at_once() -> None:
    inside = threading.Lock()
    clashes = []

    def sampler() -> int:
        if not inside.acquire(blocking=False):
            clashes.append(1)
            return 5
        try:
            return sum(range(2000)) * 0 + 5
        finally:
            inside.release()

    with PeakRamProbe(100, rss_sampler=sampler, poll_interval_seconds=0.0001) as tested:
        for _ in range(300):
            tested.checkpoint()
    assert clashes == []


def test_an_exception_inside_is_not_replaced() -> None:
    rss = Rss(1000)
    tested = PeakRamProbe(100, rss_sampler=rss)

    def fail() -> None:
        with tested:
            rss.value = 2000
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert tested.report.peak_incremental_bytes == 1000


def test_an_exception_inside_outlives_a_broken_sampler() -> None:
    rss = Rss(1000)

    def fail() -> None:
        with PeakRamProbe(100, rss_sampler=rss, poll_interval_seconds=None):
            rss.value = None
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()


def test_a_report_stands_still_once_stopped() -> None:
    rss = Rss(1000)
    tested = PeakRamProbe(100, rss_sampler=rss, poll_interval_seconds=None)
    tested.start()
    report = tested.stop()
    rss.value = 5000
    tested.abandon()
    assert tested.report == report


@pytest.mark.skipif(
    sys.platform != "linux" or not platform.reset_peak_resident_bytes(), reason="the kernel's mark cannot be reset here"
)
def test_the_kernels_mark_counts_without_a_thread() -> None:
    tested = PeakRamProbe(48 * MIB)
    tested.start()
    assert tested._poller is None
    np.full(64 * MIB, 1, np.uint8)
    with pytest.raises(RamBudgetExceeded) as caught:
        tested.checkpoint("applying")
    assert caught.value.observed_bytes > 60 * MIB
    tested.abandon()
    assert tested.report.peak_source == "kernel-high-water-mark"


@pytest.mark.skipif(sys.platform != "linux", reason="what glibc does with freed memory")
def test_freed_memory_that_the_c_library_keeps_hides_nothing() -> None:
    """What was freed before the start and is used again by the work has been taken by the work."""
    code = """
    import ctypes
    from ort_delayed.loader import platform
    from ort_delayed.loader.probe import PeakRamProbe
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    def take():
        blocks = [libc.malloc(100_000) for _ in range(320)]
        for block in blocks:
            ctypes.memset(block, 1, 100_000)
        return blocks
    before = platform.resident_bytes()
    blocks = take()
    libc.malloc(100_000)  # stays in use, behind them: the heap cannot shrink
    for block in blocks:
        libc.free(block)
    kept = platform.resident_bytes() - before
    probe = PeakRamProbe(1 << 30)
    probe.start()
    take()
    print(kept >> 20, probe.stop().peak_incremental_bytes >> 20)
    """
    kept, counted = map(int, run_snippet(code).split())
    if kept < 24:
        pytest.skip("this C library keeps no freed memory")
    assert counted >= 24


def test_without_a_kernel_mark_samples_count_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "reset_peak_resident_bytes", lambda: False)
    values = iter([1000, 1080, 1020, 1020])
    monkeypatch.setattr(probe, "current_rss_bytes", lambda: next(values))
    tested = PeakRamProbe(100, poll_interval_seconds=None)
    tested.start()
    tested.checkpoint()
    report = tested.stop()
    assert (report.peak_source, report.peak_incremental_bytes) == ("highest-sample", 80)


def test_without_a_kernel_mark_a_thread_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "reset_peak_resident_bytes", lambda: False)
    with PeakRamProbe(1 << 40) as tested:
        assert tested._poller is not None
        assert tested._poller.is_alive()
    assert tested._poller is None
