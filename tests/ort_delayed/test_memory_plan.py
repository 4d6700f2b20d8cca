"""The plan: groups, what stays, what streams, the least budget, and how it prints."""

from __future__ import annotations

from ort_delayed.memory_plan import (
    HEADROOM_BYTES,
    MemoryPlan,
    PlannedWeight,
    cut_into_groups,
    make_plan,
    sizes_of_groups,
)
from ort_delayed.use_order import WeightUse

MIB = 1 << 20


def uses(*names: str) -> list[WeightUse]:
    return [WeightUse(name, f"uses {name}", "MatMul", 1, by_rows=False) for name in names]


def plan(budget_mib: int, sizes_mib: dict[str, int], **settings: object) -> MemoryPlan:
    arguments: dict[str, object] = {
        "budget_bytes": budget_mib * MIB,
        "session_bytes": 10 * MIB,
        "activations_bytes": 0,
        "groups": [(f"t{i}", (name,)) for i, name in enumerate(sizes_mib)],
        "weights": {n: PlannedWeight(n, size * MIB, n.startswith("embed")) for n, size in sizes_mib.items()},
        "can_map_by_page": False,
    }
    return make_plan(**{**arguments, **settings})  # type: ignore[arg-type]


def test_groups_begin_at_the_last_small_weight_before_a_large_one() -> None:
    found = cut_into_groups(
        uses("a", "t1", "t2", "b", "c", "t3", "d", "t4"), dict.fromkeys("abcd", MIB), {"t1", "t2", "t3", "t4"}
    )
    assert found == ((None, ("a",)), ("t2", ("b", "c")), ("t3", ("d",)))


def test_a_small_weight_used_twice_ticks_before_its_first_use() -> None:
    found = cut_into_groups(uses("t", "a", "t", "b"), dict.fromkeys("ab", MIB), {"t"})
    assert found == ((None, ()), ("t", ("a", "b")))


def test_small_groups_are_joined() -> None:
    found = cut_into_groups(
        uses("t1", "a", "t2", "b", "t3", "c"), dict.fromkeys("abc", MIB), {"t1", "t2", "t3"}, least_bytes=2 * MIB
    )
    assert found == ((None, ()), ("t1", ("a", "b")), ("t3", ("c",)))


def test_groups_are_as_large_as_the_waste_allows() -> None:
    gib = 1 << 30
    # Everything fits: four ticks are enough.
    assert sizes_of_groups(2 * gib, gib)[0] == gib // 4
    for budget in (gib // 10, gib // 4, gib // 2, gib * 3 // 4, gib):
        least, most = sizes_of_groups(budget, gib)
        room = max(budget - 48 * MIB, budget * 3 // 4)
        assert MIB <= least <= max(MIB, room // 8)
        assert least <= max(MIB, (gib - room) // 12)
        assert most >= budget // 6
    assert sizes_of_groups(8 * MIB, 64 << 10)[0] == MIB  # not less than what a tick is worth


def test_a_long_stretch_is_paced_by_its_own_weights() -> None:
    found = cut_into_groups(uses(*"abcde"), dict.fromkeys("abcde", MIB), (), set("abce"), most_bytes=2 * MIB)
    # d cannot be paced, so the group that it ends is longer.
    assert found == ((None, ("a", "b")), ("c", ("c", "d")), ("e", ("e",)))


def test_with_room_for_everything_nothing_is_given_up() -> None:
    found = plan(400, dict.fromkeys("abcd", 64))
    assert found.refetched_bytes_per_run == 0
    assert found.stays_bytes == 256 * MIB
    assert found.predicted_peak_bytes == (10 + 256) * MIB


def test_a_part_stays_and_the_rest_streams() -> None:
    found = plan(200, dict.fromkeys("abcd", 64))
    room = 200 - 10 - 16
    assert found.room_bytes == room * MIB
    assert found.stays_bytes == (room - 64) * MIB
    assert found.refetched_bytes_per_run == (256 - room + 64) * MIB
    assert found.predicted_peak_bytes < found.budget_bytes


def test_activations_take_room() -> None:
    assert plan(200, dict.fromkeys("abcd", 64), activations_bytes=30 * MIB).room_bytes == (200 - 10 - 16 - 30) * MIB


def test_a_group_that_does_not_fit_needs_headroom_for_a_late_watcher() -> None:
    found = plan(200, {"a": 100, "b": 100}, groups=[(None, ("a", "b"))])
    assert found.headroom_bytes == HEADROOM_BYTES
    assert found.groups[0].window_bytes < found.groups[0].nbytes


def test_a_weight_larger_than_the_budget_is_touched_by_page_where_that_is_possible() -> None:
    found = plan(128, {"a": 16, "head": 256}, can_map_by_page=True)
    assert found.by_page == ("head",)
    assert found.headroom_bytes < HEADROOM_BYTES
    assert found.groups[1].window_bytes <= found.room_bytes


def test_rows_are_not_counted_as_read() -> None:
    found = plan(128, {"embed": 512, "a": 64})
    assert found.refetched_bytes_per_run == 0
    assert found.by_page == ("embed",)
    assert found.mapped_bytes == 576 * MIB


def test_the_headroom_is_bounded() -> None:
    for budget in (20, 64, 256, 1024, 4096):
        for group in (16, 512):
            found = plan(budget, dict.fromkeys("abcdefgh", group))
            assert found.headroom_bytes <= max(48 * MIB, budget * MIB * 15 // 100)


def test_the_least_budget_covers_what_cannot_be_given_up() -> None:
    found = plan(64, {"a": 256}, activations_bytes=5 * MIB)
    assert 15 * MIB < found.least_budget_bytes < 64 * MIB


def test_it_prints_as_a_table() -> None:
    shown = str(plan(200, dict.fromkeys("abcd", 64)))
    assert "least budget" in shown
    assert "200.00 MiB" in shown
    assert "at t3: d" in shown
