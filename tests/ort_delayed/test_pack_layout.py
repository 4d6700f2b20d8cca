"""ort_delayed/pack_layout.py: where ranges go."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ort_delayed.pack_layout import GROUP_BYTES, SMALL_BYTES, DataLayout, RangeGroup

sizes = st.lists(st.integers(1, 40 << 20), max_size=30)


def test_small_ones_in_front_then_pages_in_order_then_what_only_packing_reads() -> None:
    layout = DataLayout()
    assert [layout.small(n) for n in (1024, 100, 40_000)] == [0, 1024, 1152]
    assert layout.streamed(100_000) == 45_056
    assert layout.streamed(SMALL_BYTES) == 147_456
    assert layout.streamed_end == 147_456 + SMALL_BYTES
    assert layout.behind(5000) == 212_992
    assert layout.end == 217_992
    assert layout.streamed_start == 45_056
    assert layout.groups == (RangeGroup(45_056, 147_456 + SMALL_BYTES - 45_056),)


def test_small_packed_buffers_do_not_each_take_pages() -> None:
    layout = DataLayout()
    assert [layout.streamed(n) for n in (100, 100, 100)] == [0, 128, 256]


def test_a_group_is_about_16_mib_and_a_larger_range_one_by_itself() -> None:
    layout = DataLayout()
    for nbytes in (10 << 20, 6 << 20, 1 << 20, 100 << 20, 4096):
        layout.streamed(nbytes)
    assert [g.nbytes for g in layout.groups] == [16 << 20, 1 << 20, (100 << 20) + 4096]


@given(sizes, sizes, sizes)
def test_ranges_never_overlap_and_groups_cover_what_is_streamed(
    small: list[int], streamed: list[int], behind: list[int]
) -> None:
    layout = DataLayout()
    small = [n % SMALL_BYTES + 1 for n in small]
    ranges = [(layout.small(n), n) for n in small]
    placed = [(layout.streamed(n), n) for n in streamed]
    ranges += placed + [(layout.behind(n), n) for n in behind]
    for (offset, nbytes), (following, _) in itertools.pairwise(ranges):
        assert offset + nbytes <= following
    assert all(offset % 4096 == 0 for offset, nbytes in placed if nbytes >= SMALL_BYTES)
    assert layout.end == (sum(ranges[-1]) if ranges else 0)
    for offset, nbytes in placed:
        assert any(g.offset <= offset and offset + nbytes <= g.end for g in layout.groups)
    assert all(g.offset % 4096 == 0 for g in layout.groups)
    assert all(a.end <= b.offset for a, b in zip(layout.groups, layout.groups[1:], strict=False))
    # A small range never begins a group, so it can take one beyond its size; everything else cannot.
    assert all(
        g.nbytes <= GROUP_BYTES + len(streamed) * SMALL_BYTES or g.nbytes <= max(streamed) + len(streamed) * SMALL_BYTES
        for g in layout.groups
    )


def test_the_order_of_kinds_is_kept() -> None:
    layout = DataLayout()
    layout.streamed(1)
    with pytest.raises(ValueError, match="small weights go in front"):
        layout.small(1)
    layout.behind(1)
    with pytest.raises(ValueError, match="streamed ranges go in front"):
        layout.streamed(1)
