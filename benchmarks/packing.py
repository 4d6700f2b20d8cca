"""What packing a model gains: default ONNX Runtime's speed inside a budget, and sessions that are made faster.

    python benchmarks/packing.py [--only budgets construct group] [--rounds 7] [--percents 25 50 110]

The model is (b) of the budgets' benchmark, a decoder of 0.9 GB. *Default* is plain onnxruntime as it comes: everything
in memory, weights packed. Budgets are percent of the model's weights. Each row runs in a fresh process after one
throw-away session; rows of one table take turns, so ratios are taken within one invocation. Every weights file is
dropped from the page cache and then read once sequentially in 16 MiB reads before its rows; only the rows of the
memory control group start cold.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import model_makers
import onnxruntime
from budget_rows import measure_in_group, measure_row
from budgets import forget, set_history, weights_bytes, write_results
from delayed_initializers import Figure
from measure import MIB, FreshProcessError, Result, in_fresh_process, interleaved, peak_method
from memory_groups import NoMemoryGroupError, memory_group
from tables import format_table

_TIME_BOUNDS: Mapping[tuple[int, int], float] = {
    (25, 1): 1.3,
    (25, 16): 1.15,
    (25, 256): 1.1,
    (50, 1): 1.2,
    (50, 16): 1.1,
    (50, 256): 1.05,
    (110, 1): 1.03,
    (110, 16): 1.03,
    (110, 256): 1.03,
}


@dataclass
class Bench:
    """The model and its packed form, how often rows are measured, and what came out so far."""

    source: Path
    packed: Path
    rounds: int
    runs: int
    percents: Sequence[int]
    figures: list[Figure] = field(default_factory=list)
    rows: list[dict[str, object]] = field(default_factory=list)
    refused: int = 0

    def row(self, **arguments: object) -> Result:
        """One process of a row. One whose session is refused, its budget not being kept, is counted and repeated."""
        while True:
            try:
                return in_fresh_process(measure_row, **arguments)
            except FreshProcessError as error:
                if "RamBudgetExceeded" not in str(error) or self.refused >= 20:
                    raise
                self.refused += 1
                print(str(error).strip().splitlines()[-1], flush=True)

    @property
    def total(self) -> int:
        """Bytes of the model's weights."""
        return weights_bytes(self.source)


def pack(source: str, packed: str) -> Result:
    """Pack in this process; seconds, bytes, and the peak above what the process had before."""
    import ort_delayed

    start = time.perf_counter()
    report = ort_delayed.pack_model(source, packed, overwrite=True)
    return {
        "seconds": time.perf_counter() - start,
        "data": report.data_bytes,
        "streamed": report.streamed_bytes,
        "peak": report.peak_incremental_bytes or 0,
    }


def prepared(source: Path, packed: Path) -> None:
    """Pack the model, and say what that took."""
    made = in_fresh_process(pack, source=str(source), packed=str(packed))
    total = weights_bytes(source)
    print(
        f"packed in {made['seconds']:.1f} s, with at most {made['peak'] / MIB:.0f} MiB of memory: "
        f"{total / MIB:.0f} MiB of weights became {made['data'] / MIB:.0f}, of which a run reads "
        f"{made['streamed'] / MIB:.0f}\n"
    )


