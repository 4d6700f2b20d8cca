"""Recorded results: what samples come to, ratios, the file."""

import platform
from pathlib import Path

import pytest
from benchmark_records import record, row, sample
from reports import failures, format_group, milliseconds
from results import Record, about_this_machine, ratios, summarize


def test_peaks_are_the_highest_and_the_rest_medians() -> None:
    found = summarize(row("w", sample(1, peak=5), sample(2, peak=9, construct=3), sample(3, peak=7, construct=2)))
    assert found.peak == 9
    assert found.construct == 2
    assert found.first == 4
    assert found.run == pytest.approx(2.0)
    assert found.extremes == pytest.approx((0.9, 3.3))
    assert found.quartiles[0] < found.run < found.quartiles[1]
    assert found.ready == 6


@pytest.mark.parametrize(
    ("cache", "read", "verified"), [("warm", 0, True), ("warm", 1, False), ("cold", 1, True), ("cold", 0, False)]
)
def test_the_state_of_the_page_cache_is_verified_by_what_was_read(cache: str, read: int, verified: bool) -> None:
    # One sample that was as it should be does not make up for the other.
    good = 0 if cache == "warm" else 1
    assert summarize(row("w", sample(read=good), sample(read=read), cache=cache)).cache_verified is verified


def test_ratios_are_taken_to_the_reference_of_the_same_group() -> None:
    rows = (
        row("plain", sample(1.0)),
        row("ours", sample(1.5, construct=1.0, peak=50)),
        row("plain", sample(100.0), size=2),
        row("alone", sample(1.0), model="other"),
        row("refused"),
    )
    assert ratios(record(*rows)) == {
        ("m", 1, "warm", "ours"): {
            "run": pytest.approx(1.5),
            "fastest": pytest.approx(1.5),
            "ready": pytest.approx(4 / 3),
            "peak": 0.25,
        }
    }


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = record(row("plain", sample(), sample(2)), row("refused", refused=5, limit=7))
    made.save(tmp_path / "r.json")
    assert Record.load(tmp_path / "r.json") == made
    # A sample a line: a change of one shows as one.
    lines = (tmp_path / "r.json").read_text().splitlines()
    assert [line.count('"runs"') for line in lines if '"runs"' in line] == [1, 1]


def test_what_was_promised_and_did_not_hold_is_a_failure() -> None:
    mib = 1 << 20
    rows = [
        row("kept", sample(peak=mib), limit=mib),
        row("large", sample(peak=mib), sample(peak=2 * mib), limit=mib),
        row("wrong", sample(), agreement="differ", difference=0.5),
        row("refused", limit=mib, refused=5),
        row("another library, refused", refused=5),
        row("failed", error="ValueError: on purpose"),
    ]
    found = failures(rows)
    assert [text.split(":")[0] for text in found] == [
        f"m, 1, warm, {way}" for way in ("large", "wrong", "refused", "failed")
    ]
    assert "2.0 MiB, at most 1.0" in found[0]


def test_a_table_says_where_the_page_cache_was_not_as_it_should_be() -> None:
    table = format_group([row("plain", sample()), row("ours", sample(read=7)), row("none", refused=5)], times=True)
    assert "! ours: the page cache was not warm in every sample" in table
    assert "none: 5 processes refused" in table
    assert "refused" in table.splitlines()[5]


def test_times_can_be_left_out() -> None:
    table = format_group([row("plain", sample(0.123))], times=False)
    assert "123" not in table
    assert "construct" not in table


@pytest.mark.parametrize(("seconds", "text"), [(1.2345, "1234"), (0.012345, "12.3"), (0.00012345, "0.123")])
def test_milliseconds_have_three_digits(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


def test_a_machine_is_described_without_a_name() -> None:
    found = about_this_machine()
    assert found["cores"] >= 1
    assert platform.node() not in str(found)
