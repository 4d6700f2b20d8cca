"""Plain text tables for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_table"]


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table with a rule under its headers; the first ``left`` columns stand to the left, the others to the right.

    A newline in a header makes a second line.
    """
    lines = max(h.count("\n") for h in headers)
    stacked = [("\n" * (lines - h.count("\n")) + h).split("\n") for h in headers]
    head = list(zip(*stacked, strict=True))
    widths = [max(len(row[i]) for row in [*head, *rows]) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        placed = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(placed).rstrip()

    return "\n".join([*map(line, head), line(["-" * w for w in widths]), *map(line, rows)])
