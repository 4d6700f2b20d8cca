"""Resident memory over time: a thread that samples it, anonymous and file-backed apart, and the table it leaves."""

from __future__ import annotations

import csv
import io
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from ort_delayed.cli.errors import UsageError

__all__ = ["MemoryTimeline", "Timeline", "check_timeline_path", "csv_text", "write_timeline"]

_FIRST_INTERVAL_SECONDS = 0.001
_MOST_SAMPLES = 20_000
_PICTURES = (".png", ".svg")


@dataclass(frozen=True)
class Timeline:
    """Samples of one process's resident memory.

    Attributes:
        seconds: when, since the first sample.
        anonymous_bytes: memory of the process's own: activations, copies of weights, Python.
        file_bytes: pages of mapped files: weights, code. 0 where the system does not tell them apart.
        groups: the group of the plan that a run had come to, -1 outside of runs.
        phases: ``(name, start, end)`` of the construction and of each run, in seconds.
        labels: a layer's name for each group of the plan.
        baseline_bytes: resident when the session was about to be made.
        budget_bytes: the budget above that, or None.
    """

    seconds: Sequence[float]
    anonymous_bytes: Sequence[int]
    file_bytes: Sequence[int]
    groups: Sequence[int]
    phases: tuple[tuple[str, float, float], ...]
    labels: tuple[str, ...]
    baseline_bytes: int
    budget_bytes: int | None

    def label(self, index: int) -> str:
        """The layer that was being computed at a sample; empty outside of runs."""
        group = self.groups[index]
        return self.labels[group] if 0 <= group < len(self.labels) else ""

    def phase(self, index: int) -> str:
        """The phase that a sample belongs to; empty between phases."""
        now = self.seconds[index]
        return next((name for name, start, end in self.phases if start <= now <= end), "")


class MemoryTimeline:
    """Samples every millisecond from entering a ``with`` block until it is left.

    After each 20,000 samples every second one is given up, and from then on they are taken half as often.
    """

    def __init__(self) -> None:
        self.position: Callable[[], int | None] = lambda: None
        self._process = psutil.Process()
        self._interval = _FIRST_INTERVAL_SECONDS
        self._phases: list[tuple[str, float, float]] = []
        self._times, self._anonymous = array("d"), array("q")
        self._files, self._groups = array("q"), array("l")
        self._start = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="ort-delayed-timeline", daemon=True)

    def __enter__(self) -> MemoryTimeline:
        self._start = time.perf_counter()
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._sample()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens in the block is called ``name``."""
        start = time.perf_counter() - self._start
        try:
            yield
        finally:
            self._phases.append((name, start, time.perf_counter() - self._start))

    def timeline(self, *, labels: Sequence[str], budget_bytes: int | None) -> Timeline:
        """What has been sampled."""
        return Timeline(
            tuple(self._times),
            tuple(self._anonymous),
            tuple(self._files),
            tuple(self._groups),
            tuple(self._phases),
            tuple(labels),
            self._anonymous[0] + self._files[0],
            budget_bytes,
        )

    def _sample_until_stopped(self) -> None:
        while not self._stopping.wait(self._interval):
            self._sample()
            if len(self._times) >= _MOST_SAMPLES:
                self._times, self._anonymous = self._times[::2], self._anonymous[::2]
                self._files, self._groups = self._files[::2], self._groups[::2]
                self._interval *= 2

    def _sample(self) -> None:
        memory = self._process.memory_info()
        # Linux counts pages of files and shared memory apart; elsewhere all of it is shown as one.
        of_files = min(getattr(memory, "shared", 0), memory.rss)
        group = self.position()
        self._times.append(time.perf_counter() - self._start)
        self._anonymous.append(memory.rss - of_files)
        self._files.append(of_files)
        self._groups.append(-1 if group is None else group)


def check_timeline_path(path: str) -> None:
    """Refuse a timeline that cannot be written, before anything is measured.

    Raises:
        UsageError: another ending than .png, .svg or .csv, or a picture without matplotlib.
    """
    ending = os.path.splitext(path)[1].lower()
    if ending not in (*_PICTURES, ".csv"):
        raise UsageError(f"--timeline writes .png, .svg or .csv, found '{path}'")
    if ending in _PICTURES:
        import importlib.util

        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError(
                "--timeline needs matplotlib for a picture: pip install 'ort-delayed[plot]', or write a .csv"
            )
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise UsageError(f"--timeline: there is no directory '{os.path.dirname(path)}'")


def csv_text(timeline: Timeline) -> str:
    """The samples as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("seconds", "anonymous_bytes", "file_bytes", "phase", "layer"))
    for i, seconds in enumerate(timeline.seconds):
        row = (f"{seconds:.6f}", timeline.anonymous_bytes[i], timeline.file_bytes[i])
        writer.writerow((*row, timeline.phase(i), timeline.label(i)))
    return out.getvalue()


def write_timeline(path: str, timeline: Timeline, title: str) -> None:
    """Write a timeline as its file name's ending says, whole or not at all."""
    from ort_delayed.new_files import PendingFile

    ending = os.path.splitext(path)[1].lower()
    if ending == ".csv":
        content = csv_text(timeline).encode()
    else:
        from ort_delayed.cli.timeline_picture import picture

        content = picture(timeline, title, ending.lstrip("."))
    full = os.path.abspath(path)
    with PendingFile(os.path.dirname(full), os.path.basename(full)) as file:
        file.write(content)
        file.commit(full, replace=True)
