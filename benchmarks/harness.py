"""Runs cases side by side, each sample in a fresh process, prints tables and writes down what was measured.

    python benchmarks/harness.py                     # `make bench`: three models, two sizes, a quarter of an hour
    python benchmarks/harness.py --plan quick        # `make bench-quick`: memory bounds and outputs, no times
    python benchmarks/harness.py --plan full         # `make bench-full`
    python benchmarks/harness.py --results FILE      # for compare.py and render.py
    python benchmarks/harness.py --only minilm --ways plain "budget 50 %"

Cases of one model, size and cache state take turns. The exit status is 1 if a limit was exceeded, outputs were wrong,
or a budget was refused time after time. Linux only. README.md says how the numbers are meant.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import model_makers
from agreement import compare_outputs
from cases import PLANS, Case, Plan
from forms import Prepared, UnavailableModelError, prepare, throw_away_forms
from measure import FreshProcessError, in_fresh_process
from page_cache import PageCache
from reports import describe, failures, format_group
from results import Record, Row, about_this_machine, about_this_run, about_versions
from sample import take_sample

__all__ = ["Bench", "main"]

_ATTEMPTS = 5
_DISTURBED = 2
_REFUSED = "RamBudgetExceeded"


@dataclass
class Bench:
    """A plan, the directory that models are made in, and what came out so far."""

    plan: Plan
    directory: Path
    minilm: Path | None = None
    after_group: Callable[[], None] = lambda: None
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cache = PageCache()
        self._prepared: dict[str, Prepared] = {}
        self._started = time.monotonic()
        self._throw_away: Prepared | None = None

    def run(self) -> None:
        """Measure all cases, group by group, and print a table for each."""
        cases = self._possible(self.plan.cases)
        groups = [list(g) for _, g in itertools.groupby(cases, key=lambda c: c.key[:3])]
        for number, group in enumerate(groups):
            name = ", ".join(map(str, group[0].key[:3]))
            seconds = self._seconds_left() / (len(groups) - number)
            if not seconds:
                self._note(f"{name}: left out, no time is left (--minutes)")
                continue
            try:
                prepared = self._prepare(group[0])
            except UnavailableModelError as error:
                self._note(f"{name}: left out, {error}")
                continue
            rows = self._measure(group, prepared, seconds)
            self.rows += rows
            print(f"{format_group(rows, times=self.plan.times)}\n", flush=True)
            self.after_group()

    def _possible(self, cases: Sequence[Case]) -> list[Case]:
        missing = {c.way.needs for c in cases if c.way.needs and importlib.util.find_spec(c.way.needs) is None}
        for module in sorted(missing):
            ways = sorted({c.way.name for c in cases if c.way.needs == module})
            self._note(f"{', '.join(ways)}: left out, the package {module} is not installed (extra `bench`)")
        return [case for case in cases if case.way.needs not in missing]

    def _note(self, text: str) -> None:
        self.notes.append(text)
        print(f"{text}\n", flush=True)

    def _seconds_left(self) -> float:
        if not self.plan.minutes:
            return float("inf")
        return max(self.plan.minutes * 60 - (time.monotonic() - self._started), 0)

    def _prepare(self, first: Case) -> Prepared:
        """The model's forms, all that any case wants; made when its first group comes."""
        name = first.model.name
        if name not in self._prepared:
            forms = {c.way.form for c in self.plan.cases if c.model == first.model}
            start = time.monotonic()
            self._prepared[name] = prepare(first.model, forms, self.directory, minilm=self.minilm)
            print(f"{name}: made ({', '.join(sorted(forms))}) in {time.monotonic() - start:.1f} s", flush=True)
        return self._prepared[name]

    def _measure(self, group: Sequence[Case], prepared: Prepared, seconds: float) -> list[Row]:
        """Rounds over a group's cases; after the first only those that fit into ``seconds``."""
        samples: dict[str, list[dict[str, Any]]] = {case.way.name: [] for case in group}
        refused, errors = dict.fromkeys(samples, 0), dict.fromkeys(samples, "")
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="outputs-", dir=self.directory) as outputs:
            # The ending is numpy's own: it would be appended.
            saved = {name: os.path.join(outputs, f"{i}.npz") for i, name in enumerate(samples)}
            for done in range(self.plan.rounds):
                spent = time.monotonic() - started
                if done and spent + spent / done > seconds:
                    break
                for case in group:
                    name = case.way.name
                    if refused[name] >= _ATTEMPTS or errors[name]:
                        continue
                    try:
                        taken, again = self._sample(case, prepared, saved[name], _ATTEMPTS - refused[name])
                    except FreshProcessError as error:
                        # The other cases are worth measuring all the same.
                        errors[name] = str(error).strip().splitlines()[-1]
                        continue
                    refused[name] += again
                    samples[name] += taken
            rows = [
                Row(
                    *(case.model.name, case.size, case.cache, case.way.name, case.way.reference),
                    weights=prepared.sizes.weights,
                    budget=case.way.budget.bytes(prepared.sizes) if case.way.budget else 0,
                    limit=case.limit.bytes(prepared.sizes) if case.limit else None,
                    samples=tuple(samples[case.way.name]),
                    refused=refused[case.way.name],
                    error=errors[case.way.name],
                )
                for case in group
            ]
            return [replace(row, **compare_outputs(c, group, saved)) for c, row in zip(group, rows, strict=True)]

    def _sample(self, case: Case, prepared: Prepared, outputs: str, attempts: int) -> tuple[list[dict[str, Any]], int]:
        """One sample, and how many processes were refused their budget before (a busy machine can be the reason)."""
        form = case.way.form
        if self._throw_away is None:
            self._throw_away = throw_away_forms({c.way.form for c in self.plan.cases}, self.directory)
        refused, disturbed = 0, 0
        while refused < attempts:
            self._cache.prepare(prepared.files(form), case.cache)
            try:
                taken: Any = in_fresh_process(
                    take_sample,
                    opener=case.way.opener,
                    path=prepared.path(form),
                    throw_away=self._throw_away.path(form),
                    budget=case.way.budget.bytes(prepared.sizes) if case.way.budget else 0,
                    size=case.size,
                    runs=self.plan.runs,
                    seconds=self.plan.seconds,
                    outputs=outputs,
                )
            except FreshProcessError as error:
                if _REFUSED not in str(error):
                    raise
                refused += 1
                continue
            if case.cache == "warm" and taken["read_bytes"]:
                self._cache.doubt(prepared.files(form))
                # Often it was a library's code that nobody had used so far. If not, the table will say so.
                if self.plan.times and disturbed < _DISTURBED:
                    disturbed += 1
                    continue
            return [taken], refused
        return [], attempts


