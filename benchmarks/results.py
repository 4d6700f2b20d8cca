"""Recorded results: the samples of every case with machine, versions and date, as JSON; what they come to.

Ratios are what is worth keeping: of a time to that of the reference, measured in turn with it, and of a peak to the
bytes of the weights. Milliseconds of two machines, or of two moments of one, are not comparable.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Key", "Record", "Row", "Summary", "about_this_machine", "about_versions", "ratios", "summarize"]

Key = tuple[str, int, str, str]
"""Model, size of the inputs, state of the page cache, way."""

_PACKAGES = ("ort-delayed", "onnxruntime", "onnxruntime-extensions", "onnx", "numpy", "safetensors", "openmed")


@dataclass(frozen=True)
class Row:
    """What was measured of one case.

    Attributes:
        model, size, cache, way: which case.
        reference: the way that ratios are taken to.
        weights: bytes of the model's weights.
        budget: the RAM budget in bytes, 0 for none.
        limit: what the peak was held against, in bytes, None for nothing.
        samples: what each fresh process measured.
        refused: how many further processes ended with RamBudgetExceeded.
        error: why a process failed otherwise, empty if none did.
        agreement: how outputs compare: ``"same bytes"``, ``"close"``, ``"differ"``, or empty where nothing is compared.
        difference: the largest difference between two numbers of the outputs.
    """

    model: str
    size: int
    cache: str
    way: str
    reference: str
    weights: int
    budget: int
    limit: int | None
    samples: tuple[dict[str, Any], ...]
    refused: int = 0
    error: str = ""
    agreement: str = ""
    difference: float = 0.0

    @property
    def key(self) -> Key:
        """What tells one row from another."""
        return (self.model, self.size, self.cache, self.way)

    @property
    def reference_key(self) -> Key:
        """The row that ratios are taken to."""
        return (self.model, self.size, self.cache, self.reference)


@dataclass(frozen=True)
class Summary:
    """The samples of a row in a few numbers: seconds and bytes.

    Peaks are the highest of all samples; later runs of all samples together have median, quartiles, least and most;
    the rest are medians. ``cache_verified`` says that every sample found the page cache as its case has it, and
    ``read_bytes`` is the most that one read physically.
    """

    construct: float
    first: float
    run: float
    quartiles: tuple[float, float]
    extremes: tuple[float, float]
    peak: int
    peak_constructing: int
    anon: int
    file: int
    read_before_output: float
    read_a_run: float
    minor_faults_a_run: float
    major_faults_a_run: float
    cache_verified: bool
    read_bytes: int

    @property
    def ready(self) -> float:
        """Seconds from nothing to the first output."""
        return self.construct + self.first


def summarize(row: Row) -> Summary:
    """A row's samples, of which there is one at least, in a few numbers."""

    def median(values: Iterable[float]) -> float:
        return statistics.median(list(values))

    runs = sorted(s for sample in row.samples for s in sample["runs"])
    quartiles = statistics.quantiles(runs, n=4, method="inclusive") if len(runs) > 1 else [runs[0]] * 3
    before = [s["constructing"]["read_bytes"] + s["first_run"]["read_bytes"] for s in row.samples]
    return Summary(
        construct=median(s["construct"] for s in row.samples),
        first=median(s["first"] for s in row.samples),
        run=statistics.median(runs),
        quartiles=(quartiles[0], quartiles[2]),
        extremes=(runs[0], runs[-1]),
        peak=max(s["peak"] for s in row.samples),
        peak_constructing=max(s["peak_constructing"] for s in row.samples),
        anon=int(median(s["resident"]["anon"] for s in row.samples)),
        file=int(median(s["resident"]["file"] for s in row.samples)),
        read_before_output=median(before),
        read_a_run=median(s["a_run"]["read_bytes"] for s in row.samples),
        minor_faults_a_run=median(s["a_run"]["minor_faults"] for s in row.samples),
        major_faults_a_run=median(s["a_run"]["major_faults"] for s in row.samples),
        cache_verified=all(b > 0 for b in before)
        if row.cache == "cold"
        else not any(s["read_bytes"] for s in row.samples),
        read_bytes=max(s["read_bytes"] for s in row.samples),
    )


@dataclass(frozen=True)
class Record:
    """The results of one invocation."""

    made: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    rows: tuple[Row, ...]

    def save(self, path: Path) -> None:
        """Write it down, a sample a line, so that a change of one shows as one."""
        head = {name: getattr(self, name) for name in ("made", "machine", "versions")}
        parts = [f' "{name}": {json.dumps(value)},' for name, value in head.items()]
        rows = []
        for row in self.rows:
            own = json.dumps({f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name != "samples"})
            samples = ",\n   ".join(json.dumps(s, separators=(",", ":")) for s in row.samples)
            rows.append(f'  {own[:-1]}, "samples": [\n   {samples}]}}')
        path.write_text("\n".join(["{", *parts, ' "rows": [', ",\n".join(rows), " ]", "}"]) + "\n")

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read what :meth:`save` wrote."""
        found = json.loads(path.read_text())
        rows = tuple(Row(**{**row, "samples": tuple(row["samples"])}) for row in found.pop("rows"))
        return cls(rows=rows, **found)

    def by_key(self) -> dict[Key, Row]:
        """The rows that have samples (those that were refused every time have none)."""
        return {row.key: row for row in self.rows if row.samples}


def ratios(record: Record) -> dict[Key, dict[str, float]]:
    """For each row but the references: times over the reference's, and ``peak`` over the weights.

    ``run`` is the median of later runs, ``ready`` the time from nothing to the first output, and ``fastest`` that of
    the fastest later runs, which other programs on the machine disturb least.
    """
    rows = record.by_key()
    summaries = {key: summarize(row) for key, row in rows.items()}
    found: dict[Key, dict[str, float]] = {}
    for key, row in rows.items():
        own, reference = summaries[key], summaries.get(row.reference_key)
        if reference is None or row.reference_key == key:
            continue
        found[key] = {
            "run": own.run / reference.run,
            "fastest": own.extremes[0] / reference.extremes[0],
            "ready": own.ready / reference.ready,
            "peak": own.peak / row.weights,
        }
    return found


# --- Where and with what ----------------------------------------------------------------------------------------------


def about_this_machine() -> dict[str, Any]:
    """Cores, processor, kernel and memory; nothing that names the machine."""
    return {
        "cores": os.cpu_count(),
        "processor": _first_value("/proc/cpuinfo", "model name") or platform.machine(),
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _first_value(path: str, name: str) -> str:
    try:
        with open(path) as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith(name)), "")
    except OSError:
        return ""


def about_versions() -> dict[str, str]:
    """Python, the packages that matter, and the revision that was measured."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        versions["revision"] = done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return versions


def about_this_run(plan: str, rows: Sequence[Row], seconds: float) -> dict[str, Any]:
    """The date, what was run, how long it took, and the load of the machine beside it."""
    loads = [s["load_average"] for row in rows for s in row.samples]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "plan": plan,
        "seconds": round(seconds),
        "load_average": [min(loads, default=0.0), max(loads, default=0.0)],
    }
