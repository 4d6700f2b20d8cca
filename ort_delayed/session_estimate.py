"""What a session under a budget is expected to take, before one is made."""

from __future__ import annotations

from ort_delayed.budgeted_source import BudgetedSource
from ort_delayed.memory_plan import DelayedBytes, MemoryPlan, make_plan

__all__ = ["estimated_plan"]

# What ONNX Runtime takes is known when a session has been made. Measured here, in a process's first session: 14.6 MB
# for a graph of 141 kB (MiniLM), of which the second session of the process took 3.5 MB.
_FIRST_SESSION_BYTES = 11 << 20
_SESSION_BYTES_PER_GRAPH_BYTE = 24
# While a session on a packed model is made. Measured as the least budget at which ten constructions of ten succeed
# (benchmarks/packing_room.py): 18 MiB for weights of 4 MiB, 56 for 16, 144 for 64; on a busy machine some MiB more.
_PACKING_SLACK_BYTES, _MOST_PACKING_SLACK_BYTES = 16 << 20, 96 << 20


def estimated_plan(
    source: BudgetedSource, budget_bytes: int, delayed: DelayedBytes, *, can_map_by_page: bool
) -> MemoryPlan:
    """The plan of a session on a prepared model, in a process that had none before. Activations count as nothing."""
    session_bytes = _FIRST_SESSION_BYTES + _SESSION_BYTES_PER_GRAPH_BYTE * len(source.model) + delayed.held_bytes
    return make_plan(
        budget_bytes=budget_bytes,
        session_bytes=session_bytes,
        activations_bytes=0,
        groups=source.groups,
        weights=source.weights,
        can_map_by_page=can_map_by_page,
        delayed=delayed,
        construction_bytes=_construction_bytes(source, session_bytes),
    )


def _construction_bytes(source: BudgetedSource, session_bytes: int) -> int:
    """For a packed model: its largest weight, which a kernel packs once more; what it is read from and compared with.

    Those pages can be given up, but not before they have been seen, so of large weights less is needed. 0 for others.
    """
    packed = {t.name for t in source.packed_ranges}
    sizes = [t.nbytes for t in source.tensors if t.name in packed]
    if not source.packed or not sizes:
        return 0
    slack = min(2 * max(sizes) + _PACKING_SLACK_BYTES, _MOST_PACKING_SLACK_BYTES)
    # No more than everything there is: the session, and what has been packed.
    return max(sizes) + min(slack, session_bytes + sum(sizes))
