"""The process's high-water mark, shared by everybody who wants a peak."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import threading

import numpy as np
import pytest

from ort_delayed.loader import platform, resident_memory
from ort_delayed.loader.resident_memory import PeakWindow, current_rss_bytes

MIB = 1 << 20
needs_kernel_mark = pytest.mark.skipif(
    sys.platform != "linux" or not platform.reset_peak_resident_bytes(), reason="the kernel's mark cannot be reset here"
)


def spike(mib: int) -> None:
    """Touch that much memory and give it back."""
    np.full(mib * MIB, 1, np.uint8)


def test_resident_memory_is_that_of_this_process() -> None:
    before = current_rss_bytes()
    held = np.full(64 * MIB, 1, np.uint8)
    after = current_rss_bytes()
    assert before is not None
    assert after is not None
    assert 60 * MIB < after - before < 80 * MIB
    assert held[0] == 1


@needs_kernel_mark
def test_a_peak_between_two_readings_counts() -> None:
    window = PeakWindow()
    start = window.read()
    spike(64)
    peak = window.read()
    now = current_rss_bytes()
    assert window.exact
    assert start is not None
    assert peak is not None
    assert now is not None
    assert peak - start > 60 * MIB
    assert now < peak - 50 * MIB


@needs_kernel_mark
def test_a_window_opened_later_erases_nothing_and_sees_nothing_earlier() -> None:
    outer = PeakWindow()
    start = outer.read()
    spike(64)
    inner = PeakWindow()
    inner_peak, outer_peak = inner.read(), outer.read()
    assert start is not None
    assert inner_peak is not None
    assert outer_peak is not None
    assert outer_peak - start > 60 * MIB
    assert inner_peak < outer_peak - 50 * MIB
    spike(96)
    later = outer.read()
    assert later is not None
    assert later - start > 90 * MIB


@needs_kernel_mark
def test_a_closed_window_stands_still() -> None:
    window = PeakWindow()
    spike(32)
    window.close()
    peak = window.read()
    spike(96)
    assert window.read() == peak


@needs_kernel_mark
def test_a_dropped_window_is_forgotten() -> None:
    window = PeakWindow()
    assert window in resident_memory._recorder._windows
    del window
    gc.collect()
    assert len(resident_memory._recorder._windows) == 0


def test_without_resets_there_is_no_exact_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "reset_peak_resident_bytes", lambda: False)
    window = PeakWindow()
    assert not window.exact
    assert window.read() is None


def test_a_mark_that_becomes_unreadable_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "reset_peak_resident_bytes", lambda: True)
    monkeypatch.setattr(platform, "peak_resident_bytes", lambda: 5)
    window = PeakWindow()
    assert window.read() == 5
    monkeypatch.setattr(platform, "peak_resident_bytes", lambda: None)
    assert window.read() is None
    assert not window.exact


def test_a_failing_reset_leaves_older_windows_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "reset_peak_resident_bytes", lambda: True)
    monkeypatch.setattr(platform, "peak_resident_bytes", lambda: 5)
    older = PeakWindow()
    monkeypatch.setattr(platform, "reset_peak_resident_bytes", lambda: False)
    newer = PeakWindow()
    assert (older.read(), older.exact) == (5, True)
    assert (newer.read(), newer.exact) == (None, False)


def test_a_window_may_be_closed_in_the_middle_of_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    # As when the collector, run by any allocation, finalises a run that was left half way.
    monkeypatch.setattr(platform, "reset_peak_resident_bytes", lambda: True)
    monkeypatch.setattr(platform, "peak_resident_bytes", lambda: 5)
    left, read = PeakWindow(), PeakWindow()
    results: list[int | None] = []

    def interrupted() -> int:
        monkeypatch.setattr(platform, "peak_resident_bytes", lambda: 7)
        left.close()
        return 7

    monkeypatch.setattr(platform, "peak_resident_bytes", interrupted)
    reader = threading.Thread(target=lambda: results.append(read.read()), daemon=True)
    reader.start()
    reader.join(20)
    assert results == [7]
    assert left.read() == 7


def _in_child(window: PeakWindow, pipe: object) -> None:
    spike_free = PeakWindow()
    pipe.send((window.exact, spike_free.exact))  # type: ignore[attr-defined]


@needs_kernel_mark
def test_a_forked_child_has_a_mark_of_its_own_and_no_held_lock() -> None:
    window = PeakWindow()
    ours, theirs = multiprocessing.Pipe(duplex=False)
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with resident_memory._recorder._lock:
            held.set()
            forked.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(20)
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(window, theirs), daemon=True)
    child.start()
    forked.set()
    holder.join()
    assert ours.poll(20), "the child hangs"
    assert ours.recv() == (False, True)
    child.join(20)
    assert child.exitcode == 0
    assert window.exact