def budgets(bench: Bench) -> None:
    """Time per run and peak at budgets, against default ONNX Runtime."""
    for size in (1, 16, 256):
        set_history(bench.source)
        set_history(bench.packed)
        row = partial(bench.row, size=size, runs=bench.runs)
        rows: dict[str, Callable[[], Result]] = {
            "default": partial(row, model=str(bench.source), budget=0, way="default"),
            "packed": partial(row, model=str(bench.packed), budget=0, way="ours"),
        }
        amounts = {f"{p} %": bench.total * p // 100 for p in bench.percents}
        for name, amount in amounts.items():
            rows[name] = partial(row, model=str(bench.packed), budget=amount, way="ours")
        found = interleaved(rows, rounds=bench.rounds)
        print(f"{_table(size, found, amounts)}\n", flush=True)
        _keep_promises(bench, size, found, amounts)
        percents = {"default": 0} | dict(zip(amounts, bench.percents, strict=True))
        for name, percent in percents.items():
            row = {"model": "decoder packed", "size": size, "percent": percent, "budget": amounts.get(name, 0)}
            bench.rows.append({**row, "total": bench.total, **found[name]})


def _table(size: int, found: Mapping[str, Result], amounts: Mapping[str, int]) -> str:
    plain, cells = found["default"], []
    for name, row in found.items():
        cells.append(
            [name, f"{amounts[name] / MIB:.0f}" if name in amounts else "", f"{row['peak'] / MIB:.0f}"]
            + [f"{row['construct']:.2f}", f"{row['construct'] / plain['construct']:.2f}"]
            + [f"{row['seconds']:.4f}", f"{row['seconds'] / plain['seconds']:.2f}"]
        )
    headers = [
        f"decoder, {size}",
        "budget\nMiB",
        "peak\nMiB",
        "construct\ns",
        "over\ndefault",
        "run\ns",
        "over\ndefault",
    ]
    return format_table(headers, cells)


def _keep_promises(bench: Bench, size: int, found: Mapping[str, Result], amounts: Mapping[str, int]) -> None:
    plain = found["default"]
    title = f"decoder, {size}"
    same = sum(found[n]["digest"] == plain["digest"] for n in found)
    bench.figures.append(Figure(f"{title}: outputs identical to default", same, len(found), "{:.0f}", at_least=True))
    for percent, (name, amount) in zip(bench.percents, amounts.items(), strict=True):
        row = found[name]
        bench.figures.append(Figure(f"  {name}: peak over budget", row["peak"] / amount, 1.0, "{:.3f}"))
        bound = _TIME_BOUNDS.get((percent, size))
        if bound is not None:
            bench.figures.append(Figure(f"  {name}: time over default", row["seconds"] / plain["seconds"], bound))


def construct(bench: Bench) -> None:
    """Seconds until a session is there: without a budget, and with one of 25 %."""
    set_history(bench.source)
    set_history(bench.packed)
    row = partial(bench.row, size=1, runs=1)
    found = interleaved(
        {
            "default": partial(row, model=str(bench.source), budget=0, way="default"),
            "packed": partial(row, model=str(bench.packed), budget=0, way="ours"),
            "25 %": partial(row, model=str(bench.packed), budget=bench.total // 4, way="ours"),
        },
        rounds=bench.rounds,
    )
    plain = found["default"]["construct"]
    cells = [[n, f"{r['construct']:.3f}", f"{r['peak_constructing'] / MIB:.0f}"] for n, r in found.items()]
    print(f"{format_table(['constructing', 'seconds', 'peak MiB'], cells)}\n", flush=True)
    bench.figures.append(Figure("construct, no budget: over default", found["packed"]["construct"] / plain, 0.5))
    bench.figures.append(Figure("construct, 25 %: over default", found["25 %"]["construct"] / plain, 1.0))


def group(bench: Bench) -> None:
    """Sequence 1 in a memory control group, cold, against plain ONNX Runtime with its weights mapped."""
    streamed = bench.total
    own = 64 * MIB  # what the process itself takes: Python, ONNX Runtime, and pages that are read ahead
    cells = []
    for percent in (84, 56):
        limit = streamed * percent // 100
        rows = {
            "plain, mapped": (bench.source, 0, "mapped"),
            "packed": (bench.packed, limit - own, "ours"),
        }
        try:
            found = interleaved(
                {n: partial(_in_group, *r[:1], limit, *r[1:], bench.runs) for n, r in rows.items()},
                rounds=min(bench.rounds, 3),
            )
            fits = _default_fits(bench, limit)
        except NoMemoryGroupError as error:
            print(f"group: skipped, {error}\n")
            return
        faster = found["plain, mapped"]["seconds"] / found["packed"]["seconds"]
        cells.append([f"{percent} %", f"{limit / MIB:.0f}", fits])
        cells[-1] += [f"{found[n]['seconds']:.3f}" for n in rows] + [f"{faster:.2f}"]
        bench.figures.append(Figure(f"group of {percent} %: times faster than mapped", faster, 1.5, at_least=True))
    headers = ["decoder, 1, cold", "group\nMiB", "default\ns", "mapped\ns", "packed\ns", "times\nfaster"]
    print(f"{format_table(headers, cells)}\n", flush=True)


def _default_fits(bench: Bench, limit: int) -> str:
    try:
        return f"{_in_group(bench.source, limit, 0, 'default', 2)['seconds']:.3f}"
    except FreshProcessError:
        return "killed"


def _in_group(model: Path, limit: int, budget: int, way: str, runs: int) -> Result:
    forget(model)
    with memory_group(limit) as directory:
        return in_fresh_process(
            measure_in_group,
            model=str(model),
            budget=budget,
            size=1,
            runs=runs,
            way=way,
            environment={"ORT_DELAYED_MEMORY_GROUP": directory},
        )


GROUPS: dict[str, Callable[[Bench], None]] = {"budgets": budgets, "construct": construct, "group": group}


def main() -> int:
    """Measure the groups that are asked for and print the tables; 1 where a promise is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="groups of figures")
    parser.add_argument("--rounds", type=int, default=7, help="processes per row (default 7)")
    parser.add_argument("--runs", type=int, default=7, help="timed runs per process (default 7)")
    parser.add_argument("--percents", nargs="+", type=int, default=(25, 50, 110), help="budgets (default 25 50 110)")
    parser.add_argument("--directory", type=Path, default=model_makers.CACHE, help="where models are kept (5 GB)")
    parser.add_argument("--results", type=Path, help="a JSON file for the rows, which frontier.py draws")
    parser.add_argument("--keep", action="store_true", help="take the packed model of an earlier invocation")
    parser.add_argument("--small", action="store_true", help="a tiny model: shows that the script works, no more")
    given = parser.parse_args()
    small = model_makers.DecoderSize(2, 64, 2, 128, 30000, 512)
    source = model_makers.decoder(small if given.small else None, directory=given.directory)
    packed = given.directory / f"{source.stem}-packed.onnx"
    if not (given.keep and packed.exists()):
        prepared(source, packed)
    bench = Bench(source, packed, given.rounds, given.runs, given.percents)
    for name in given.only:
        GROUPS[name](bench)
        if given.results:
            write_results(given.results, bench.rows, bench.figures, rounds=given.rounds, runs=given.runs)
    bench.figures.append(Figure("sessions refused, budget not kept", bench.refused, 0, "{:.0f}"))
    print(format_table(["figure", "measured", "promised", ""], [f.cells() for f in bench.figures]))
    print(f"\nonnxruntime {onnxruntime.__version__}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}.")
    print(f"{given.rounds} fresh processes a row, in turn; peak, worst of them: {peak_method()}.")
    return 0 if all(f.met for f in bench.figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
