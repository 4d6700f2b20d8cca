"""What the commands that write a model have in common: arguments, the refusal to replace one, printing the report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ort_delayed.cli.errors import CommandError
from ort_delayed.cli.printing import Table, print_json, print_table
from ort_delayed.cli.progress import ProgressBar
from ort_delayed.cli.sizes import counted, size_text

if TYPE_CHECKING:
    from ort_delayed.conversion_report import ConversionReport, TensorReport

__all__ = ["add_destination_arguments", "notes", "print_report", "refusing_to_replace", "tensors_table", "totals"]


def add_destination_arguments(parser: argparse.ArgumentParser) -> None:
    """Add source, destination, and how the report is printed."""
    parser.add_argument("source", metavar="MODEL", help="the model file to read")
    parser.add_argument("destination", metavar="DESTINATION", help="the model file to write; its data goes beside it")
    parser.add_argument("--overwrite", action="store_true", help="replace a destination that exists, and its data file")
    parser.add_argument("--quiet", action="store_true", help="print the totals only, no line per tensor")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


@contextmanager
def refusing_to_replace(arguments: argparse.Namespace, title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar while a model is written; a destination that exists is refused in terms of the command line.

    Yields:
        the function to call with the bytes that are done and those in all.
    """
    with ProgressBar(title, is_shown=not arguments.json) as bar:
        try:
            yield bar.update
        except FileExistsError:
            raise CommandError(
                f"the destination '{arguments.destination}' exists; give --overwrite to replace it"
            ) from None


def print_report(report: ConversionReport, arguments: argparse.Namespace) -> None:
    """Print what :func:`convert_model` or :func:`restore_model` did."""
    if arguments.json:
        print_json(report)
        return
    if not arguments.quiet and report.tensors:
        print_table(tensors_table(report))
        for number, note in enumerate(notes(report), 1):
            print(f"({number}) {note}")
        print()
    print("\n".join(totals(report)))


def tensors_table(report: ConversionReport) -> Table:
    """A row per tensor; what there is to say of an action stands in :func:`notes`, by number."""
    numbers = {note: number for number, note in enumerate(notes(report), 1)}
    rows = []
    for t in report.tensors:
        note = _note(t)
        name = t.name if t.graph == "main graph" else f"{t.name} ({t.graph})"
        rows.append((name, t.element_type, size_text(t.nbytes), f"{t.action} ({numbers[note]})" if note else t.action))
    return Table(("tensor", "type", "size", "action"), tuple(rows), right=(2,))


def notes(report: ConversionReport) -> list[str]:
    """Why tensors were kept and where referenced ones stand, each once, in the order of the table."""
    return list(dict.fromkeys(note for note in map(_note, report.tensors) if note))


def _note(tensor: TensorReport) -> str:
    if tensor.reason or tensor.action == "written" or tensor.path is None:
        return tensor.reason
    return f"in {tensor.path}"


def totals(report: ConversionReport) -> list[str]:
    """The lines below the table."""
    from ort_delayed.conversion_report import unmatched_text

    lines = [f"{report.source} -> {report.destination}"]
    for action in dict.fromkeys(t.action for t in report.tensors):
        lines.append(f"  {size_text(report.nbytes(action)):>10}  {action}, {counted(report.count(action), 'tensor')}")
    if report.data_file is not None:
        lines.append(f"data file: {report.data_file}, {size_text(report.data_bytes)}")
    for path in report.absolute_paths:
        lines.append(f"note: the model names '{path}' by its absolute path and does not work without it there")
    lines += [f"note: {unmatched_text(pattern)}" for pattern in report.unmatched]
    return lines
