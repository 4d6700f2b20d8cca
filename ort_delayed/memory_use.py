"""How much of the process's resident memory one session under a budget has taken.

That is what is resident above a baseline taken when construction begins, less what is not the session's. What the
process gains while the session has no run under way moves the baseline, while it stays: a baseline never sinks below
its start. Weights that other sessions under budgets have mapped are taken off by their own records, and are no part of
the baseline either: a session that is replaced by a new one would leave it what it held.
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
        self._elsewhere = _mapped_elsewhere(use)
        self._window = PeakWindow()
        self._highest = 0

    def note(self, resident: int) -> None:
        """A sample of the process's resident bytes; it counts where the kernel keeps no mark."""
        self._highest = max(self._highest, resident)

    def read(self) -> tuple[int, PeakSource]:
        """The highest use in bytes, and how it is known."""
        mark = self._window.read()
        if mark is not None:
            return self._share_of(mark), "kernel-high-water-mark"
        self.note(_resident_bytes())
        return self._share_of(self._highest), "highest-sample"

    def _share_of(self, resident: int) -> int:
        # What others had when this began they may give up meanwhile, but not gain without a run of theirs.
        return resident - self._elsewhere - self._use.baseline


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
        self._start = self._idle = self._beside_others()
        self._gained = 0
        self._peaks: list[RunPeak] = []
        _all_uses.add(self)

    @property
    def baseline(self) -> int:
        """Resident bytes of the process that are neither the session's nor weights of other sessions under budgets."""
        return self._start + self._gained

    def now(self) -> int:
        """Bytes that the session has taken, measured now."""
        resident = _resident_bytes()
        for peak in self._peaks:
            peak.note(resident)
        return resident - _mapped_elsewhere(self) - self.baseline

    def with_others(self) -> int:
        """Bytes that this session and those whose runs are beside its own have taken together, measured now."""
        return _resident_bytes() - _mapped_elsewhere(self, idle=True) - self.baseline

    def begin(self) -> RunPeak:
        """A run or a construction begins; it must be ended."""
        with _lock:
            if not self._peaks:
                self._gained = max(self._gained + self._beside_others() - self._idle, 0)
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
                self._idle = self._beside_others()

    def after_fork(self) -> None:
        """In a forked child: no run of the parent's is under way, and pages of file mappings did not come along."""
        self._peaks.clear()
        self._idle = self._beside_others()

    def _beside_others(self) -> int:
        return _resident_bytes() - _mapped_elsewhere(self)


_lock = threading.Lock()
_all_uses: weakref.WeakSet[MemoryUse] = weakref.WeakSet()


def _mapped_elsewhere(use: MemoryUse, *, idle: bool = False) -> int:
    """Bytes of weights that other sessions have recorded as resident; if ``idle`` only those without a run."""
    others = (other for other in list(_all_uses) if other is not use and not (idle and other._peaks))
    return sum(other._mapped_bytes() for other in others)


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
