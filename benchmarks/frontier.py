"""Draws the frontier: budget against time per run, from the rows that a benchmark writes with --results.

    python benchmarks/budgets.py --results mapped.json && python benchmarks/packing.py --results packed.json
    python benchmarks/frontier.py mapped.json packed.json docs/frontier.svg

Records of harness.py do as well. Sessions under a budget are drawn over plain ONNX Runtime with prepacking disabled,
packed ones (dashed) over default ONNX Runtime: each over what computes the same.

Prints the same as a Markdown table. The picture is plain SVG, so that drawing it needs nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from results import Record, summarize

__all__ = ["markdown_table", "picture", "recorded_rows", "rows_of"]

_WIDTH, _HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 190, 30, 50
_COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#bcbd22",
    "#111111",
)
_FONT = 'font-family="sans-serif" font-size="12"'

Row = Mapping[str, Any]
Lines = dict[str, list[tuple[int, float, float]]]


def recorded_rows(record: Record) -> list[Row]:
    """The warm rows of a harness's record as those of budgets.py, packed ones as a model of their own."""
    found: list[Row] = []
    for row in record.by_key().values():
        way, _, percent = row.way.removesuffix(" %").rpartition(" ")
        family = {"plain": " packed", "plain, not prepacked": ""}.get(row.way)
        if family is None and percent.isdecimal() and way in ("budget", "packed"):
            family = {"budget": "", "packed": " packed"}[way]
        if family is None or row.cache != "warm":
            continue
        own = summarize(row)
        amount = int(percent) if percent.isdecimal() else 0
        found.append(
            {"model": row.model + family, "size": row.size, "percent": amount, "seconds": own.run, "peak": own.peak}
        )
    return found


def lines(rows: Sequence[Row]) -> Lines:
    """Per model and size: percent of the weights, time over plain, peak in bytes."""
    found: Lines = {}
    plain = {(r["model"], r["size"]): r["seconds"] for r in rows if "size" in r and not r["percent"]}
    for row in rows:
        if "size" in row and row["percent"]:
            key = (row["model"], row["size"])
            name = f"{row['model']}, {row['size']}"
            found.setdefault(name, []).append((row["percent"], row["seconds"] / plain[key], row["peak"]))
    return found


def markdown_table(rows: Sequence[Row]) -> str:
    """Models down, budgets across: time per run over that of plain ONNX Runtime."""
    found = lines(rows)
    percents = sorted({percent for points in found.values() for percent, _, _ in points})
    table = ["| model, inputs | " + " | ".join(f"{p} %" for p in percents) + " |", "|---" * (len(percents) + 1) + "|"]
    for name, points in found.items():
        by_percent = {percent: f"{over:.2f}" for percent, over, _ in points}
        table.append(f"| {name} | " + " | ".join(by_percent.get(p, "") for p in percents) + " |")
    return "\n".join(table)


def picture(rows: Sequence[Row]) -> str:
    """The same as SVG."""
    found = lines(rows)
    highest = max((over for points in found.values() for _, over, _ in points), default=1.0)
    top, right = max(2.0, highest * 1.05), 115

    def x(percent: float) -> float:
        return _LEFT + percent / right * (_WIDTH - _LEFT - _RIGHT)

    def y(over: float) -> float:
        return _HEIGHT - _BOTTOM - over / top * (_HEIGHT - _TOP - _BOTTOM)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" {_FONT}>']
    out.append(f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>')
    for percent in (0, 25, 50, 75, 100):
        out.append(f'<line x1="{x(percent)}" y1="{y(0)}" x2="{x(percent)}" y2="{y(top)}" stroke="#ddd"/>')
        out.append(f'<text x="{x(percent)}" y="{y(0) + 18}" text-anchor="middle">{percent} %</text>')
    step = 0.5 if top <= 4 else 1.0 if top <= 8 else 2.0
    for number in range(int(top / step) + 1):
        over = number * step
        colour = "#888" if over == 1 else "#ddd"
        out.append(f'<line x1="{x(0)}" y1="{y(over)}" x2="{x(right)}" y2="{y(over)}" stroke="{colour}"/>')
        out.append(f'<text x="{x(0) - 8}" y="{y(over) + 4}" text-anchor="end">{over:g}</text>')
    out.append(f'<text x="{_LEFT}" y="18">time per run over plain ONNX Runtime</text>')
    out.append(f'<text x="{x(right / 2)}" y="{_HEIGHT - 10}" text-anchor="middle">RAM budget, of the weights</text>')
    for number, (name, points) in enumerate(found.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        dashes = ' stroke-dasharray="6 4"' if "packed" in name else ""
        places = " ".join(f"{x(p):.1f},{y(over):.1f}" for p, over, _ in sorted(points))
        out.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        out += [f'<circle cx="{x(p):.1f}" cy="{y(over):.1f}" r="3" fill="{colour}"/>' for p, over, _ in points]
        height = _TOP + 16 + number * 18
        out.append(f'<rect x="{_WIDTH - _RIGHT + 15}" y="{height - 9}" width="12" height="10" fill="{colour}"/>')
        out.append(f'<text x="{_WIDTH - _RIGHT + 33}" y="{height}">{name}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> int:
    """Draw what the first arguments hold into the last."""
    *sources, target = sys.argv[1:]
    rows = [row for source in sources for row in rows_of(Path(source))]
    Path(target).write_text(picture(rows))
    print(markdown_table(rows))
    return 0


def rows_of(path: Path) -> list[Row]:
    """The rows in a file that a benchmark has written."""
    found = json.loads(path.read_text())
    return list(recorded_rows(Record.load(path)) if "machine" in found else found["rows"])


if __name__ == "__main__":
    raise SystemExit(main())
