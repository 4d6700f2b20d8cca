"""Tables and JSON on standard output: plain text everywhere, with rich on a terminal where it is installed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Table", "console_of", "format_table", "print_json", "print_table"]

_GAP = "  "
_LEAST_WIDTH = 8


@dataclass(frozen=True, slots=True)
class Table:
    """What a table says.

    Attributes:
        headings: one per column.
        rows: texts, one per column.
        right: columns that are aligned to the right.
        flexible: columns that are shortened, the widest first, where a line would be too long.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    flexible: tuple[int, ...] = (0,)


def format_table(table: Table, width: int) -> str:
    """The table as plain lines of at most ``width`` characters, if its flexible columns can give way so far."""
    lines = [table.headings, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.headings))]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        widest = max(table.flexible, key=lambda i: widths[i], default=None)
        if widest is None or widths[widest] <= _LEAST_WIDTH:
            break
        widths[widest] -= 1
    return "\n".join(_line(line, widths, table.right) for line in lines)


def print_table(table: Table) -> None:
    """Print a table: with rich on a terminal, else in plain text, 80 columns wide where output is piped."""
    console = console_of(sys.stdout)
    if console is None:
        print(format_table(table, shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80))
        return
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, heading in enumerate(table.headings):
        overflow: Any = "fold" if i in table.flexible else "ellipsis"
        justify: Any = "right" if i in table.right else "left"
        shown.add_column(heading, justify=justify, overflow=overflow, no_wrap=i not in table.flexible)
    for row in table.rows:
        shown.add_row(*(Text(cell) for cell in row))  # names may hold what rich takes for markup
    console.print(shown)


def print_json(value: object) -> None:
    """Print a report (dataclasses, mappings, sequences of them) as JSON."""
    print(json.dumps(_plain(value), indent=2, ensure_ascii=False))


def console_of(stream: Any) -> Console | None:
    """A rich console on ``stream`` if that is a terminal and rich is installed."""
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False)


def _line(cells: Sequence[str], widths: Sequence[int], right: Iterable[int]) -> str:
    shown = [_shortened(cell, width) for cell, width in zip(cells, widths, strict=True)]
    aligned = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(shown, widths, strict=True))]
    return _GAP.join(aligned).rstrip()


def _shortened(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    # The end tells most names apart (".bias"), the beginning says what they belong to.
    end = (width - 2) // 2
    return text[: width - 2 - end] + ".." + text[len(text) - end :]


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, Iterable):
        return [_plain(item) for item in value]
    return str(value)
