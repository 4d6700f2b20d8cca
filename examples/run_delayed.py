"""Delay the weights of a model and run it: the outputs are the same, the weights are read at every run.

python examples/run_delayed.py
"""

from __future__ import annotations

import tempfile

import numpy as np
import onnxruntime
from small_model import SIDE, make_model

import ort_delayed


def main() -> None:
    """Convert, run both ways, compare."""
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(directory)
        report = ort_delayed.convert_model(model, f"{directory}/delayed.onnx")
        print(f"{report.count('referenced')} weights are read from {report.tensors[0].path} now")

        session = ort_delayed.InferenceSession(f"{directory}/delayed.onnx")
        feeds = {"h0": np.ones((1, SIDE), np.float32)}
        (delayed,) = session.run(None, feeds)
        (plain,) = onnxruntime.InferenceSession(model).run(None, feeds)
        print(f"largest difference to plain onnxruntime: {np.abs(delayed - plain).max():.1e}")


if __name__ == "__main__":
    main()
