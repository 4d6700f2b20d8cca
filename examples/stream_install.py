"""Install a model's weights into a session within a RAM budget, and print what that took.

    python examples/stream_install.py MODEL.onnx BUDGET [WEIGHTS]

MODEL has its weights in external data; BUDGET is an amount such as 1100MiB; WEIGHTS is a .safetensors file, an index or
a directory from which the weights are taken by name instead. Without arguments a small model is made and installed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

import ort_delayed
from ort_delayed.loader import LoadProgress

MIB = 1 << 20


def install(model: str, budget: ort_delayed.RamBudget, weights: str | None = None) -> ort_delayed.InferenceSession:
    """Install, make a session, and print the report."""
    options = onnxruntime.SessionOptions()
    installed = ort_delayed.stream_install(model, options, ram_budget=budget, weights=weights, progress=show)
    session = installed.create_session()
    report = installed.report
    peak = report.peak_ram_with_session or report.peak_ram
    print(f"{report.tensors_loaded} weights of {report.bytes_copied / MIB:.1f} MiB in {report.groups_loaded} groups")
    print(f"peak {peak.peak_incremental_bytes / MIB:.1f} MiB of {budget.max_bytes / MIB:.1f} MiB ({peak.peak_source})")
    return session


def show(progress: LoadProgress) -> None:
    """One line per layer group."""
    resident = progress.current_rss_bytes / MIB
    print(f"  {progress.groups_done}/{progress.groups_total} {progress.group.name}, {resident:.0f} MiB resident")


def make_model(directory: Path, layers: int = 8, side: int = 1024) -> str:
    """A chain of MatMuls with its weights in external data."""
    names = [f"layers.{i}.weight" for i in range(layers)]
    values = ["x", *(f"h{i}" for i in range(1, layers)), "y"]
    nodes = [helper.make_node("MatMul", [values[i], name], [values[i + 1]]) for i, name in enumerate(names)]
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((side, side), np.float32) / np.float32(side**0.5) for _ in names]
    initializers = [onnx.numpy_helper.from_array(w, name) for w, name in zip(weights, names, strict=True)]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", side]) for n in "xy")
    graph = helper.make_graph(nodes, "chain", [x], [y], initializers)
    path = str(directory / "model.onnx")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save_model(model, path, save_as_external_data=True, location="weights.bin")
    return path


def main() -> None:
    """The model that the command line names, or a small one."""
    if len(sys.argv) > 2:
        install(sys.argv[1], ort_delayed.RamBudget.parse(sys.argv[2]), *sys.argv[3:4])
        return
    with tempfile.TemporaryDirectory() as directory:
        session = install(make_model(Path(directory)), ort_delayed.RamBudget.from_mib(64))
        y = session.run(None, {"x": np.ones((1, 1024), np.float32)})[0]
    print(f"the session runs without the files: output of shape {list(y.shape)}, mean {y.mean():.4f}")


if __name__ == "__main__":
    main()
