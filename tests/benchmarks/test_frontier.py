"""The picture of budgets against times."""

import pytest
from benchmark_records import record, row, sample
from frontier import lines, markdown_table, picture, recorded_rows

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


def test_a_line_a_model_in_table_and_picture() -> None:
    assert "| m packed, 1 | 1.50 |  |" in markdown_table(ROWS)
    assert picture(ROWS).count("<polyline") == 2