@contextmanager
def _directory(given: Path | None, plan: str) -> Iterator[Path]:
    """Where models are made: the given directory, a temporary one for the quick plan, else the cache."""
    if given is None and plan == "quick":
        with tempfile.TemporaryDirectory(prefix="ort-delayed-bench-") as temporary:
            yield Path(temporary)
        return
    directory = given or model_makers.CACHE / "harness"
    directory.mkdir(parents=True, exist_ok=True)
    yield directory


def _selected(plan: Plan, only: Sequence[str], ways: Sequence[str]) -> Plan:
    return replace(
        plan,
        cases=tuple(
            c
            for c in plan.cases
            if (not only or c.model.name in only or c.model.kind in only) and (not ways or c.way.name in ways)
        ),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write down; 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=PLANS, default="normal", help="which cases (default normal)")
    parser.add_argument("--results", type=Path, help="the JSON file to write")
    parser.add_argument("--only", nargs="+", default=[], help="models, by name or kind")
    parser.add_argument("--ways", nargs="+", default=[], help="ways of running, by name")
    parser.add_argument("--rounds", type=int, help="fresh processes per case")
    parser.add_argument("--minutes", type=float, help="leave rounds out beyond this; 0: never")
    parser.add_argument("--directory", type=Path, help="where models are made (quick: a temporary directory)")
    parser.add_argument("--minilm", type=Path, help="the MiniLM encoder's ONNX file, where its package is missing")
    given = parser.parse_args(arguments)
    if sys.platform != "linux":
        print("The harness reads what only Linux records: /proc/self/status, /proc/self/io.")
        return 2
    plan = _selected(PLANS[given.plan](), given.only, given.ways)
    if not plan.cases:
        parser.error("no case has that model and that way")
    plan = replace(
        plan,
        rounds=given.rounds or plan.rounds,
        minutes=plan.minutes if given.minutes is None else given.minutes,
    )
    started = time.monotonic()

    def record() -> Record:
        about = about_this_run(given.plan, bench.rows, time.monotonic() - started)
        return Record(about, about_this_machine(), about_versions(), tuple(bench.rows))

    def save() -> None:
        # After every group: an invocation that is interrupted has measured something all the same.
        if given.results:
            given.results.parent.mkdir(parents=True, exist_ok=True)
            record().save(given.results)

    with _directory(given.directory, given.plan) as directory:
        bench = Bench(plan, directory, given.minilm or model_makers.find_minilm(), save)
        bench.run()
    for text in (*bench.notes, describe(record())):
        print(text)
    failed = failures(bench.rows)
    print("\n".join(f"FAILED: {text}" for text in failed) or f"{len(bench.rows)} cases, every bound kept")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
