"""What of the process's memory is one session's: the baseline, and other sessions beside it."""

from __future__ import annotations

import pytest

from ort_delayed import memory_use
from ort_delayed.loader.budget import RamProbeUnavailable
from ort_delayed.memory_use import MemoryUse


class Process:
    """A process whose resident memory the test says."""

    def __init__(self) -> None:
        self.resident: int | None = 1000

    def add(self, nbytes: int) -> None:
        assert self.resident is not None
        self.resident += nbytes


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    made = Process()
    monkeypatch.setattr(memory_use, "current_rss_bytes", lambda: made.resident)
    return made


def use(budget: int = 100, mapped: list[int] | None = None) -> MemoryUse:
    held = [0] if mapped is None else mapped
    return MemoryUse(budget, lambda: held[0])


def test_use_is_what_stands_above_the_start(process: Process) -> None:
    own = use()
    process.add(30)
    assert own.now() == 30
    assert own.baseline == 1000


def test_what_is_gained_between_runs_moves_the_baseline(process: Process) -> None:
    own = use()
    own.end(own.begin())
    process.add(500)
    run = own.begin()
    process.add(20)
    assert own.now() == 20
    assert own.baseline == 1500
    own.end(run)
    process.add(-500)
    own.end(own.begin())
    assert own.baseline == 1000
    assert own.now() == 20


def test_the_baseline_never_sinks_below_its_start(process: Process) -> None:
    own = use()
    own.end(own.begin())
    process.add(-300)
    own.end(own.begin())
    assert own.baseline == 1000


def test_what_other_sessions_map_meanwhile_is_taken_off(process: Process) -> None:
    theirs = [0]
    own, other = use(), use(mapped=theirs)
    run = own.begin()
    beside = other.begin()
    process.add(70)
    theirs[0] = 70
    assert own.now() == 0
    assert run.beside == {id(other): 100}
    assert beside.beside == {id(own): 100}
    other.end(beside)
    own.end(run)
    own.end(run)


def test_without_a_measure_there_is_no_use(process: Process) -> None:
    own = use()
    process.resident = None
    with pytest.raises(RamProbeUnavailable):
        own.now()
    with pytest.raises(RamProbeUnavailable):
        use()


def test_a_report_prints_as_a_table() -> None:
    from ort_delayed.memory_report import MemoryReport, RunMemory

    text = str(
        MemoryReport(40 << 20, 100 << 20, 5 << 20, 30 << 20, "kernel-high-water-mark", 2, RunMemory(1, 2, 3, 4, 5))
    )
    assert "40.00 MiB" in text
    assert "ticks; interventions of the watcher" in text
    assert "by the kernel's high-water mark" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "last run" not in str(MemoryReport(1, 2))
