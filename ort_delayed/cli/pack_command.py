"""``ort-delayed pack``: a model optimised, packed and laid out once, for sessions under a budget."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ort_delayed.cli.printing import Table, print_json, print_table
from ort_delayed.cli.sizes import counted, size_text
from ort_delayed.cli.written_models import add_destination_arguments, refusing_to_replace

if TYPE_CHECKING:
    from ort_delayed.pack_report import PackReport

__all__ = ["add_parser", "totals", "weights_table"]


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "pack",
        parents=[shared],
        help="optimise a model and pack its weights, once and for all",
        description="Writes a model that ONNX Runtime has optimised and whose weights are packed as its kernels want "
        "them, so that no session does it again. It suits the ONNX Runtime and the processor that packed it.",
    )
    add_destination_arguments(parser)
    parser.add_argument(
        "--optimize",
        choices=("all", "extended", "basic", "none"),
        default="all",
        help="ONNX Runtime's optimization level (all, the default); extended runs on any processor",
    )
    parser.add_argument(
        "--no-prepack", action="store_true", help="do not pack weights: half as large, packed in memory"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    import onnxruntime

    from ort_delayed.packing import pack_model

    if not arguments.debug:
        onnxruntime.set_default_logger_severity(4)  # what fails is reported once, by the error
    with refusing_to_replace(arguments, "packing") as progress:
        report = pack_model(
            arguments.source,
            arguments.destination,
            optimize=arguments.optimize,
            prepack=not arguments.no_prepack,
            overwrite=arguments.overwrite,
            progress=progress,
        )
    if arguments.json:
        print_json(report)
        return 0
    if not arguments.quiet and report.weights:
        print_table(weights_table(report))
        print()
    print("\n".join(totals(report)))
    return 0


def weights_table(report: PackReport) -> Table:
    """A row per weight."""
    rows = tuple(
        (
            w.name,
            size_text(w.raw_bytes),
            size_text(w.packed_bytes) if w.packed_bytes else "-",
            _note(w.packed_for, w.note),
        )
        for w in report.weights
    )
    return Table(("weight", "raw", "packed", "for"), rows, right=(1, 2), flexible=(0, 3))


def totals(report: PackReport) -> list[str]:
    """The lines below the table."""
    packed = sum(w.packed_bytes > 0 for w in report.weights)
    environment = report.manifest.environment
    lines = [
        f"{report.source} -> {report.destination}",
        f"{packed} of {counted(len(report.weights), 'weight')} packed for onnxruntime {environment.onnxruntime} on "
        f"{environment.machine}",
    ]
    if report.data_file is not None:
        lines.append(f"data file: {report.data_file}")
        lines.append(f"  {size_text(report.data_bytes)}, of which a run reads {size_text(report.streamed_bytes)}")
    if report.peak_incremental_bytes is not None:
        lines.append(f"packing took {size_text(report.peak_incremental_bytes)} of memory at most")
    return lines


def _note(operators: tuple[str, ...], note: str) -> str:
    return "; ".join(text for text in (*operators, note) if text)
