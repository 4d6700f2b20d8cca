"""The harness of the benchmarks, on models that take no time."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import cases
import numpy as np
from agreement import compare_outputs
from cases import Case, Model, Plan
from harness import Bench
from results import summarize

linux = pytest.mark.skipif(sys.platform != "linux", reason="the harness reads what only Linux records")
CHAIN = Model("chain", (3, 64))


@linux
def test_ways_of_running_and_loaders_are_measured(tmp_path: Path, capsys) -> None:
    loaders = (cases.COPY_FLOOR, next(way for way in cases.LOADERS if way.name == "copy: ours"))
    plan = Plan(
        (
            *cases.cases(CHAIN, (2,), (cases.PLAIN, cases.UNPACKED, cases.FILE, cases.FLOORS[1])),
            *cases.cases(CHAIN, (0,), loaders),
        ),
        rounds=1,
        runs=3,
        seconds=0.1,
    )
    bench = Bench(plan, tmp_path)
    bench.run()
    assert [row.key for row in bench.rows] == [case.key for case in plan.cases]
    for row in bench.rows:
        own = summarize(row)
        assert 0 < own.run < 60
        assert len(row.samples) == 1
        assert row.weights == 3 * 64 * 64 * 4
    agreement = {row.way: row.agreement for row in bench.rows}
    assert agreement["plain"] == agreement["floor: sequential read"] == ""
    assert agreement["file mode"] in ("same bytes", "close")
    assert agreement["copy: ours"] == "same bytes"
    assert "floor: sequential read" in capsys.readouterr().out


@linux
def test_a_model_whose_package_is_missing_is_left_out(tmp_path: Path, capsys) -> None:
    bench = Bench(Plan(cases.cases(Model("minilm"), (1,), (cases.PLAIN,)), 1, 1, 0.1), tmp_path)
    bench.run()
    assert bench.rows == []
    assert "minilm, 1, warm: left out" in capsys.readouterr().out


@linux
def test_a_group_that_there_is_no_time_for_is_left_out(tmp_path: Path, capsys) -> None:
    bench = Bench(Plan(cases.cases(CHAIN, (1,), (cases.PLAIN,)), 1, 1, 0.1, minutes=1e-9), tmp_path)
    bench.run()
    assert bench.rows == []
    assert "no time is left" in capsys.readouterr().out


@linux
def test_a_way_whose_package_is_missing_is_left_out(tmp_path: Path, capsys) -> None:
    way = cases.Way("other", "plain", "external", needs="no_such_module")
    bench = Bench(Plan(cases.cases(CHAIN, (1,), (way,)), 1, 1, 0.1), tmp_path)
    bench.run()
    assert bench.rows == []
    assert "other: left out, the package no_such_module" in capsys.readouterr().out


def compared(tmp_path: Path, expected: np.ndarray, found: np.ndarray, way: cases.Way) -> str:
    group = [Case(CHAIN, 1, cases.PLAIN), Case(CHAIN, 1, way)]
    saved = {case.way.name: str(tmp_path / f"{i}.npz") for i, case in enumerate(group)}
    for path, values in zip(saved.values(), (expected, found), strict=True):
        np.savez(path, values)
    agreement: str = compare_outputs(group[1], group, saved)["agreement"]
    return agreement


@pytest.mark.parametrize(
    ("factor", "exact", "expected"),
    [
        (1.0, True, "same bytes"),
        (1.0 + 1e-6, True, "differ"),
        (1.0 + 1e-6, False, "close"),
        (1.1, False, "differ"),
        (np.nan, False, "differ"),
    ],
)
def test_outputs_are_compared(tmp_path: Path, factor: float, exact: bool, expected: str) -> None:
    values = np.linspace(1, 2, 10)
    way = cases.PACKED if exact else cases.FILE
    assert compared(tmp_path, values, values * factor, way) == expected


def test_outputs_of_another_shape_differ(tmp_path: Path) -> None:
    assert compared(tmp_path, np.zeros(3), np.zeros(4), cases.FILE) == "differ"
