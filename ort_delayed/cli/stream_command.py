"""``ort-delayed stream``: a dry run of the loader: every group mapped, touched and released, under a RAM budget."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from ort_delayed.cli.printing import Table, print_json, print_table
from ort_delayed.cli.progress import ProgressBar
from ort_delayed.cli.sizes import add_ram_argument, counted, size_text

if TYPE_CHECKING:
    from ort_delayed.loader import LoadProgress, StreamedLayerGroup, StreamingLoadReport

__all__ = ["add_parser", "groups_table", "report_lines"]

_PAGE_BYTES = 4096


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "stream",
        parents=[shared],
        help="stream a checkpoint under a RAM budget, as a dry run",
        description="Maps one layer group after the other, touches every page of it and releases it, as "
        "StreamingWeightLoader does for a program, and shows what that takes of the budget.",
    )
    parser.add_argument(
        "source", metavar="WEIGHTS", help="a .safetensors file, index or directory, or an .onnx with external data"
    )
    add_ram_argument(parser, required=True, what="the most resident memory that streaming may add, such as 192MiB")
    parser.add_argument(
        "--layers-per-group", metavar="N", type=int, default=1, help="how many layers are mapped together (1)"
    )
    parser.add_argument("--json", action="store_true", help="print groups and report as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from ort_delayed.cli.errors import UsageError
    from ort_delayed.loader import StreamingWeightLoader, current_rss_bytes

    if arguments.layers_per_group < 1:
        raise UsageError(f"--layers-per-group must be a positive number, found {arguments.layers_per_group}")
    loader = StreamingWeightLoader(
        arguments.source, ram_budget=arguments.ram, layers_per_group=arguments.layers_per_group
    )
    steps: list[LoadProgress] = []
    loader.layer_groups  # noqa: B018  (discovery, which has a baseline of its own)
    budget, baseline = size_text(arguments.ram), current_rss_bytes() or 0  # for the live view; the report has its own
    with ProgressBar("streaming", is_shown=not arguments.json) as bar:

        def progress(step: LoadProgress) -> None:
            steps.append(step)
            now, peak = (size_text(max(n - baseline, 0)) for n in (step.current_rss_bytes, step.peak_rss_bytes))
            bar.update(step.bytes_done, step.bytes_total, f"{step.group.name[:20]}  {now}, peak {peak} of {budget}")

        try:
            report = loader.stream(touch, progress=progress)
        except MemoryError:
            if loader.last_report is not None and steps and not arguments.json:
                print_table(groups_table(steps, loader.last_report))
                print(f"stopped in group {len(steps) + 1} of {steps[-1].groups_total}")
                sys.stdout.flush()
            raise
    if arguments.json:
        print_json({"report": report, "steps": steps, "within_budget": report.peak_ram.within_budget})
        return 0
    print_table(groups_table(steps, report))
    print()
    print("\n".join(report_lines(report)))
    return 0


def touch(group: StreamedLayerGroup) -> None:
    """Read a byte of every page of a group's weights."""
    import numpy as np

    for array in group.tensors.values():
        if array.nbytes:
            int(array.reshape(-1).view(np.uint8)[::_PAGE_BYTES].max())


def groups_table(steps: list[LoadProgress], report: StreamingLoadReport) -> Table:
    """A row per group."""
    baseline = report.peak_ram.baseline_rss_bytes
    rows = tuple(
        (
            s.group.name,
            str(len(s.group.tensor_names)),
            size_text(s.group.mapped_bytes),
            size_text(max(s.current_rss_bytes - baseline, 0)),
            size_text(max(s.peak_rss_bytes - baseline, 0)),
        )
        for s in steps
    )
    return Table(("layer group", "tensors", "size", "memory after", "peak so far"), rows, right=(1, 2, 3, 4))


def report_lines(report: StreamingLoadReport) -> list[str]:
    """What the report says."""
    peak = report.peak_ram
    groups, tensors = counted(report.groups_loaded, "group"), counted(report.tensors_loaded, "tensor")
    return [
        f"{groups}, {tensors}, {size_text(report.bytes_mapped)}, from",
        f"  {report.source}",
        f"peak {size_text(peak.peak_incremental_bytes)} above the baseline, budget {size_text(peak.budget_bytes)}",
        f"  (baseline {size_text(peak.baseline_rss_bytes)}; measured by the {peak.peak_source.replace('-', ' ')})",
    ]
