"""Puts recorded results into documents, so that no number in them is typed.

    python benchmarks/render.py docs/measuring.md            # fill the places in, from benchmarks/results/
    python benchmarks/render.py docs/measuring.md --check    # 1 where the document says something else

A place is a comment that a reader of the rendered page does not see, and what stands up to the closing one:

    <!-- recorded 2026-11-30.json: table chain 64x2048, 1, warm -->
    <!-- end of recorded -->

``table MODEL, SIZE, CACHE`` is the table of one group, ``about`` says where and with what it was measured, and
``losses`` lists the cases that took longer than their reference, the worst first. Of the results that budgets.py and
packing.py write, ``frontier OTHER ...`` is the table of budgets against time, with the rows of the other files as well,
and ``conditions`` says where and how they were measured. ``printed`` is what ``examples/demo.py --results`` printed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from frontier import markdown_table, rows_of
from measure import MIB
from reports import describe, milliseconds
from results import Record, Row, Summary, ratios, summarize

__all__ = ["fill", "losses", "main", "table"]

RESULTS = Path(__file__).resolve().parent / "results"
_PLACE = re.compile(
    r"(?P<open><!-- recorded (?P<file>[\w.-]+): (?P<what>\w+)(?P<arguments>[^>]*?) -->\n)"
    r".*?(?P<end><!-- end of recorded -->)",
    re.DOTALL,
)
_LOSS = 1.1


def fill(document: str, results: Path = RESULTS) -> str:
    """The document with every place filled in.

    Raises:
        ValueError: a place asks for something that is not recorded.
    """

    def rendered(place: re.Match[str]) -> str:
        if place["what"] == "frontier":
            files = [place["file"], *place["arguments"].split()]
            text = markdown_table([row for file in files for row in rows_of(results / file)])
            return f"{place['open']}\n{text}\n\n{place['end']}"
        if place["what"] == "conditions":
            return f"{place['open']}\n{_conditions(results / place['file'])}\n\n{place['end']}"
        if place["what"] == "printed":
            lines = json.loads((results / place["file"]).read_text())["printed"]
            text = "\n".join(["```text", *lines, "```"])
            return f"{place['open']}\n{text}\n\n{place['end']}"
        record = Record.load(results / place["file"])
        arguments = [part.strip() for part in place["arguments"].split(",") if part.strip()]
        if place["what"] == "about" and not arguments:
            text = describe(record)
        elif place["what"] == "losses" and not arguments:
            text = losses(record)
        elif place["what"] == "table" and len(arguments) == 3:
            text = table(record, arguments[0], int(arguments[1]), arguments[2])
        else:
            raise ValueError(f"not understood: {place['open'].strip()}")
        return f"{place['open']}\n{text}\n\n{place['end']}"

    return _PLACE.sub(rendered, document)


def table(record: Record, model: str, size: int, cache: str) -> str:
    """The Markdown table of one group.

    Raises:
        ValueError: the record has no such group.
    """
    rows = [row for row in record.rows if row.key[:3] == (model, size, cache)]
    if not rows:
        known = sorted({", ".join(map(str, row.key[:3])) for row in record.rows})
        raise ValueError(f"no '{model}, {size}, {cache}' is recorded; there is: {'; '.join(known)}")
    summaries = {row.way: summarize(row) for row in rows if row.samples}
    lines = [
        "| | peak | construct | first run | run | quartiles | over reference | fastest, over | faults a run | outputs |"
    ]
    lines.append("|---" + "|---:" * 8 + "|---|")
    for row in rows:
        if row.way not in summaries:
            lines.append(f"| {row.way} | {'failed' if row.error else 'refused'}" + " |" * 9)
            continue
        own = summaries[row.way]
        low, high = own.quartiles
        mark = "" if own.cache_verified else " (1)"
        cells = [f"{row.way}{mark}", f"{own.peak / MIB:.1f} MiB", f"{own.construct:.3f} s"]
        cells += [f"{milliseconds(s)} ms" for s in (own.first, own.run)]
        cells += [f"{milliseconds(low)} to {milliseconds(high)}", *_over(row, own, summaries.get(row.reference))]
        cells += [f"{own.minor_faults_a_run:,.0f}", row.agreement]
        lines.append("| " + " | ".join(cells) + " |")
    if not all(s.cache_verified for s in summaries.values()):
        most = max(s.read_bytes for s in summaries.values() if not s.cache_verified)
        lines += ["", f"(1) Not {cache} in every sample: {most / 1024:.0f} KiB at most were physically read."]
    refused = [f"{row.way} ({row.refused} times)" for row in rows if row.refused]
    if refused:
        lines += [
            "",
            f"Refused because the budget was not kept, and measured again up to five times: {', '.join(refused)}.",
        ]
    counts = sorted({len(row.samples) for row in rows if row.samples})
    loads = [sample["load_average"] for row in rows for sample in row.samples]
    samples = " to ".join(map(str, counts[:: max(len(counts) - 1, 1)]))
    lines += ["", f"Fresh processes a row: {samples}. Load average {min(loads):.1f} to {max(loads):.1f}."]
    return "\n".join(lines)


def _conditions(path: Path) -> str:
    about = json.loads(path.read_text())["about"]
    machine, versions = about["machine"], about["versions"]
    return (
        f"{about['date']}, {machine['processor']}, {machine['cores']} cores, {machine['system']}, onnxruntime "
        f"{versions['onnxruntime']}; {about['rounds']} processes a row, in turn, of {about['runs']} timed runs each; "
        f"load average at the end {about['load_average_at_the_end'][1]:.1f}."
    )


def _over(row: Row, own: Summary, reference: Summary | None) -> list[str]:
    """The median run over the reference's, and the fastest over its fastest."""
    if reference is None or row.way == row.reference:
        return ["", ""]
    return [f"{own.run / reference.run:.2f}", f"{own.extremes[0] / reference.extremes[0]:.2f}"]


def losses(record: Record) -> str:
    """The cases whose run or first output took more than a tenth longer than their reference's, the worst first.

    What was sampled only once is left out: a busy moment of the machine would pass for a loss, or for none.
    """
    rows = {key: row for key, row in record.by_key().items() if len(row.samples) > 1}
    found = [
        (key, ratio)
        for key, ratio in ratios(record).items()
        if key in rows
        and rows[key].reference_key in rows
        and max(ratio["run"], ratio["ready"]) > _LOSS
        and not key[3].startswith("floor")
    ]
    found.sort(key=lambda item: -item[1]["run"])
    lines = [
        "| model, size, cache | way | run | fastest run | to the first output | peak of the weights |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for key, ratio in found:
        name = ", ".join(map(str, key[:3]))
        peak = f"{ratio['peak']:.0%}".replace("%", " %")
        numbers = " | ".join(f"{ratio[part]:.2f}" for part in ("run", "fastest", "ready"))
        lines.append(f"| {name} | {rows[key].way} | {numbers} | {peak} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill documents in, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args(arguments)
    stale = []
    for path in given.documents:
        text = path.read_text()
        filled = fill(text)
        if filled != text:
            stale.append(path)
            if not given.check:
                path.write_text(filled)
    if given.check and stale:
        print(f"not what is recorded: {', '.join(map(str, stale))}")
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
