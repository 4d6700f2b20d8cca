"""A progress bar on standard error: with rich where it is installed, else one line; none where output is piped."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from ort_delayed.cli.printing import console_of
from ort_delayed.cli.sizes import size_text

__all__ = ["ProgressBar"]

_BETWEEN_LINES_SECONDS = 0.1


class ProgressBar:
    """Shows how many bytes are done, while a ``with`` block lasts.

    Args:
        title: what is being done, in one word.
        is_shown: False shows nothing.
    """

    def __init__(self, title: str, *, is_shown: bool = True) -> None:
        self._title = title
        self._is_shown = is_shown and sys.stderr.isatty()
        self._rich: Any = None
        self._task: Any = None
        self._last = 0.0
        self._shown = 0

    def __enter__(self) -> ProgressBar:
        console = console_of(sys.stderr) if self._is_shown else None
        if console is not None:
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            percent = TextColumn("{task.percentage:>3.0f} %")
            # What does not fit into the line is cut off: a bar of two lines would flicker.
            note = TextColumn(
                "{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
            )
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), percent, note)
            self._rich = Progress(*columns, console=console, transient=True)
            self._rich.start()
            self._task = self._rich.add_task(self._title, total=None, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rich is not None:
            self._rich.stop()
        elif self._shown:
            print("\r" + " " * self._shown + "\r", end="", file=sys.stderr, flush=True)

    def update(self, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` bytes are done, and ``note`` instead of these amounts."""
        if self._rich is not None:
            self._rich.update(self._task, completed=done, total=total, note=note or self._amounts(done, total))
        elif self._is_shown and (done == total or time.monotonic() - self._last > _BETWEEN_LINES_SECONDS):
            self._last = time.monotonic()
            percent = 100 * done // total if total else 100
            text = f"{self._title} {percent:3d} %  {note or self._amounts(done, total)}"[:79]
            print("\r" + text.ljust(self._shown), end="", file=sys.stderr, flush=True)
            self._shown = max(self._shown, len(text))

    def _amounts(self, done: int, total: int) -> str:
        return f"{size_text(done)} of {size_text(total)}"
