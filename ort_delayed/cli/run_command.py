"""``ort-delayed run``: a model run and timed, under a RAM budget or not, and beside plain onnxruntime."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from ort_delayed.cli.errors import UsageError
from ort_delayed.cli.paths import directory
from ort_delayed.cli.printing import Table, print_json, print_table
from ort_delayed.cli.sizes import add_ram_argument, counted, size_text

if TYPE_CHECKING:
    from ort_delayed.cli.measuring import MeasuredRun
    from ort_delayed.cli.timeline import MemoryTimeline
    from ort_delayed.memory_report import MemoryReport

__all__ = ["add_parser", "kept_to", "rows_table"]


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "run",
        parents=[shared],
        help="run a model, under a RAM budget or not, and say what that takes",
        description="Makes a session, runs it a few times, and shows times and the peak of resident memory above a "
        "baseline taken right before the session is made.",
    )
    parser.add_argument("model", metavar="MODEL", help="the model file: plain, converted or packed")
    add_ram_argument(parser, required=False, what="a RAM budget for session and runs, such as 256MiB")
    parser.add_argument(
        "--weights-dir", metavar="DIR", type=directory, help="confine the model's files to this directory"
    )
    inputs = parser.add_mutually_exclusive_group()
    inputs.add_argument("--feeds", metavar="FEEDS.npz", help="the inputs, an array for each (numpy.savez)")
    inputs.add_argument(
        "--random",
        action="store_true",
        help="made-up inputs (the default): normally distributed floats, integers 0 or 1",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of made-up inputs (0)")
    parser.add_argument(
        "--dim", metavar="NAME=N", action="append", default=[], help="length of a named axis of made-up inputs; repeat"
    )
    parser.add_argument("--repeat", metavar="N", type=int, default=5, help="how many runs (5)")
    parser.add_argument("--compare", action="store_true", help="run plain onnxruntime too, in a process of its own")
    parser.add_argument("--save", metavar="OUT.npz", help="write the outputs of the last run")
    parser.add_argument(
        "--timeline", metavar="FILE", help="draw memory over time: .png or .svg (needs matplotlib), or write a .csv"
    )
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.repeat < 1:
        raise UsageError(f"--repeat must be a positive number, found {arguments.repeat}")
    from ort_delayed.cli.feeds import assumed_axes, load_feeds, parse_dim, random_feeds, save_arrays
    from ort_delayed.cli.timeline import check_timeline_path
    from ort_delayed.inspecting import model_values

    if arguments.timeline is not None:
        check_timeline_path(arguments.timeline)
    if arguments.feeds is not None and arguments.dim:
        raise UsageError("--dim is for made-up inputs: the arrays of --feeds have their shapes")
    dims = dict(map(parse_dim, arguments.dim))
    inputs, _ = model_values(arguments.model)
    if arguments.feeds is not None:
        feeds = load_feeds(arguments.feeds, inputs)
    else:
        feeds = random_feeds(inputs, dims, arguments.seed)
    assumed = () if arguments.feeds is not None else assumed_axes(inputs, dims)

    measured, outputs, report = _run_ours(arguments, feeds)
    rows = {"ort-delayed": measured}
    difference = None
    if arguments.save is not None:
        save_arrays(arguments.save, outputs)
    if arguments.compare:
        from ort_delayed.cli.measuring import largest_difference
        from ort_delayed.cli.plain_process import run_plain

        with _plain_model(arguments.model) as plain:
            rows["plain onnxruntime"], expected = run_plain(plain, feeds, arguments.repeat)
        difference = largest_difference(outputs, expected)
    if arguments.json:
        shapes = {name: list(value.shape) for name, value in feeds.items()}
        # JSON has no NaN.
        shown = None if difference is None or math.isnan(difference) else difference
        print_json({"feeds": shapes, "rows": rows, "memory_report": report, "largest_difference": shown})
        return 0
    _print(arguments, feeds, assumed, rows, report, difference)
    return 0


def rows_table(rows: dict[str, MeasuredRun]) -> Table:
    """A row per session."""
    texts = tuple(
        (
            name,
            f"{r.construct_seconds:.3f} s",
            f"{r.run_seconds[0] * 1000:.1f} ms",
            f"{r.later_seconds * 1000:.1f} ms" if len(r.run_seconds) > 1 else "",
            "unknown" if r.peak_bytes is None else size_text(r.peak_bytes) + ("" if r.is_exact else " *"),
        )
        for name, r in rows.items()
    )
    return Table(("", "construct", "first run", "later runs", "peak memory"), texts, right=(1, 2, 3, 4))


def kept_to(report: MemoryReport) -> list[str]:
    """What a session under a budget says of itself."""
    lines = [
        f"budget {size_text(report.budget_bytes)}, peak {size_text(report.peak_bytes)} "
        f"(constructing {size_text(report.construction_peak_bytes)})"
    ]
    last = report.last_run
    if last is not None:
        given_up, again = size_text(last.dropped_bytes), size_text(last.refetched_bytes)
        lines.append(f"the last run gave up {given_up} of weights and touched {again} again")
        lines.append(
            f"  ({counted(last.ticks, 'tick')} of the clock, {counted(last.reliefs, 'intervention')} of the watcher)"
        )
    if report.drops_page_cache:
        lines.append("memory is short: weights are given up from the page cache too")
    return lines


def _print(
    arguments: argparse.Namespace,
    feeds: Any,
    assumed: tuple[str, ...],
    rows: dict[str, MeasuredRun],
    report: MemoryReport | None,
    difference: float | None,
) -> None:
    made_up = "" if arguments.feeds else f", made up with seed {arguments.seed}"
    shapes = ", ".join(f"{name} {'x'.join(map(str, value.shape)) or 'scalar'}" for name, value in feeds.items())
    print(f"inputs: {shapes or 'none'}{made_up}")
    if assumed:
        print(f"note: axes of length 1 unless --dim says otherwise: {', '.join(assumed)}")
    print()
    print_table(rows_table(rows))
    print()
    if any(not r.is_exact for r in rows.values()):
        print("* resident at the end: this system keeps no high-water mark")
    if report is not None:
        print("\n".join(kept_to(report)))
    if difference is not None:
        print(f"largest difference to plain onnxruntime: {difference:.3g}")
    if arguments.save:
        print(f"outputs: {arguments.save}")
    if arguments.timeline:
        print(f"timeline: {arguments.timeline}")


def _run_ours(arguments: argparse.Namespace, feeds: Any) -> tuple[MeasuredRun, Any, MemoryReport | None]:
    import onnxruntime

    from ort_delayed.cli.measuring import measure
    from ort_delayed.session import InferenceSession

    if not arguments.debug:
        onnxruntime.set_default_logger_severity(4)  # what fails is reported once, by the error

    def make() -> InferenceSession:
        session = InferenceSession(arguments.model, weights_dir=arguments.weights_dir, ram_budget=arguments.ram)
        made.append(session)
        if watched is not None:
            watched.position = lambda: session.memory_position
        return session

    made: list[InferenceSession] = []
    watched: MemoryTimeline | None = None
    if arguments.timeline is None:
        measured, outputs, session = measure(make, feeds, arguments.repeat, lambda name: nullcontext())
        return measured, outputs, session.memory_report
    from ort_delayed.cli.timeline import MemoryTimeline

    watched = MemoryTimeline()
    try:
        with watched:
            measured, outputs, session = measure(make, feeds, arguments.repeat, watched.phase)
    finally:
        # Also of a run that failed, above all for its budget.
        _write_timeline(arguments, watched, made)
    return measured, outputs, session.memory_report


def _write_timeline(arguments: argparse.Namespace, watched: MemoryTimeline, made: list[Any]) -> None:
    from ort_delayed.cli.timeline import write_timeline
    from ort_delayed.planning import group_labels

    plan = made[0].memory_plan if made else None
    labels = group_labels(plan) if plan is not None else ()
    found = watched.timeline(labels=labels, budget_bytes=arguments.ram)
    write_timeline(arguments.timeline, found, f"ort-delayed run {os.path.basename(arguments.model)}")


@contextmanager
def _plain_model(path: str) -> Iterator[str]:
    """A model that plain onnxruntime runs: the file itself, or a restored copy where it has delayed nodes."""
    from ort_delayed.inspecting import inspect_weights
    from ort_delayed.restoring import restore_model

    if all(t.kind != "delayed node" for t in inspect_weights(path).tensors):
        yield path
        return
    import tempfile

    with tempfile.TemporaryDirectory(prefix="ort-delayed-") as directory:
        restored = os.path.join(directory, "restored.onnx")
        restore_model(path, restored)
        yield restored
