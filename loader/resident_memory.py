"""Resident memory of this process: what it is now, and the highest it has been since a moment.

Linux keeps the exact high-water mark of the resident set size, but one per process, and a reset erases everybody
else's. So one recorder owns the resets: before each it folds the mark into every window that is open. All code that
wants a peak opens a :class:`PeakWindow` and writes nothing to ``/proc/self/clear_refs`` itself.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref

from ort_delayed.loader import platform

__all__ = ["PeakWindow", "current_rss_bytes"]


def current_rss_bytes() -> int | None:
    """Resident set size of this process in bytes, None where the platform does not say."""
    return platform.resident_bytes()


class PeakWindow:
    """The highest resident set size since it was opened, from the kernel's own mark.

    Opening resets the process's mark, after every other open window has taken it over. Closing is optional: a
    window that nobody holds is forgotten.
    """

    def __init__(self) -> None:
        self._peak = 0
        self._exact = _recorder.open(self)

    @property
    def exact(self) -> bool:
        """Whether the kernel kept the mark at every reading so far; without it the peak has to be sampled."""
        return self._exact

    def read(self) -> int | None:
        """The highest resident set size in bytes since the window was opened, None unless :attr:`exact`."""
        if self._exact:
            _recorder.fold()
        return self._peak if self._exact else None

    def close(self) -> None:
        """Take the mark a last time; the window's reading stays what it is from then on."""
        _recorder.close(self)

    def take(self, mark: int | None) -> None:
        """For the recorder: a new reading of the kernel's mark, None if there is none any more."""
        if mark is None:
            self._exact = False
        else:
            self._peak = max(self._peak, mark)


class _Recorder:
    """Owns the process's high-water mark. Every open window was opened at or before the last reset."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        # Reentrant: the collector may run at any allocation, and finalise a run that was left half way, which closes
        # its window in the thread that stands in here.
        self._lock = threading.RLock()
        self._windows: weakref.WeakSet[PeakWindow] = weakref.WeakSet()

    def open(self, window: PeakWindow) -> bool:
        with self._lock:
            self._fold()
            # A failed reset leaves the mark, and with it the windows that are open, as they were.
            if not platform.reset_peak_resident_bytes() or platform.peak_resident_bytes() is None:
                return False
            self._windows.add(window)
            return True

    def fold(self) -> None:
        if sys.is_finalizing():  # a daemon thread that was ended there may have held the lock
            return
        with self._lock:
            self._fold()

    def close(self, window: PeakWindow) -> None:
        if sys.is_finalizing():
            return
        with self._lock:
            if window in self._windows:
                self._fold()
                self._windows.discard(window)

    def _fold(self) -> None:
        if self._windows:
            mark = platform.peak_resident_bytes()
            for window in list(self._windows):
                window.take(mark)

    def after_fork(self) -> None:
        # The child's mark starts at the fork: windows that the parent opened are not its own. Its lock may be held
        # by a thread that the child does not have.
        for window in list(self._windows):
            window.take(None)
        self._forget()


_recorder = _Recorder()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_recorder.after_fork)
