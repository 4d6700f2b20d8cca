"""What a session under a RAM budget has taken, as facts."""

from __future__ import annotations

from dataclasses import dataclass

from ort_delayed.loader.budget import format_bytes
from ort_delayed.loader.probe import PeakSource

__all__ = ["MemoryReport", "RunMemory"]


@dataclass(frozen=True)
class RunMemory:
    """What one run did, in bytes where it is not a number of times.

    With several runs at once, the counts of each include what the others did meanwhile.

    Attributes:
        peak_bytes: the most above the baseline.
        dropped_bytes: mapped bytes that were given up.
        refetched_bytes: mapped bytes, given up before, that were announced as needed again.
        ticks: how often the clock ticked.
        reliefs: how often the watching thread had to give up pages.
    """

    peak_bytes: int
    dropped_bytes: int
    refetched_bytes: int
    ticks: int
    reliefs: int


@dataclass(frozen=True)
class MemoryReport:
    """What happened in a session under a budget so far. All sizes in bytes; ``print`` shows a table.

    Attributes:
        budget_bytes: the budget.
        baseline_rss_bytes: resident set size of the process that counts as nothing; what the process gained while
            no run was under way is included.
        construction_peak_bytes: the most above the baseline while the session was constructed.
        peak_bytes: the most above the baseline, runs included.
        peak_source: how peaks are known.
        runs: how many runs have ended.
        last_run: the last of them, None before the first.
        drops_page_cache: whether pages are given up from the page cache as well, because memory is short.
    """

    budget_bytes: int
    baseline_rss_bytes: int
    construction_peak_bytes: int = 0
    peak_bytes: int = 0
    peak_source: PeakSource = "highest-sample"
    runs: int = 0
    last_run: RunMemory | None = None
    drops_page_cache: bool = False

    def __str__(self) -> str:
        rows = [
            ("budget", format_bytes(self.budget_bytes)),
            ("highest use", format_bytes(self.peak_bytes)),
            ("  while the session was made", format_bytes(self.construction_peak_bytes)),
            ("the process without the session", format_bytes(self.baseline_rss_bytes)),
            ("runs", str(self.runs)),
        ]
        if self.last_run is not None:
            rows += [
                ("last run: highest use", format_bytes(self.last_run.peak_bytes)),
                ("  weights given up", format_bytes(self.last_run.dropped_bytes)),
                ("  of those, needed again", format_bytes(self.last_run.refetched_bytes)),
                ("  ticks; interventions of the watcher", f"{self.last_run.ticks}; {self.last_run.reliefs}"),
            ]
        how = "the kernel's high-water mark" if self.peak_source == "kernel-high-water-mark" else "samples"
        lines = [f"{name:<40}{value:>14}" for name, value in rows]
        if self.drops_page_cache:
            lines.append("memory is short: what is given up leaves the page cache too")
        return "\n".join([*lines, f"use is resident memory above the process without the session, by {how}"])
