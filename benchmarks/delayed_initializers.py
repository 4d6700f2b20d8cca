"""What delayed initializers cost, measured side by side with plain ONNX Runtime, against what the project promises.

    python benchmarks/delayed_initializers.py [--only chain stock nodes inline] [--rounds 3] [--directory DIR]

Each row runs in a fresh process; ratios are taken within one invocation. README.md says how the numbers are meant.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

import generated_models
import numpy as np
import onnxruntime
from measure import MIB, Result, in_fresh_process, interleaved, peak_method, read_through
from session_rows import measure_delivery, measure_session
from tables import format_table


@dataclass(frozen=True)
class Figure:
    """One promise: what was measured, and the bound that it is held against."""

    what: str
    measured: float
    bound: float
    form: str = "{:.2f}"
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the promise holds."""
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def cells(self) -> list[str]:
        """The figure as a row of the table."""
        bound = (">= " if self.at_least else "<= ") + self.form.format(self.bound)
        return [self.what, self.form.format(self.measured), bound, "met" if self.met else "MISSED"]


@dataclass(frozen=True)
class Sizes:
    """How large the measured models are. The promises are about these; ``SMALL`` only shows that the script works."""

    side: int = 2048
    chain: int = 64
    batch: int = 128
    delivered: int = 4
    nodes: tuple[int, ...] = (500, 1000, 2000)
    inline: int = 75
    inline_side: int = 1024


SMALL = Sizes(side=64, chain=4, batch=2, delivered=2, nodes=(5, 10, 20), inline=2, inline_side=64)


@dataclass(frozen=True)
class Row:
    """Arguments of :func:`measure_session` that differ from row to row."""

    opener: str
    model: str
    batch: int
    side: int
    runs: int


@dataclass(frozen=True)
class Bench:
    """What every group of figures needs: where files go, how large the models are, how often a row is measured."""

    directory: str
    sizes: Sizes
    rounds: int

    def path(self, name: str) -> str:
        """A file in the scratch directory."""
        return os.path.join(self.directory, name)

    def measure(self, title: str, rows: Mapping[str, Row]) -> dict[str, Result]:
        """Measure the rows in turn, check that all with one batch agree in their outputs, print and return them."""
        throw_away = self._throw_away_models()
        outputs = {name: self.path(f"output-{i}.npy") for i, name in enumerate(rows)}
        found = interleaved(
            {
                name: partial(
                    in_fresh_process,
                    measure_session,
                    throw_away=throw_away["delayed" if row.opener == "delayed" else "plain"],
                    output=outputs[name],
                    **asdict(row),
                )
                for name, row in rows.items()
            },
            rounds=self.rounds,
        )
        for name, row in rows.items():
            first = next(n for n, r in rows.items() if r.batch == row.batch)
            check_alike(outputs[first], outputs[name])
        cells = [
            [name, f"{r['construct']:.3f}", f"{r['seconds']:.4f}", f"{r['rss_constructed'] / MIB:.1f}"]
            + [f"{r['peak'] / MIB:.1f}"]
            for name, r in found.items()
        ]
        headers = [title, "construct\ns", "run\ns", "constructed\nMiB", "peak\nMiB"]
        print(f"{format_table(headers, cells)}\n", flush=True)
        return found

    def _throw_away_models(self) -> dict[str, str]:
        directory = self.path("throw_away")
        os.makedirs(directory, exist_ok=True)
        weights = os.path.join(directory, "weights.bin")
        generated_models.write_weights(weights, 2, 32)
        return generated_models.chain_models(directory, weights, 2, 32)


def check_alike(expected: str, found: str) -> None:
    """Stop where two saved outputs disagree: the time of a wrong result is not worth printing."""
    np.testing.assert_allclose(np.load(found), np.load(expected), rtol=1e-3, atol=1e-4)


def chain(bench: Bench) -> list[Figure]:
    """A chain of MatMuls whose weights are read from the file at every run, page cache warm."""
    count, side, batch = bench.sizes.chain, bench.sizes.side, bench.sizes.batch
    weights = bench.path("chain.bin")
    generated_models.write_weights(weights, count, side)
    read_through(weights)
    models = generated_models.chain_models(bench.directory, weights, count, side)
    plain, delayed = models["plain"], models["delayed"]
    mib = side * side * 4 / MIB
    found = bench.measure(
        f"{count} MatMuls of {mib:.3g} MiB",
        {
            "batch 1, plain": Row("plain", plain, 1, side, 15),
            "batch 1, file mode": Row("delayed", delayed, 1, side, 15),
            f"batch {batch}, plain": Row("plain", plain, batch, side, 5),
            f"batch {batch}, not prepacked": Row("unpacked", plain, batch, side, 5),
            f"batch {batch}, file mode": Row("delayed", delayed, batch, side, 5),
        },
    )
    plain_1, delayed_1, _, unpacked, delayed_n = found.values()
    return [
        Figure(f"{count} MatMuls, batch 1: peak, MiB", delayed_1["peak"] / MIB, 3 * mib + 16, "{:.1f}"),
        Figure("  time over plain", delayed_1["seconds"] / plain_1["seconds"], 6),
        Figure(f"  batch {batch}: time over not prepacked", delayed_n["seconds"] / unpacked["seconds"], 1.6),
    ]


