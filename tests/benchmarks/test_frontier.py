"""The picture of budgets against times."""

from pathlib import Path

import pytest
from benchmark_records import record, row, sample
from frontier import lines, markdown_table, picture, recorded_rows, rows_of

ROOT = Path(__file__).parents[2]

ROWS = recorded_rows(
    record(
        row("plain", sample(1.0)),
        row("plain, not prepacked", sample(2.0)),
        row("budget 25 %", sample(3.0)),
        row("budget 110 %", sample(2.0)),
        row("packed", sample(1.0)),
        row("packed 25 %", sample(1.5)),
        row("plain", sample(1.0), cache="cold"),
        row("budget 25 %", sample(9.0), cache="cold"),
    )
)


def test_every_budget_is_drawn_over_what_computes_the_same() -> None:
    found = {name: [(percent, over) for percent, over, _ in points] for name, points in lines(ROWS).items()}
    assert found == {
        "m, 1": [(25, pytest.approx(1.5)), (110, pytest.approx(1.0))],
        "m packed, 1": [(25, pytest.approx(1.5))],
    }


def test_the_picture_in_readme_is_of_what_is_recorded() -> None:
    files = sorted((ROOT / "benchmarks" / "results").glob("frontier-*.json"))
    assert len(files) == 2
    assert (ROOT / "docs" / "frontier.svg").read_text() == picture([row for file in files for row in rows_of(file)])


def test_a_line_a_model_in_table_and_picture() -> None:
    assert "| m packed, 1 | 1.50 |  |" in markdown_table(ROWS)
    assert picture(ROWS).count("<polyline") == 2
