"""Comparing two records of the benchmarks' harness."""

from pathlib import Path

import pytest
from benchmark_records import record, row, sample
from compare import changes, main

PLAIN = row("plain", sample(1.0))


def test_the_worst_change_comes_first() -> None:
    old = record(PLAIN, row("a", sample(2.0)), row("b", sample(2.0)))
    new = record(PLAIN, row("a", sample(1.0)), row("b", sample(3.0, peak=110)))
    found = changes(old, new)
    assert (found[0].key[3], found[0].ratio) == ("b", "run")
    assert found[0].growth == pytest.approx(0.5)
    assert found[-1].growth == pytest.approx(-0.5)


def test_a_slower_machine_is_no_change() -> None:
    old = record(PLAIN, row("ours", sample(2.0)))
    new = record(row("plain", sample(3.0, construct=3.0)), row("ours", sample(6.0, construct=3.0)))
    assert all(change.growth == pytest.approx(0) for change in changes(old, new))


def test_cases_of_one_record_only_are_left_out() -> None:
    assert changes(record(PLAIN, row("a", sample())), record(PLAIN, row("b", sample()))) == []


@pytest.mark.parametrize(("run", "status"), [(2.2, 0), (2.4, 1), (1.0, 0)])
def test_more_than_fifteen_percent_is_flagged(tmp_path: Path, capsys, run: float, status: int) -> None:
    record(PLAIN, row("ours", sample(2.0))).save(tmp_path / "old.json")
    record(PLAIN, row("ours", sample(run, construct=1.0))).save(tmp_path / "new.json")
    assert main([str(tmp_path / "old.json"), str(tmp_path / "new.json")]) == status
    assert ("WORSE" in capsys.readouterr().out) == bool(status)


def test_a_larger_peak_is_flagged(tmp_path: Path, capsys) -> None:
    record(PLAIN, row("ours", sample(peak=100))).save(tmp_path / "old.json")
    record(PLAIN, row("ours", sample(peak=120))).save(tmp_path / "new.json")
    paths = [str(tmp_path / "old.json"), str(tmp_path / "new.json")]
    assert main(paths) == 1
    assert "peak over weights" in capsys.readouterr().out
    assert main([*paths, "--worse-than", "25", "--all"]) == 0
    assert "+20 %" in capsys.readouterr().out
