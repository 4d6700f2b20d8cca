"""The benchmarks' measuring: a fresh process, the exact peak, medians."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import measure
from tables import format_table


# Measured functions: each is called in a new interpreter that imports this file.
def allocate_and_free(nbytes: int) -> measure.Result:
    memory = measure.PeakMemory()
    block = bytearray(nbytes)
    held = memory.now()
    del block
    return {"peak": memory.peak(), "held": held, "after": memory.now()}


def fail() -> measure.Result:
    raise ValueError("on purpose")


def die() -> measure.Result:
    import os

    os._exit(0)


def environment_variable() -> measure.Result:
    import os

    return {"value": float(os.environ["MEASURE_TEST"])}


def test_the_peak_counts_memory_that_is_freed_again() -> None:
    nbytes = 64 * measure.MIB
    result = measure.in_fresh_process(allocate_and_free, nbytes=nbytes)
    slack = 4 * measure.MIB
    assert nbytes - slack < result["peak"] < nbytes + slack
    assert nbytes - slack < result["held"] < nbytes + slack
    assert result["after"] < slack


def test_a_failing_process_is_an_error_with_its_traceback() -> None:
    with pytest.raises(measure.FreshProcessError, match="on purpose"):
        measure.in_fresh_process(fail)


def test_a_process_that_ends_without_a_result_is_an_error() -> None:
    with pytest.raises(measure.FreshProcessError, match="status 0"):
        measure.in_fresh_process(die)


def test_the_environment_is_handed_on() -> None:
    assert measure.in_fresh_process(environment_variable, environment={"MEASURE_TEST": "3"}) == {"value": 3}


def test_rows_take_turns_and_are_combined() -> None:
    order = []

    def row(name: str, values: list[float]) -> measure.Result:
        order.append(name)
        value = values.pop(0)
        return {"seconds": value, "peak": value, "difference": value}

    a, b = [1.0, 5.0, 2.0], [4.0, 4.0, 6.0]
    combined = measure.interleaved({"a": lambda: row("a", a), "b": lambda: row("b", b)}, rounds=3)
    assert order == ["a", "b"] * 3
    assert combined["a"] == {"seconds": 2, "peak": 5, "difference": 5}
    assert combined["b"] == {"seconds": 4, "peak": 6, "difference": 6}


def test_median_leaves_the_warm_up_out() -> None:
    calls = []
    assert measure.median_seconds(lambda: calls.append(None), runs=5, warm_up=3) >= 0
    assert len(calls) == 8


def test_tables_align_and_stack_headers() -> None:
    table = format_table(["name", "peak\nMiB"], [["a", "1.0"], ["long", "10.0"]])
    assert table.split("\n") == ["      peak", "name   MiB", "----  ----", "a      1.0", "long  10.0"]
