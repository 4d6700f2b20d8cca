"""Documents whose numbers come from recorded results."""

from pathlib import Path

import pytest
from benchmark_records import record, row, sample
from render import RESULTS, fill, losses, main, table

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
RECORD = record(
    row("plain", sample(0.5, peak=100 * MIB), sample(0.5)),
    row("ours", sample(1.0, peak=50 * MIB), sample(1.0), agreement="same bytes"),
    row("once", sample(9.0)),
    row("fast", sample(0.1, construct=0.5)),
    row("floor: memcpy", sample(5.0)),
    row("never", refused=5),
)
PLACE = "before\n<!-- recorded r.json: {} -->\nstale\n<!-- end of recorded -->\nafter\n"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    RECORD.save(tmp_path / "r.json")
    return tmp_path


def test_a_table_has_a_line_a_case() -> None:
    lines = table(RECORD, "m", 1, "warm").splitlines()
    columns = lines[0].count("|")
    assert [line.count("|") for line in lines[:8]] == [columns] * 8
    assert "| ours | 50.0 MiB | 1.000 s | 2000 ms | 1000 ms | 925 to 1075 | 2.00 | 2.00 | 10 | same bytes |" in lines
    assert lines[7].startswith("| never | refused |")
    assert lines[-3].endswith("never (5 times).")
    assert lines[-1] == "Fresh processes a row: 1 to 2. Load average 0.5 to 0.5."


def test_losses_are_the_worst_first_and_no_floors() -> None:
    text = losses(RECORD)
    assert len({line.count("|") for line in text.splitlines()}) == 1
    assert "ours | 2.00 | 2.00 | 1.50" in text
    assert "fast |" not in text
    assert "once" not in text
    assert "floor" not in text


def test_a_place_is_filled_in_and_stays_one(results: Path) -> None:
    filled = fill(PLACE.format("table m, 1, warm"), results)
    assert "stale" not in filled
    assert filled.startswith("before\n<!-- recorded r.json: table m, 1, warm -->\n\n| |")
    assert filled.endswith("<!-- end of recorded -->\nafter\n")
    assert fill(filled, results) == filled


def test_places_next_to_each_other_are_told_apart(results: Path) -> None:
    filled = fill(PLACE.format("about") + PLACE.format("losses"), results)
    assert filled.count("before") == filled.count("after") == 2
    assert filled.index("2 cores") < filled.index("ours | 2.00")


@pytest.mark.parametrize("what", ["table m, 1, cold", "table m", "nothing", "about it"])
def test_a_place_that_asks_for_what_is_not_there_is_an_error(results: Path, what: str) -> None:
    with pytest.raises(ValueError, match=r"not understood|is recorded"):
        fill(PLACE.format(what), results)


def test_documents_say_what_is_recorded(capsys) -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
    assert RESULTS == ROOT / "benchmarks" / "results"
    assert main([*map(str, pages), "--check"]) == 0, capsys.readouterr().out
