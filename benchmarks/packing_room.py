"""The least budget at which sessions on a packed model can be made, time after time, for weights of several sizes.

Each budget is tried in a fresh process, which makes a session, runs it and drops it, ten times. Prints a table:
how many of the ten kept to the budget, and the highest peak among those.

    python benchmarks/packing_room.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ort_delayed import pack_model

# The width of square float32 weights, how many there are, and budgets in MiB.
_CASES = (
    (1024, 12, (12, 14, 16, 18, 20, 24)),
    (2048, 8, (32, 40, 48, 56, 64)),
    (4096, 4, (96, 112, 128, 144, 160, 176)),
)
_ATTEMPTS = 10
_SAMPLE = """
import sys
import numpy as np, ort_delayed
feeds = {"x": np.ones((1, int(sys.argv[3])), np.float32)}
ort_delayed.InferenceSession(sys.argv[1]).run(None, feeds)
kept, peaks = 0, [0]
for _ in range(int(sys.argv[4])):
    session = None
    try:
        session = ort_delayed.InferenceSession(sys.argv[1], ram_budget=int(sys.argv[2]) << 20)
        session.run(None, feeds)
    except ort_delayed.RamBudgetExceeded:
        continue
    kept += 1
    peaks.append(session.memory_report.peak_bytes)
print(kept, max(peaks) >> 20)
"""


def make_packed(directory: Path, width: int, count: int) -> Path:
    """A chain of products, each behind a scale that ticks, packed; returns the packed model's path."""
    random = np.random.default_rng(0)
    nodes, weights, value = [], [], "x"
    for i in range(count):
        weight = random.standard_normal((width, width), dtype=np.float32) / np.float32(width**0.5)
        weights += [numpy_helper.from_array(weight, f"w{i}")]
        weights += [numpy_helper.from_array(np.ones(width, np.float32), f"scale{i}")]
        nodes += [helper.make_node("Mul", [value, f"scale{i}"], [f"s{i}"])]
        value = "y" if i == count - 1 else f"h{i}"
        nodes += [helper.make_node("MatMul", [f"s{i}", f"w{i}"], [value])]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", width])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, directory / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=1024)
    pack_model(directory / "model.onnx", directory / "packed.onnx")
    return directory / "packed.onnx"


def main() -> None:
    """Measure and print."""
    print("| weights | budget | kept | highest peak |")
    print("|---|---|---|---|")
    for width, count, budgets in _CASES:
        with tempfile.TemporaryDirectory() as directory:
            packed = make_packed(Path(directory), width, count)
            for budget in budgets:
                command = [sys.executable, "-c", _SAMPLE, str(packed), str(budget), str(width), str(_ATTEMPTS)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                kept, peak = done.stdout.split()
                print(
                    f"| {count} x {width * width * 4 >> 20} MiB | {budget} MiB | {kept} of {_ATTEMPTS} | {peak} MiB |"
                )


if __name__ == "__main__":
    main()