def stock(bench: Bench) -> list[Figure]:
    """Delivering weights, against a custom op of onnxruntime-extensions that returns its array."""
    count, side = bench.sizes.delivered, bench.sizes.side
    weights = bench.path("delivery.bin")
    generated_models.write_weights(weights, count, side)
    read_through(weights)
    models = generated_models.delivery_models(bench.directory, weights, count, side)
    outputs = {opener: bench.path(f"delivery-{opener}.npy") for opener in models}
    found = interleaved(
        {
            opener: partial(
                in_fresh_process,
                measure_delivery,
                opener=opener,
                model=model,
                weights=weights,
                count=count,
                side=side,
                runs=3 if opener == "stock" else 15,
                output=outputs[opener],
            )
            for opener, model in models.items()
        },
        rounds=bench.rounds,
    )
    check_alike(outputs["stock"], outputs["delayed"])
    nbytes = count * side * side * 4
    cells = [[name, f"{r['seconds']:.4f}", f"{r['seconds'] / nbytes * 1e9:.3f}"] for name, r in found.items()]
    headers = [f"{nbytes / MIB:.3g} MiB delivered", "run\ns", "a byte\nns"]
    print(f"{format_table(headers, cells)}\n", flush=True)
    ratio = found["stock"]["seconds"] / found["delayed"]["seconds"]
    return [Figure("a stock custom op's time per byte over ours", ratio, 100, "{:.0f}", at_least=True)]


def nodes(bench: Bench) -> list[Figure]:
    """Many small delayed nodes: what one costs when the session is constructed, and at each run."""
    rows: dict[str, Row] = {}
    for count in bench.sizes.nodes:
        for mode in ("file", "cpu"):
            models = generated_models.small_node_models(bench.directory, bench.path(f"nodes_{count}.bin"), count, mode)
            rows[f"{count}, {mode} mode"] = Row("delayed", models["delayed"], 0, 16, 15)
        rows[f"{count}, plain"] = Row("plain", models["plain"], 0, 16, 15)
    found: dict[str, Result] = {}
    for count in bench.sizes.nodes:
        found |= bench.measure("Adds of 16 floats", {n: r for n, r in rows.items() if n.startswith(f"{count},")})
    few, most = bench.sizes.nodes[0], bench.sizes.nodes[-1]
    figures = []
    for mode in ("file", "cpu"):
        small, large = found[f"{few}, {mode} mode"], found[f"{most}, {mode} mode"]
        figures += [
            Figure(f"{most} nodes, {mode} mode: construction, s", large["construct"], 2),
            # Linear is most/few at most; a quarter more is left to noise. Quadratic would be (most/few) squared.
            Figure(f"  over that of {few} nodes", large["construct"] / small["construct"], 1.25 * most / few),
            # The whole run with its Adds: nothing is subtracted.
            Figure("  us per node and run", large["seconds"] / most * 1e6, 25, "{:.1f}"),
        ]
    return figures


def inline(bench: Bench) -> list[Figure]:
    """Inline weights beside one delayed node: preparing must not keep further copies of the model."""
    count, side = bench.sizes.inline, bench.sizes.inline_side
    models = generated_models.inline_models(bench.directory, bench.path("inline.bin"), count, side)
    mib = count * side * side * 4 / MIB
    rows = {"plain": Row("plain", models["plain"], 1, side, 5)}
    rows["one node delayed"] = Row("delayed", models["delayed"], 1, side, 5)
    plain, delayed = bench.measure(f"{mib:.3g} MiB inline", rows).values()
    rss, peak = ((delayed[key] - plain[key]) / MIB for key in ("rss_constructed", "peak_constructing"))
    return [
        Figure(f"{mib:.3g} MiB inline: constructed, MiB above plain", rss, 16, "{:.1f}"),
        Figure("  peak of constructing, MiB above plain", peak, 2 * mib, "{:.1f}"),
    ]


GROUPS: dict[str, Callable[[Bench], list[Figure]]] = {"chain": chain, "stock": stock, "nodes": nodes, "inline": inline}


def main() -> int:
    """Measure the groups that are asked for and print the table; 1 where a promise is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="groups of figures")
    parser.add_argument("--rounds", type=int, default=3, help="how often each row is measured (default 3)")
    parser.add_argument("--directory", help="where models are written, up to 2 GB (default: a temporary directory)")
    parser.add_argument("--small", action="store_true", help="tiny models: shows that the script works, no more")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ort-delayed-bench-", dir=arguments.directory) as directory:
        bench = Bench(directory, SMALL if arguments.small else Sizes(), arguments.rounds)
        figures = [figure for group in arguments.only for figure in GROUPS[group](bench)]
    print(format_table(["figure", "measured", "promised", ""], [f.cells() for f in figures]))
    print(f"\nonnxruntime {onnxruntime.__version__}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}.")
    print(f"Fresh processes, {arguments.rounds} rounds in turn; peak: {peak_method()}.")
    return 0 if all(f.met for f in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
