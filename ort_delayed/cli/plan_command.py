"""``ort-delayed plan``: whether a model would fit into a RAM budget, what stays and what streams; nothing is loaded."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ort_delayed.cli.paths import directory
from ort_delayed.cli.printing import Table, print_json, print_table
from ort_delayed.cli.sizes import add_ram_argument, size_text

if TYPE_CHECKING:
    from ort_delayed.memory_plan import MemoryPlan

__all__ = ["add_parser", "amounts_table", "fits", "groups_table", "verdict"]

_SHOWN_WEIGHTS = 2


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "plan",
        parents=[shared],
        help="whether a model would fit into a RAM budget, and what would stream",
        description="Says what a session with this RAM budget would keep in memory and what each run would read "
        "again. No session is made, no weight is read. Exit status 1 if the budget is too small.",
    )
    parser.add_argument("model", metavar="MODEL", help="the model file")
    add_ram_argument(parser, required=True, what="the budget: resident memory that the session may add, such as 512MiB")
    parser.add_argument(
        "--weights-dir", metavar="DIR", type=directory, help="confine the model's files to this directory"
    )
    parser.add_argument("--groups", action="store_true", help="list what is used when")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from ort_delayed.planning import plan_session

    plan = plan_session(arguments.model, arguments.ram, weights_dir=arguments.weights_dir)
    if arguments.json:
        print_json({"fits": fits(plan), "room_bytes": plan.room_bytes, "plan": plan})
        return 0 if fits(plan) else 1
    print(verdict(plan))
    print()
    print_table(amounts_table(plan))
    if arguments.groups:
        print()
        print_table(groups_table(plan))
    return 0 if fits(plan) else 1


def fits(plan: MemoryPlan) -> bool:
    """Whether the budget would do, activations left out."""
    return plan.least_budget_bytes <= plan.budget_bytes


def verdict(plan: MemoryPlan) -> str:
    """The answer in one sentence."""
    from ort_delayed.loader.budget import HARDLY_MEANT_BYTES

    budget = size_text(plan.budget_bytes)
    if not fits(plan):
        if plan.budget_bytes < HARDLY_MEANT_BYTES:
            budget += " (bytes; did you mean MiB?)"
        return f"does not fit into {budget}: at least {size_text(plan.least_budget_bytes)} are needed"
    again = size_text(plan.refetched_bytes_per_run)
    if plan.delayed_bytes_per_run:
        text = f"fits into {budget}; each run reads {size_text(plan.delayed_bytes_per_run)} of delayed weights"
        return text + (f", and {again} of others again" if plan.refetched_bytes_per_run else "")
    if not plan.refetched_bytes_per_run:
        return f"fits into {budget}; no weight is read again"
    return f"fits into {budget}; each run reads {again} of weights again"


def amounts_table(plan: MemoryPlan) -> Table:
    """A row per amount."""
    by_rows = sum(w.nbytes for w in plan.weights if w.by_rows)
    rows = [
        ("budget", plan.budget_bytes, "resident memory above the baseline"),
        ("session, estimated", plan.session_bytes, "ONNX Runtime, graph, small weights"),
        ("headroom", plan.headroom_bytes, "held back: a watcher can be late"),
        ("room for weights", plan.room_bytes, "less what activations take"),
        ("weights", plan.mapped_bytes, "mapped from their files"),
        ("  read by rows", by_rows, "embeddings, of which a run touches few pages"),
        ("  stay in memory", plan.stays_bytes, "from run to run"),
        ("  read again per run", plan.refetched_bytes_per_run, "from the page cache, or the disk"),
        ("predicted peak", plan.predicted_peak_bytes, "without activations"),
        ("least budget", plan.least_budget_bytes, "without activations"),
    ]
    if plan.construction_bytes:
        rows[-2:-2] = [("while constructing", plan.construction_bytes, "kernels pack the largest weight once more")]
    if plan.delayed_bytes_per_run:
        rows[-2:-2] = [("delayed weights", plan.delayed_bytes_per_run, "read from their files at each run")]
    if plan.load_bytes:
        rows[2:2] = [("delayed weight, loaded", plan.load_bytes, "the largest, and ONNX Runtime's copy of it")]
    texts = tuple((name, size_text(nbytes), note) for name, nbytes, note in rows)
    return Table(("", "size", ""), texts, right=(1,), flexible=(2,))


def groups_table(plan: MemoryPlan) -> Table:
    """A row per group: what is used between two ticks of the clock."""
    rows = []
    for number, group in enumerate(plan.groups):
        more = len(group.weights) - _SHOWN_WEIGHTS
        names = ", ".join(group.weights[:_SHOWN_WEIGHTS]) + (f" and {more} more" if more > 0 else "")
        rows.append(
            (str(number), group.tick or "(start)", size_text(group.nbytes), size_text(group.window_bytes), names)
        )
    headings = ("group", "begins at", "size", "at once", "weights")
    return Table(headings, tuple(rows), right=(0, 2, 3), flexible=(1, 4))
