"""One sample: what a fresh process does and measures. Linux, whose kernel keeps what is recorded here.

Everything is counted above a baseline that is taken after a throw-away session of the same kind on a tiny model, so
that libraries, thread pools and first allocations count for nobody.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from loaders import ALL_OPENERS
from measure import PeakMemory

__all__ = ["take_sample"]

_THROW_AWAY_BUDGET = 256 << 20
_OURS = ("ours", "install", "loader", "loader-touched")


@dataclass(frozen=True)
class _Counters:
    """What the kernel has counted for this process so far."""

    read_bytes: int
    minor_faults: int
    major_faults: int

    @classmethod
    def now(cls) -> _Counters:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(_proc_number("/proc/self/io", "read_bytes"), usage.ru_minflt, usage.ru_majflt)

    def since(self, earlier: _Counters, runs: int = 1) -> dict[str, float]:
        """The difference, for each of so many runs."""
        return {name: round((value - getattr(earlier, name)) / runs, 1) for name, value in vars(self).items()}


@dataclass(frozen=True)
class _Resident:
    """Resident memory: anonymous (heap, copies) and of files (mapped weights, libraries)."""

    anon: int
    file: int

    @classmethod
    def now(cls) -> _Resident:
        return cls(*(_proc_number("/proc/self/status", name) * 1024 for name in ("RssAnon", "RssFile")))

    def above(self, baseline: _Resident) -> dict[str, int]:
        return {"anon": self.anon - baseline.anon, "file": self.file - baseline.file}


def take_sample(
    opener: str, path: str, throw_away: str, budget: int, size: int, runs: int, seconds: float, outputs: str
) -> dict[str, Any]:
    """Open a model one way, run it, and say what that took.

    Args:
        opener: which way, by its name in ``openers.py`` or ``loaders.py``.
        path: what it opens.
        throw_away: the same of a tiny model.
        budget: a RAM budget in bytes, 0 for none.
        size: of the inputs.
        runs: how many runs are timed after the first, at most.
        seconds: no further one is begun once they have taken so long together.
        outputs: the file that outputs are saved to, to be compared.
    """
    open_way = ALL_OPENERS[opener]
    small = open_way(throw_away, budget and _THROW_AWAY_BUDGET)
    small.outputs(small.prepare(1)())
    del small
    np.random.default_rng(1).standard_normal(8)  # its modules are loaded when they are first used
    gc.collect()
    load = os.getloadavg()[0]

    peak = _peak_above_baseline(ours=opener in _OURS)
    baseline, counted = _Resident.now(), [_Counters.now()]
    start = time.perf_counter()
    opened = open_way(path, budget)
    construct = time.perf_counter() - start
    constructed, peak_constructing = _Resident.now().above(baseline), peak()
    counted.append(_Counters.now())

    run = opened.prepare(size)
    durations = [_seconds(run)]
    counted.append(_Counters.now())
    until = time.perf_counter() + seconds
    # Two at least: the first after the first run is often the arena's last growth.
    while len(durations) <= runs and (len(durations) < 3 or time.perf_counter() < until):
        durations.append(_seconds(run))
    counted.append(_Counters.now())
    result: dict[str, Any] = {
        "load_average": round(load, 2),
        "construct": round(construct, 6),
        "first": round(durations[0], 6),
        "runs": [round(s, 6) for s in durations[1:]],
        "peak": peak(),
        "peak_constructing": peak_constructing,
        "resident_constructed": constructed,
        "resident": _Resident.now().above(baseline),
        "constructing": counted[1].since(counted[0]),
        "first_run": counted[2].since(counted[1]),
        "a_run": counted[3].since(counted[2], len(durations) - 1),
        "read_bytes": counted[3].read_bytes - counted[0].read_bytes,
    }
    np.savez(outputs, *opened.outputs(run()))
    return result


def _seconds(run: Callable[[], object]) -> float:
    """The duration of one run; what it returns is freed after the clock has stopped."""
    start = time.perf_counter()
    returned = run()
    stopped = time.perf_counter()
    del returned
    return stopped - start


def _peak_above_baseline(*, ours: bool) -> Callable[[], int]:
    """A reader of the kernel's high-water mark, above what is resident now.

    ort_delayed resets the mark, of which a process has one, but hands it on to windows that are open. Where it is not
    in use, the mark is read as it is.
    """
    if not ours:
        memory = PeakMemory()
        if not memory.exact:
            raise OSError("this kernel does not let a process reset its own high-water mark (/proc/self/clear_refs)")
        return memory.peak
    from ort_delayed.loader.resident_memory import PeakWindow

    window = PeakWindow()
    baseline = _proc_number("/proc/self/status", "VmRSS") * 1024

    def read() -> int:
        highest = window.read()
        if highest is None:
            raise OSError("the high-water mark of this process cannot be read (/proc/self/clear_refs)")
        return highest - baseline

    return read


def _proc_number(path: str, name: str) -> int:
    with open(path) as file:
        for line in file:
            if line.startswith(name + ":"):
                return int(line.split()[1])
    raise OSError(f"{path} has no {name}")
