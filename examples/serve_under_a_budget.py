"""Answer requests from several threads with one session that keeps to a RAM budget.

    python examples/serve_under_a_budget.py [MODEL.onnx BUDGET]

The example's weights take 64 MiB: with its budget of 96 MiB all of them stay in memory. Linux only: elsewhere no
session can be held to a budget.
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from small_model import SIDE, make_model

import ort_delayed

MIB = 1 << 20
THREADS = 4


def serve(model: str, budget: ort_delayed.RamBudget, requests: int = 40) -> None:
    """Open the session once, then run it from four threads."""
    session = ort_delayed.InferenceSession(model, ram_budget=budget)

    def answer(number: int) -> float:
        feeds = {"h0": np.full((1, SIDE), number / requests, np.float32)}
        return float(session.run(None, feeds)[0].mean())

    with ThreadPoolExecutor(THREADS) as threads:
        answers = list(threads.map(answer, range(requests)))
    report = session.memory_report
    assert report is not None
    print(f"{len(answers)} requests answered, mean {np.mean(answers):+.4f}")
    print(f"peak {report.peak_bytes / MIB:.1f} MiB above the baseline, budget {report.budget_bytes / MIB:.1f} MiB")


def main() -> None:
    """The model that the command line names, or a small one."""
    if len(sys.argv) > 2:
        serve(sys.argv[1], ort_delayed.RamBudget.parse(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as directory:
        serve(make_model(directory), ort_delayed.RamBudget.from_mib(96))


if __name__ == "__main__":
    main()
