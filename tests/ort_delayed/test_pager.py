"""The pager against a memory that exists in the test only: bounds hold, and what is given up is needed last."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from ort_delayed.pager import PagedGroup, PagedPiece, Pager


@dataclass
class Memory:
    """Pieces of one weight each, touched as a run goes through the groups."""

    groups: list[list[int]]
    sizes: list[int]
    limit: int
    other: int = 0
    by_rows: frozenset[int] = frozenset()
    resident: set[int] = field(default_factory=set)
    given_up: list[int] = field(default_factory=list)
    highest: int = 0
    touched: int = 0

    def __post_init__(self) -> None:
        pieces = [PagedPiece(n, p in self.by_rows, lambda p=p: self.give_up(p)) for p, n in enumerate(self.sizes)]
        groups = [PagedGroup(tuple(g), sum(self.sizes[p] for p in g)) for g in self.groups]
        self.pager = Pager(pieces, groups, self.used, self.limit)

    def used(self) -> int:
        return self.other + sum(self.sizes[p] for p in self.resident)

    def give_up(self, piece: int) -> None:
        self.resident.discard(piece)
        self.given_up.append(piece)

    def run(self) -> None:
        self.pager.begin()
        for number, group in enumerate(self.groups):
            if number:
                self.pager.tick(number)
            for piece in group:
                self.touched += piece not in self.resident
                self.resident.add(piece)
                self.highest = max(self.highest, self.used())


def test_with_room_for_everything_nothing_is_given_up() -> None:
    memory = Memory([[0], [1], [2]], [10, 10, 10], limit=30)
    for _ in range(3):
        memory.run()
    assert memory.given_up == []
    assert memory.pager.counts.ticks == 6
    assert memory.pager.counts.dropped_bytes == 0


def test_once_everything_is_there_a_tick_does_not_measure() -> None:
    memory = Memory([[0], [1], [2]], [10, 10, 10], limit=40)
    memory.pager.set_limit(40, 30, [10, 10, 10])
    measured = 0

    def used() -> int:
        nonlocal measured
        measured += 1
        return Memory.used(memory)

    memory.pager._used_bytes = used
    memory.run()
    assert measured == 3
    memory.run()
    assert measured == 4  # at the beginning of the run
    # Something else has grown: the watcher makes room, and from then on ticks look again.
    memory.other = 15
    memory.pager.relieve(40)
    measured, memory.highest = 0, 0
    memory.run()
    assert measured == 3
    assert memory.highest <= 40


def test_pages_that_the_system_took_keep_their_room() -> None:
    """Where memory is short the system reclaims pages that the pager counts on; they come back at the next touch."""
    memory = Memory([[p] for p in range(10)], [10] * 10, limit=50)
    memory.run()
    for _ in range(3):
        memory.resident.clear()  # between two runs
        memory.run()
        assert memory.highest <= 50
    # In the middle of a run: the pager must not fill the room with others.
    memory.pager.begin()
    for number, group in enumerate(memory.groups):
        if number:
            memory.pager.tick(number)
        for piece in group:
            memory.resident.add(piece)
            memory.highest = max(memory.highest, memory.used())
        if number == 4:
            taken = set(memory.resident)
            memory.resident.clear()
    memory.resident |= {p for p in taken if memory.pager._resident[p]}
    assert memory.used() <= 50
    assert memory.highest <= 50


def test_a_fixed_part_stays_and_the_rest_streams() -> None:
    memory = Memory([[p] for p in range(10)], [10] * 10, limit=50)
    for _ in range(4):
        memory.run()
    assert memory.highest <= 50
    before = memory.touched
    memory.run()
    # The best possible: of ten pieces five fit, and with the one in use they turn over slowly.
    assert memory.touched - before <= 6


def test_memory_beside_the_weights_counts() -> None:
    memory = Memory([[p] for p in range(6)], [10] * 6, limit=50, other=20)
    memory.run()
    memory.run()
    assert memory.highest <= 50
    assert memory.pager.most_other_bytes == 20


def test_a_piece_used_twice_is_kept_for_its_nearer_use() -> None:
    # Piece 0 is used by group 0 and again by group 3: when 2 comes, it is needed sooner than 1.
    memory = Memory([[0], [1], [2], [0]], [10, 10, 10], limit=20)
    memory.run()
    assert memory.given_up[0] == 1


def test_rows_are_given_up_but_promise_nothing() -> None:
    memory = Memory([[0], [1], [2]], [100, 10, 10], limit=25, by_rows=frozenset({0}))
    memory.pager.begin()
    memory.pager.tick(1)
    memory.pager.tick(2)
    assert memory.pager.counts.dropped_bytes == 0


def test_relief_gives_up_what_is_not_in_use_first() -> None:
    memory = Memory([[0], [1], [2]], [10, 10, 10], limit=100)
    memory.run()
    memory.other = 15
    assert memory.pager.relieve(40) <= 40
    assert 2 in memory.resident, "the last group is in use"
    assert memory.pager.counts.reliefs == 1


def test_relief_gives_up_everything_in_the_end() -> None:
    memory = Memory([[0], [1], [2]], [10, 10, 10], limit=100)
    memory.run()
    memory.other = 60
    assert memory.pager.relieve(50) == 60
    assert memory.resident == set()


def test_in_a_group_that_streams_the_part_that_stays_is_kept() -> None:
    memory = Memory([[0, 1, 2, 3]], [10] * 4, limit=100)
    memory.pager.set_limit(30, 10, [20])
    memory.pager.begin()
    memory.resident = {0, 1, 2}
    memory.pager.relieve(25)
    assert memory.resident == {0}


def test_a_closed_pager_gives_up_nothing() -> None:
    memory = Memory([[0], [1]], [10, 10], limit=10)
    memory.run()
    memory.pager.close()
    memory.given_up.clear()
    memory.run()
    memory.pager.relieve(1)
    memory.pager.give_up_all()
    assert memory.given_up == []


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    data=st.data(),
)
def test_the_limit_holds_wherever_each_group_fits(sizes: list[int], data: st.DataObject) -> None:
    numbers = st.integers(0, len(sizes) - 1)
    groups = data.draw(st.lists(st.lists(numbers, max_size=4, unique=True), min_size=1, max_size=8))
    largest = max(sum(sizes[p] for p in g) for g in groups)
    limit = largest + data.draw(st.integers(0, 60))
    memory = Memory(groups, sizes, limit)
    for _ in range(4):
        memory.run()
    assert memory.highest <= limit
    used = {p for g in groups for p in g}
    if sum(sizes[p] for p in used) <= limit:
        assert memory.given_up == []


@given(count=st.integers(2, 15), capacity=st.integers(1, 15))
def test_a_cyclic_scan_misses_little_more_than_it_must(count: int, capacity: int) -> None:
    memory = Memory([[p] for p in range(count)], [1] * count, limit=capacity)
    for _ in range(3):
        memory.run()
    before, runs = memory.touched, 20
    for _ in range(runs):
        memory.run()
    forced = max(count - capacity, 0)
    assert memory.touched - before <= runs * (forced + (1 if forced else 0))
