"""Installing weights into a session under a RAM budget, measured side by side with plain ONNX Runtime's own loading.

    python benchmarks/stream_install.py [--layers 64] [--side 2048] [--rounds 3] [--directory DIR]

Each row runs in a fresh process, without a session before it: what the library's own text takes counts. The budget is
set to just what is promised: the weights, one layer group and 16 MiB. README.md says how the numbers are meant.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from functools import partial

import generated_models
import numpy as np
import onnxruntime
from measure import MIB, Result, in_fresh_process, interleaved, median_seconds, peak_method, read_through
from tables import format_table

SLACK_BYTES = 16 * MIB


def measure_load(way: str, model: str, side: int, budget: int, output: str) -> Result:
    """Make a session one way, then run it; the peak is that of making it, above what was resident before."""
    # The peak window and not a mark of our own: stream_install resets the process's mark, and folds it into windows.
    from ort_delayed.loader.resident_memory import PeakWindow, current_rss_bytes

    if way == "install":
        import ort_delayed
    baseline = current_rss_bytes() or 0
    window = PeakWindow()
    options = onnxruntime.SessionOptions()
    start = time.perf_counter()
    if way == "install":
        installed = ort_delayed.stream_install(model, options, ram_budget=budget)
        copied = time.perf_counter() - start
        session = installed.create_session()
    else:
        copied = 0.0
        if way == "unpacked":
            options.add_session_config_entry("session.disable_prepacking", "1")
        session = onnxruntime.InferenceSession(model, options)
    seconds = time.perf_counter() - start
    peak = (window.read() or 0) - baseline
    feeds = {"x": np.random.default_rng(1).standard_normal((1, side), np.float32)}
    run = median_seconds(lambda: session.run(None, feeds), runs=15)
    np.save(output, session.run(None, feeds)[0])
    return {"install": copied, "construct": seconds, "run": run, "peak": peak}


ROWS = {"plain": "plain", "plain, not prepacked": "unpacked", "stream_install": "install"}


def main() -> int:
    """Measure, print the tables; 1 where a promise is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=64, help="MatMul weights, one per layer group (default 64)")
    parser.add_argument("--side", type=int, default=2048, help="rows and columns of each (default 2048: 16 MiB)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each row is measured (default 3)")
    parser.add_argument("--directory", help="where the model is written (default: a temporary directory)")
    arguments = parser.parse_args()
    group = arguments.side**2 * 4
    weights = arguments.layers * group
    budget = weights + group + SLACK_BYTES
    with tempfile.TemporaryDirectory(prefix="ort-delayed-bench-", dir=arguments.directory) as directory:
        data = os.path.join(directory, "weights.bin")
        generated_models.write_weights(data, arguments.layers, arguments.side)
        read_through(data)
        model = generated_models.chain_models(directory, data, arguments.layers, arguments.side)["plain"]
        outputs = {name: os.path.join(directory, f"{way}.npy") for name, way in ROWS.items()}
        measured = interleaved(
            {
                name: partial(
                    in_fresh_process,
                    measure_load,
                    way=way,
                    model=model,
                    side=arguments.side,
                    budget=budget,
                    output=outputs[name],
                )
                for name, way in ROWS.items()
            },
            rounds=arguments.rounds,
        )
        unpacked, installed = (np.load(outputs[name]) for name in ("plain, not prepacked", "stream_install"))
    print_measured(f"{arguments.layers} weights of {group / MIB:.3g} MiB", measured)
    return print_figures(measured, budget, identical=unpacked.tobytes() == installed.tobytes(), rounds=arguments.rounds)


def print_measured(title: str, measured: dict[str, Result]) -> None:
    """The table of what was measured."""
    cells = [
        [name, f"{r['install']:.3f}", f"{r['construct']:.3f}", f"{r['run']:.4f}", f"{r['peak'] / MIB:.1f}"]
        for name, r in measured.items()
    ]
    print(f"{format_table([title, 'copied', 'made, s', 'run, s', 'peak, MiB'], cells)}\n")


def print_figures(measured: dict[str, Result], budget: int, *, identical: bool, rounds: int) -> int:
    """The table of promises; 1 where one is missed."""
    installed, plain = measured["stream_install"], measured["plain"]
    ratio = installed["construct"] / plain["construct"]
    figures = [
        ("peak, MiB above the baseline", f"{installed['peak'] / MIB:.1f}", f"<= {budget / MIB:.1f}"),
        ("time to install and build over plain's load", f"{ratio:.2f}", "<= 1.00"),
        ("outputs equal plain's without prepacking", "yes" if identical else "NO", "bit by bit"),
    ]
    met = [installed["peak"] <= budget, ratio <= 1, identical]
    rows = [[*cells, "met" if is_met else "MISSED"] for cells, is_met in zip(figures, met, strict=True)]
    print(format_table(["figure", "measured", "promised", ""], rows))
    print(f"\nonnxruntime {onnxruntime.__version__}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}.")
    print(f"Fresh processes, {rounds} rounds in turn, page cache warm; peak: {peak_method()}.")
    return 0 if all(met) else 1


if __name__ == "__main__":
    raise SystemExit(main())
