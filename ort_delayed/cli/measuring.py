"""Making a session and running it a few times: how long that takes and how much memory; and comparing outputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ort_delayed.cli.errors import CommandError
from ort_delayed.cli.feeds import Feeds
from ort_delayed.loader.resident_memory import PeakWindow, current_rss_bytes

__all__ = ["MeasuredRun", "Outputs", "largest_difference", "measure"]

Outputs = Mapping[str, npt.NDArray[np.generic]]
Phase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What making one session and running it took.

    Attributes:
        construct_seconds: making the session.
        run_seconds: each run; the first is often slower.
        peak_bytes: the most resident memory above a baseline taken right before the session was made, None where it
            cannot be measured. The first session of a process makes about 9 MB of ONNX Runtime's code resident.
        is_exact: whether the peak is the kernel's high-water mark; else it is what was resident at the end.
    """

    construct_seconds: float
    run_seconds: tuple[float, ...]
    peak_bytes: int | None
    is_exact: bool

    @property
    def later_seconds(self) -> float:
        """The median of the runs behind the first, or the first where there is no other."""
        return statistics.median(self.run_seconds[1:] or self.run_seconds)


def measure(
    make_session: Callable[[], Any], feeds: Feeds, repeat: int, phase: Phase
) -> tuple[MeasuredRun, Outputs, Any]:
    """Make a session and run it ``repeat`` times; returns the measurements, the last outputs, and the session.

    Args:
        make_session: makes the session.
        feeds: what it gets.
        repeat: how many runs; positive.
        phase: a context manager that is entered, with a name, for the construction and for each run.
    """
    baseline, window = current_rss_bytes(), PeakWindow()
    try:
        start = time.perf_counter()
        with phase("construct"):
            session = make_session()
        construct = time.perf_counter() - start
        names = [output.name for output in session.get_outputs()]
        seconds: list[float] = []
        values: list[Any] = []
        for number in range(repeat):
            values = []  # the previous outputs are not this run's memory
            start = time.perf_counter()
            with phase(f"run {number + 1}"):
                values = session.run(names, dict(feeds))
            seconds.append(time.perf_counter() - start)
        mark, now = window.read(), current_rss_bytes()
    finally:
        window.close()
    highest = now if mark is None else mark
    peak = None if highest is None or baseline is None else max(highest - baseline, 0)
    outputs = {name: value for name, value in zip(names, values, strict=True) if isinstance(value, np.ndarray)}
    return MeasuredRun(construct, tuple(seconds), peak, mark is not None), outputs, session


def largest_difference(found: Outputs, expected: Outputs) -> float:
    """The largest absolute difference of any element of any output; NaN where only one of two is a number.

    Raises:
        CommandError: the outputs have other names or shapes.
    """
    largest = 0.0
    for name, value in expected.items():
        other = found.get(name)
        if other is None or other.shape != value.shape:
            shape = None if other is None else list(other.shape)
            raise CommandError(f"output '{name}' has the shape {shape}, plain onnxruntime yields {list(value.shape)}")
        if value.dtype.kind not in "fiub":
            continue
        a, b = other.astype(np.float64), value.astype(np.float64)
        # Equal infinities and two NaNs are no difference.
        unequal = (a != b) & ~(np.isnan(a) & np.isnan(b))
        if unequal.any():
            differences = np.abs(a[unequal] - b[unequal])
            if np.isnan(differences).any():
                return float("nan")
            largest = max(largest, float(differences.max()))
    return largest
