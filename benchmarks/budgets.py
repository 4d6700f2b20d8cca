"""What a RAM budget costs: time per run against budget, beside plain ONNX Runtime, and what the project promises.

    python benchmarks/budgets.py [--only chain bare decoder minilm group tick] [--rounds 7] [--results FILE]

Each row runs in a fresh process after one throw-away session; rows of one table take turns, so ratios are taken within
one invocation. Plain means: weights mapped in place, prepacking disabled, which is what the budgeted session computes
with as well. Every weights file is dropped from the page cache and then read once sequentially in 16 MiB reads before
its rows; only the rows of the memory control group start cold.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import model_makers
import onnxruntime
from budget_rows import measure_in_group, measure_row, measure_tick
from delayed_initializers import Figure
from measure import MIB, Result, in_fresh_process, interleaved, peak_method, read_through
from memory_groups import NoMemoryGroupError, memory_group
from page_cache import drop
from results import about_this_machine, about_versions
from tables import format_table

_MINILM = model_makers.MINILM_PACKAGE


@dataclass
class Bench:
    """How often rows are measured, which models, and what came out so far."""

    rounds: int
    runs: int
    directory: Path
    minilm: Path | None
    small: bool
    rows: list[dict[str, object]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def chain(self, *, biases: bool = True) -> Path:
        """Model (a), or without biases (a')."""
        size = (24, 1024) if self.small else (64, 2048)
        return model_makers.chain(*size, biases=biases, directory=self.directory)

    def decoder(self) -> Path:
        """Model (b)."""
        small = model_makers.DecoderSize(4, 512, 8, 1024, 30000, 512)
        return model_makers.decoder(small if self.small else None, directory=self.directory)


def weights_bytes(model: Path) -> int:
    """Bytes of a model's external files."""
    return sum(path.stat().st_size for path in model_makers.external_files(model))


def forget(model: Path) -> None:
    """Drop a model's external files from the page cache."""
    for path in model_makers.external_files(model):
        drop(str(path))


def set_history(model: Path) -> None:
    """Give a model's external files the one history that all warm rows share."""
    forget(model)
    for path in model_makers.external_files(model):
        read_through(str(path))


def frontier(bench: Bench, title: str, model: Path, size: int, percents: Sequence[int]) -> dict[int, Result]:
    """Measure plain ONNX Runtime (percent 0) and budgets of so many percent of the weights; print and keep them."""
    set_history(model)
    total = weights_bytes(model)
    budgets = {0: 0} | {percent: total * percent // 100 for percent in percents}
    found = interleaved(
        {
            str(percent): partial(
                in_fresh_process, measure_row, model=str(model), budget=budget, size=size, runs=bench.runs
            )
            for percent, budget in budgets.items()
        },
        rounds=bench.rounds,
    )
    plain = found["0"]
    cells, by_percent = [], {}
    for percent, budget in budgets.items():
        row = by_percent[percent] = found[str(percent)]
        name = f"{percent} %" if percent else "plain"
        cells.append(
            [name, f"{budget / MIB:.0f}" if budget else "", f"{row['peak'] / MIB:.0f}", f"{row['construct']:.2f}"]
            + [f"{row['seconds']:.4f}", f"{row['seconds'] / plain['seconds']:.2f}"]
            + ([f"{row['dropped'] / MIB:.0f}", f"{row['ticks']:.0f}", f"{row['reliefs']:.0f}"] if percent else [""] * 3)
        )
        bench.rows.append({"model": title, "size": size, "percent": percent, "budget": budget, "total": total, **row})
    headers = [f"{title}, {size}", "budget\nMiB", "peak\nMiB", "construct\ns", "run\ns", "over\nplain"]
    headers += ["dropped\nMiB", "ticks", "reliefs"]
    print(f"{format_table(headers, cells)}\n", flush=True)
    _keep_promises(bench, f"{title}, {size}", budgets, by_percent)
    return by_percent


def _keep_promises(bench: Bench, title: str, budgets: dict[int, int], found: dict[int, Result]) -> None:
    percents = [p for p in budgets if p]
    worst = max(found[p]["peak"] / budgets[p] for p in percents)
    bench.figures.append(Figure(f"{title}: peak over budget, worst", worst, 1.0, "{:.3f}"))
    same = sum(found[p]["digest"] == found[0]["digest"] for p in percents)
    bench.figures.append(Figure("  outputs identical to plain", same, len(percents), "{:.0f}", at_least=True))
    forced = [p for p in percents if found[p]["forced"] and found[p]["dropped"]]
    if forced:
        most = max(found[p]["dropped"] / found[p]["forced"] for p in forced)
        bench.figures.append(Figure("  dropped over what the budget forces", most, 1.15))
    if len(percents) > 1:
        growth = max(found[b]["seconds"] / found[a]["seconds"] for a, b in itertools.pairwise(percents))
        bench.figures.append(Figure("  time over that of the next smaller budget", growth, 1.1))


def chain(bench: Bench) -> None:
    """(a) with biases, batch 1 and 128."""
    for size in (1, 128):
        frontier(bench, "chain", bench.chain(), size, (15, 25, 50, 75, 110))


def bare(bench: Bench) -> None:
    """(a') without biases."""
    frontier(bench, "bare chain", bench.chain(biases=False), 1, (25, 50))


def decoder(bench: Bench) -> None:
    """(b), sequence 1, 16 and 256."""
    bounds = {1: 1.5, 16: 1.3} if bench.small else {1: 1.5, 16: 1.3, 256: 1.15}
    for size, bound in bounds.items():
        percents = (25, 50, 75, 110) if size == 256 else (15, 25, 50, 75, 110)
        found = frontier(bench, "decoder", bench.decoder(), size, percents)
        for percent, most in ((25, bound), (110, 1.05)):
            ratio = found[percent]["seconds"] / found[0]["seconds"]
            bench.figures.append(Figure(f"  {percent} %: time over plain", ratio, most))


def minilm(bench: Bench) -> None:
    """(c), the real encoder, its weights external."""
    if bench.minilm is None:
        print(f"minilm: skipped, the package {_MINILM} is not installed (--minilm names the model)\n")
        return
    model = model_makers.external_copy(bench.minilm, directory=bench.directory)
    frontier(bench, "MiniLM", model, 64, (50, 75, 110))


def group(bench: Bench) -> None:
    """(a) in a memory control group, cold."""
    if bench.small:
        print("group: skipped, a group of a small model's size would not hold the process\n")
        return
    model = bench.chain()
    total = weights_bytes(model)
    # What the process itself takes: Python, ONNX Runtime, and pages that are read ahead.
    own = 64 * MIB
    cells = []
    for percent, bound in ((84, 2.5), (56, 1.7), (24, 1.0)):
        limit = total * percent // 100
        budget = max(limit - own, limit // 2)
        try:
            found = interleaved(
                {
                    name: partial(_in_group, model, limit, amount, bench.runs)
                    for name, amount in (("plain", 0), ("budget", budget))
                },
                rounds=min(bench.rounds, 3),
            )
        except NoMemoryGroupError as error:
            print(f"group: skipped, {error}\n")
            return
        plain, ours = found["plain"], found["budget"]
        faster = plain["seconds"] / ours["seconds"]
        cells.append([f"{percent} %", f"{limit / MIB:.0f}", f"{budget / MIB:.0f}"])
        cells[-1] += [f"{plain['seconds']:.3f}", f"{ours['seconds']:.3f}", f"{faster:.2f}"]
        bench.figures.append(Figure(f"group of {percent} % of the chain: times faster", faster, bound, at_least=True))
        same = float(plain["digest"] == ours["digest"])
        bench.figures.append(Figure("  outputs identical to plain", same, 1, "{:.0f}", at_least=True))
        bench.rows.append({"model": "group", "percent": percent, "plain": plain, "budget": ours})
    headers = ["chain, 1, cold", "group\nMiB", "budget\nMiB", "plain\ns", "budget\ns", "times\nfaster"]
    print(f"{format_table(headers, cells)}\n", flush=True)


def _in_group(model: Path, limit: int, budget: int, runs: int) -> Result:
    forget(model)
    with memory_group(limit) as directory:
        return in_fresh_process(
            measure_in_group,
            model=str(model),
            budget=budget,
            size=1,
            runs=runs,
            environment={"ORT_DELAYED_MEMORY_GROUP": directory},
        )


def tick(bench: Bench) -> None:
    """What a tick costs beside the pages it drops: with room for everything, and at half of the weights."""
    model = bench.chain()
    set_history(model)
    for name, budget in (
        ("room for everything", weights_bytes(model) * 2 + 64 * MIB),
        ("half of the weights", weights_bytes(model) // 2),
    ):
        rows = {name: partial(in_fresh_process, measure_tick, model=str(model), budget=budget, runs=bench.runs)}
        found = interleaved(rows, rounds=min(bench.rounds, 3))[name]
        print(
            f"{name}: {found['ticks']:.0f} ticks a run, each {found['seconds'] * 1e6:.0f} us by ONNX Runtime's "
            f"profile, of which the pager takes {found['pager'] * 1e6:.0f} us beside giving up pages\n"
        )
        bench.figures.append(Figure(f"{name}: us of the pager at a tick", found["pager"] * 1e6, 50, "{:.1f}"))


def write_results(path: Path, rows: Sequence[dict[str, object]], figures: Sequence[Figure], **how: object) -> None:
    """Keep what was measured, with machine, versions, date and load, as JSON that frontier.py draws."""
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "load_average_at_the_end": os.getloadavg(),
        "machine": about_this_machine(),
        "versions": about_versions(),
        **how,
    }
    told = [{"figure": f.what, "measured": f.measured, "promised": f.cells()[2], "met": f.met} for f in figures]
    path.write_text(json.dumps({"about": about, "figures": told, "rows": rows}, indent=1) + "\n")


GROUPS: dict[str, Callable[[Bench], None]] = {
    "chain": chain,
    "bare": bare,
    "decoder": decoder,
    "minilm": minilm,
    "group": group,
    "tick": tick,
}


def main() -> int:
    """Measure the groups that are asked for and print the tables; 1 where a promise is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="groups of figures")
    parser.add_argument("--rounds", type=int, default=7, help="processes per row (default 7)")
    parser.add_argument("--runs", type=int, default=7, help="timed runs per process (default 7)")
    parser.add_argument("--directory", type=Path, default=model_makers.CACHE, help="where models are kept (3 GB)")
    parser.add_argument("--minilm", type=Path, help=f"the ONNX file of {_MINILM}, where it is not installed")
    parser.add_argument("--results", type=Path, help="a JSON file for the rows, which frontier.py draws")
    parser.add_argument("--small", action="store_true", help="small models: shows that the script works, no more")
    given = parser.parse_args()
    directory = given.directory / "small" if given.small else given.directory
    bench = Bench(given.rounds, given.runs, directory, given.minilm or model_makers.find_minilm(), given.small)
    for name in given.only:
        GROUPS[name](bench)
        if given.results:  # after each group: a later one may fail
            write_results(given.results, bench.rows, bench.figures, rounds=given.rounds, runs=given.runs)
    print(format_table(["figure", "measured", "promised", ""], [f.cells() for f in bench.figures]))
    print(f"\nonnxruntime {onnxruntime.__version__}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}.")
    print(f"{given.rounds} fresh processes a row, in turn; peak, worst of them: {peak_method()}.")
    return 0 if all(f.met for f in bench.figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
