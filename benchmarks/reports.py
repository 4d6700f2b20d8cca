"""Recorded rows in words and tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from measure import MIB
from results import Record, Row, Summary, summarize
from tables import format_table

__all__ = ["describe", "failures", "format_group", "milliseconds"]


def format_group(rows: Sequence[Row], *, times: bool) -> str:
    """The table of one model, size and cache state."""
    first = rows[0]
    title = f"{first.model}, {first.size}, {first.cache}" if first.size else f"{first.model}, {first.cache}"
    summaries = {row.way: summarize(row) for row in rows if row.samples}
    timed_headers = ["anon\nMiB", "mapped\nMiB", "construct\ns", "first\nms", "run\nms", "quartiles\nms", "times\nref."]
    timed_headers.append("faults\na run")
    headers = [title, "peak\nMiB", "limit\nMiB", *(timed_headers if times else []), "outputs"]
    cells = []
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit / MIB:.0f}"
        if row.way not in summaries:
            cells.append([row.way, "failed" if row.error else "refused", limit, *[""] * (len(headers) - 3)])
            continue
        own = summaries[row.way]
        peak = f"{own.peak / MIB:.1f}" + (" !" if times and not own.cache_verified else "")
        timed = _timed(row, own, summaries.get(row.reference)) if times else []
        cells.append([row.way, peak, limit, *timed, row.agreement])
    notes = [
        f"! {row.way}: the page cache was not {row.cache} in every sample; "
        f"{summaries[row.way].read_bytes / 1024:.0f} KiB read physically"
        for row in rows
        if times and row.way in summaries and not summaries[row.way].cache_verified
    ]
    notes += [f"{row.way}: {row.refused} processes refused, budget not kept" for row in rows if row.refused]
    notes += [f"{row.way}: {row.error}" for row in rows if row.error]
    return "\n".join([format_table(headers, cells), *notes])


def _timed(row: Row, own: Summary, reference: Summary | None) -> list[str]:
    over = "" if reference is None or row.way == row.reference else f"{own.run / reference.run:.2f}"
    low, high = own.quartiles
    return [
        f"{own.anon / MIB:.0f}",
        f"{own.file / MIB:.0f}",
        f"{own.construct:.3f}",
        milliseconds(own.first),
        milliseconds(own.run),
        f"{milliseconds(low)}-{milliseconds(high)}",
        over,
        f"{own.minor_faults_a_run:.0f}",
    ]


def milliseconds(seconds: float) -> str:
    """Three digits, no unit."""
    value = seconds * 1000
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def describe(record: Record) -> str:
    """Where, when and with what a record was made, in one paragraph."""
    machine, made = record.machine, record.made
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    low, high = made["load_average"]
    return (
        f"{made['date']}, {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}; {versions}. "
        f"Load average {low:.1f} to {high:.1f}, {made['seconds'] / 60:.1f} minutes."
    )


def failures(rows: Sequence[Row]) -> list[str]:
    """What was promised and did not hold, a sentence each."""
    found = []
    for row in rows:
        name = f"{row.model}, {row.size}, {row.cache}, {row.way}"
        if row.error:
            found.append(f"{name}: {row.error}")
        elif not row.samples and row.limit is not None:
            found.append(f"{name}: refused {row.refused} times, its budget was not kept")
        if not row.samples:
            continue
        peak = max(s["peak"] for s in row.samples)
        if row.limit is not None and peak > row.limit:
            found.append(f"{name}: a peak of {peak / MIB:.1f} MiB, at most {row.limit / MIB:.1f} is promised")
        if row.agreement == "differ":
            found.append(f"{name}: the outputs are not what they should be (difference {row.difference:.2g})")
    return found
