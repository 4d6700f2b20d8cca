"""The plan of a session under a RAM budget: what is read when, what stays in memory, what streams. Pure and printable.

A run is cut into *groups*: the weights used between one tick of the clock (a small weight that a delayed node delivers
just in time) and the next. While a group is used, pages of the weights that will be needed last are given up, so a
part of the model stays and the rest streams through what is left of the budget.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ort_delayed.loader.budget import format_bytes
from ort_delayed.ops.payloads import FilePayload, HeldPayload, PayloadSource
from ort_delayed.use_order import WeightUse

__all__ = ["HEADROOM_BYTES", "DelayedBytes", "MemoryPlan", "PlannedGroup", "PlannedWeight", "cut_into_groups"]
__all__ += ["make_plan", "sizes_of_groups"]

_MIB = 1 << 20
HEADROOM_BYTES = 48 * _MIB
"""Most bytes held back where weights stream between two ticks: what two busy cores can touch before a late poll."""
_PACED_HEADROOM_BYTES = 16 * _MIB
# For mapped weights: what is in use, and what is touched before the watcher has seen it.
_LEAST_ROOM_BYTES = 12 * _MIB
_BY_PAGE_HEADROOM_BYTES = 32 * _MIB
# Groups of less are joined: a tick costs some 20 us, in which a core reads a quarter of this.
_LEAST_GROUP_BYTES = _MIB
# A stretch of more than this (or than a part of the budget) gets ticks even where it has no small weights.
_LEAST_PACED_BYTES = 16 * _MIB
# A first guess at what the session and the headroom take, before anything is known.
_TAKEN_FIRST_BYTES = 48 * _MIB
# Inside a group that streams, more than its largest weight: what is touched until the next poll.
_WINDOW_SLACK_BYTES = 16 * _MIB


@dataclass(frozen=True, slots=True)
class PlannedWeight:
    """A weight that stays in its file and is mapped from there.

    Attributes:
        name: the initializer; one of a body is preceded by where the body stands.
        nbytes: its size.
        by_rows: whether only rows of it are read (an embedding), so that a run touches few of its pages.
    """

    name: str
    nbytes: int
    by_rows: bool


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """What is used from one tick of the clock until the next.

    Attributes:
        tick: the small weight whose delivery begins the group; None for what a run uses before its first tick.
        weights: names of the mapped weights, in order of use.
        nbytes: their sizes added up, those read by rows left out.
        window_bytes: what has to be resident at once: all of it, or for a group that does not fit into the budget
            its largest weight and some slack, while a watcher gives up what has been used.
    """

    tick: str | None
    weights: tuple[str, ...]
    nbytes: int
    window_bytes: int


@dataclass(frozen=True, slots=True)
class DelayedBytes:
    """What the delayed nodes of a model need.

    Attributes:
        read_bytes: ``file`` payloads, which every run reads.
        held_bytes: ``cpu`` payloads, resident from construction on.
        load_bytes: the most that delivering one of them takes beside what is held.
    """

    read_bytes: int = 0
    held_bytes: int = 0
    load_bytes: int = 0

    @classmethod
    def of(cls, sources: Iterable[PayloadSource]) -> DelayedBytes:
        """What these payloads need; sources of other kinds (ticks) need nothing."""
        read, held = [], {}
        copied = 0
        for source in sources:
            if isinstance(source, FilePayload):
                read.append(source.tensor.nbytes)
            elif isinstance(source, HeldPayload):
                held[id(source.held)] = source.held.nbytes
                copied = max(copied, source.held.nbytes)
        return cls(sum(read), sum(held.values()), max(2 * max(read, default=0), copied))


@dataclass(frozen=True)
class MemoryPlan:
    """What a session keeps in memory, and what a run reads again. All sizes in bytes; ``print`` shows a table.

    Attributes:
        budget_bytes: the budget, above the baseline taken when construction began.
        session_bytes: resident whatever happens: ONNX Runtime's session, small weights, inline weights.
        activations_bytes: the most that activations have been seen to take; 0 before the first run.
        mapped_bytes: all mapped weights.
        headroom_bytes: held back, because a watching thread can be late.
        groups: what is used when.
        by_page: weights of which a touch should map single pages: those read by rows, and those of groups that do
            not fit, so that memory grows slowly enough for the watcher.
        weights: the mapped weights, in order of first use.
        stays_bytes: mapped bytes that stay resident from run to run.
        refetched_bytes_per_run: mapped bytes that a run gives up and touches again.
        predicted_peak_bytes: the highest use expected.
        least_budget_bytes: the least budget that would do, activations as seen so far.
        delayed_bytes_per_run: payloads of ``file`` delayed nodes: every run reads them, they are not among the weights.
        load_bytes: the most that delivering one delayed weight takes: for a ``file`` payload twice its size, the buffer
            that it is read into and ONNX Runtime's copy. Activations that have been seen include it.
        construction_bytes: what constructing a session on a packed model takes; 0 for other models.
    """

    budget_bytes: int
    session_bytes: int
    activations_bytes: int
    mapped_bytes: int
    headroom_bytes: int
    groups: tuple[PlannedGroup, ...]
    weights: tuple[PlannedWeight, ...]
    by_page: tuple[str, ...]
    stays_bytes: int
    refetched_bytes_per_run: int
    predicted_peak_bytes: int
    least_budget_bytes: int
    delayed_bytes_per_run: int = 0
    load_bytes: int = 0
    construction_bytes: int = 0

    @property
    def room_bytes(self) -> int:
        """What the budget leaves for mapped weights."""
        taken = self.session_bytes + max(self.activations_bytes, self.load_bytes) + self.headroom_bytes
        return max(self.budget_bytes - taken, 0)

    def __str__(self) -> str:
        ticks = sum(g.tick is not None for g in self.groups)
        rows = [
            ("budget", self.budget_bytes),
            ("session and small weights", self.session_bytes),
            ("activations seen", self.activations_bytes),
            ("headroom", self.headroom_bytes),
            ("room for mapped weights", self.room_bytes),
            ("mapped weights", self.mapped_bytes),
            ("  stay from run to run", self.stays_bytes),
            ("  given up and read again per run", self.refetched_bytes_per_run),
            ("predicted peak", self.predicted_peak_bytes),
            ("least budget", self.least_budget_bytes),
        ]
        if self.delayed_bytes_per_run or self.load_bytes:
            rows[3:3] = [("delayed weight while it is loaded", self.load_bytes)]
            rows[-2:-2] = [("delayed weights, read at each run", self.delayed_bytes_per_run)]
        if self.construction_bytes:
            rows[-1:-1] = [("while constructing", self.construction_bytes)]
        lines = [f"{name:<36}{format_bytes(value):>14}" for name, value in rows]
        lines.append(f"{len(self.groups)} groups, {ticks} ticks")
        for number, group in enumerate(self.groups):
            shown = ", ".join(group.weights[:3]) + (
                f" and {len(group.weights) - 3} more" if len(group.weights) > 3 else ""
            )
            lines.append(f"{number:>4}  {format_bytes(group.nbytes):>12}  at {group.tick or 'the start'}: {shown}")
        return "\n".join(lines)


def sizes_of_groups(budget_bytes: int, mapped_bytes: int) -> tuple[int, int]:
    """From which size on a group may end at a tick, and above which one is made by pacing a weight, in bytes.

    Small groups waste little memory: room for the coming one has to be made while all of the present one is resident,
    so a run gives up one group more than the budget forces. But a tick that comes after megabytes of weights finds
    every cache cold and takes some 0.3 ms, most of it on the way into Python (``benchmarks/budgets.py``, tick): so
    there are no more than keep the waste below a twelfth, and only four where everything is expected to fit.
    """
    room = max(budget_bytes - _TAKEN_FIRST_BYTES, budget_bytes // 4 * 3)
    paced = max(_LEAST_PACED_BYTES, budget_bytes // 6)
    if mapped_bytes <= room:
        quarter = max(mapped_bytes // 4, _LEAST_GROUP_BYTES)
        return quarter, max(quarter, paced)
    return max(min((mapped_bytes - room) // 12, room // 8), _LEAST_GROUP_BYTES), paced


def cut_into_groups(
    uses: Sequence[WeightUse],
    mapped: Mapping[str, int],
    ticks: Collection[str],
    paces: Collection[str] = (),
    *,
    least_bytes: int = _LEAST_GROUP_BYTES,
    most_bytes: int = 1 << 62,
) -> tuple[tuple[str | None, tuple[str, ...]], ...]:
    """Cut the uses of a run into groups: pairs of the tick that begins it, and the mapped weights it uses.

    Args:
        uses: the order of use.
        mapped: sizes in bytes of the mapped weights.
        ticks: small weights that may become ticks. Of those between two mapped weights the last is taken, and none
            where the group that it would end has fewer than ``least_bytes``.
        paces: mapped weights that may announce themselves, where otherwise a group would pass ``most_bytes``.
        least_bytes: see ``ticks``.
        most_bytes: see ``paces``.
    """
    groups: list[tuple[str | None, list[str]]] = [(None, [])]
    seen: set[str] = set()
    candidate: str | None = None
    for use in uses:
        is_new = use.weight not in seen
        seen.add(use.weight)
        if use.weight in ticks and is_new:
            candidate = use.weight
        if use.weight not in mapped:
            continue
        tick, group = groups[-1]
        size = sum(mapped[w] for w in group)
        if candidate is None and is_new and use.weight in paces and group and size + mapped[use.weight] > most_bytes:
            groups.append((use.weight, []))
        elif candidate is not None and (tick is None or size >= least_bytes):
            groups.append((candidate, []))
        candidate = None
        if use.weight not in groups[-1][1]:
            groups[-1][1].append(use.weight)
    return tuple((tick, tuple(weights)) for tick, weights in groups)


def make_plan(
    *,
    budget_bytes: int,
    session_bytes: int,
    activations_bytes: int,
    groups: Sequence[tuple[str | None, tuple[str, ...]]],
    weights: Mapping[str, PlannedWeight],
    can_map_by_page: bool,
    delayed: DelayedBytes | None = None,
    construction_bytes: int = 0,
) -> MemoryPlan:
    """The plan for a budget. See :class:`MemoryPlan` for what the arguments mean.

    Args:
        budget_bytes: the budget.
        session_bytes: as measured after construction.
        activations_bytes: as measured in runs.
        groups: as :func:`cut_into_groups` makes them.
        weights: every mapped weight, in order of first use.
        can_map_by_page: whether touches can be made to map single pages, so that memory grows slowly.
        delayed: what delayed nodes need; ``session_bytes`` includes what is held.
        construction_bytes: see :class:`MemoryPlan`.
    """
    delayed = delayed or DelayedBytes()
    working_bytes = max(activations_bytes, delayed.load_bytes)
    read_whole = {name: w.nbytes for name, w in weights.items() if not w.by_rows}
    sizes = [sum(read_whole.get(name, 0) for name in names) for _, names in groups]
    whole = sum(read_whole.values())
    free = max(budget_bytes - session_bytes - working_bytes, 0)
    headroom = min(_PACED_HEADROOM_BYTES, free // 4)
    if whole > free - headroom and max(sizes, default=0) > free - headroom:
        # A group streams between two ticks, and only the watcher sees how fast.
        headroom = min(_BY_PAGE_HEADROOM_BYTES, free // 3) if can_map_by_page else min(HEADROOM_BYTES, free // 2)
    room = free - headroom
    by_page = {name for name, w in weights.items() if w.by_rows}
    planned = []
    for (tick, names), size in zip(groups, sizes, strict=True):
        largest = max((read_whole.get(n, 0) for n in names), default=0)
        window = size if size <= room else min(largest + _WINDOW_SLACK_BYTES, room)
        planned.append(PlannedGroup(tick, names, size, window))
        if size > room:
            by_page.update(names)
    window = max((g.window_bytes for g in planned), default=0)
    stays = whole if whole <= room else max(room - window, 0)
    mapped = sum(w.nbytes for w in weights.values())
    fixed = session_bytes + working_bytes
    return MemoryPlan(
        budget_bytes=budget_bytes,
        session_bytes=session_bytes,
        activations_bytes=activations_bytes,
        mapped_bytes=mapped,
        headroom_bytes=headroom,
        groups=tuple(planned),
        weights=tuple(weights.values()),
        by_page=tuple(name for name in weights if name in by_page),
        stays_bytes=stays,
        refetched_bytes_per_run=whole - stays,
        predicted_peak_bytes=max(fixed + min(mapped, room), construction_bytes),
        least_budget_bytes=max(fixed + min(_LEAST_ROOM_BYTES, max(mapped, 1)), construction_bytes),
        delayed_bytes_per_run=delayed.read_bytes,
        load_bytes=delayed.load_bytes,
        construction_bytes=construction_bytes,
    )
