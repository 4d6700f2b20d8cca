"""How much of the process's resident memory one session under a budget has taken.

That is what is resident above a baseline taken when construction begins, less what is not the session's: what the
process gains while the session has no run under way moves the baseline, and weights that other sessions under budgets
map meanwhile are taken off by their own records. Both only while they stay: a baseline never sinks below its start.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from ort_delayed.loader.budget import RamProbeUnavailable
from ort_delayed.loader.platform import release_free_memory
from ort_delayed.loader.probe import PeakSource
from ort_delayed.loader.resident_memory import PeakWindow, current_rss_bytes

__all__ = ["MemoryUse", "RunPeak"]


class RunPeak:
    """The highest use since a run (or a construction) began, and what other sessions were allowed meanwhile.

    Attributes:
        beside: budgets in bytes of other sessions that had a run meanwhile, by session.
    """

    def __init__(self, use: MemoryUse) -> None:
        self.beside: dict[int, int] = {}
        self._use = use
        self._window = PeakWindow()
        self._highest = 0

    def note(self, resident: int) -> None:
        """A sample of the process's resident bytes; it counts where the kernel keeps no mark."""
        self._highest = max(self._highest, resident)

    def read(self) -> tuple[int, PeakSource]:
        """The highest use in bytes, and how it is known."""
        mark = self._window.read()
        if mark is not None:
            return self._use.share_of(mark), "kernel-high-water-mark"
        self.note(_resident_bytes())
        return self._use.share_of(self._highest), "highest-sample"


class MemoryUse:
    """The use of one session. Its baseline is what is resident when this is made.

    Args:
        budget_bytes: what the session may use.
        mapped_bytes: returns what of its mapped weights the session has recorded as resident.

    Raises:
        RamProbeUnavailable: resident memory cannot be measured; also from the methods.
    """

    def __init__(self, budget_bytes: int, mapped_bytes: Callable[[], int]) -> None:
        self._mapped_bytes = mapped_bytes
        self._budget = budget_bytes
        # What the C library keeps of memory that was freed would hide as much of what the session takes.
        release_free_memory()
        self._start = self._idle = _resident_bytes()
        self._gained = 0
        self._elsewhere = _mapped_elsewhere(self)
        self._peaks: list[RunPeak] = []
        _all_uses.add(self)

    @property
    def baseline(self) -> int:
        """Resident bytes of the process that are not the session's."""
        return self._start + self._gained

    def now(self) -> int:
        """Bytes that the session has taken, measured now."""
        resident = _resident_bytes()
        for peak in self._peaks:
            peak.note(resident)
        elsewhere = _mapped_elsewhere(self) - self._elsewhere if len(_all_uses) > 1 else 0
        return self.share_of(resident) - elsewhere

    def with_others(self) -> int:
        """Bytes that this session and those beside it have taken together, measured now."""
        return self.share_of(_resident_bytes())

    def share_of(self, resident: int) -> int:
        """What of so many resident bytes stands above the baseline."""
        return resident - self.baseline

    def begin(self) -> RunPeak:
        """A run or a construction begins; it must be ended."""
        with _lock:
            if not self._peaks:
                self._gained = max(self._gained + _resident_bytes() - self._idle, 0)
                self._elsewhere = _mapped_elsewhere(self)
            peak = RunPeak(self)
            for other in _all_uses:
                if other is not self and other._peaks:
                    peak.beside[id(other)] = other._budget
                    for theirs in other._peaks:
                        theirs.beside[id(self)] = self._budget
            self._peaks.append(peak)
        return peak

    def end(self, peak: RunPeak) -> None:
        """What began is over. Ending it twice is harmless."""
        with _lock:
            if peak in self._peaks:  # a fork has forgotten it
                self._peaks.remove(peak)
            if not self._peaks:
                self._idle = _resident_bytes()

    def after_fork(self) -> None:
        """In a forked child: no run of the parent's is under way, and pages of file mappings did not come along."""
        self._peaks.clear()
        self._idle = _resident_bytes()


_lock = threading.Lock()
_all_uses: weakref.WeakSet[MemoryUse] = weakref.WeakSet()


def _mapped_elsewhere(use: MemoryUse) -> int:
    return sum(other._mapped_bytes() for other in list(_all_uses) if other is not use)


def _resident_bytes() -> int:
    found = current_rss_bytes()
    if found is None:
        raise RamProbeUnavailable("resident memory cannot be measured, so a session cannot keep to a RAM budget")
    return found


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for use in list(_all_uses):
        use.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
