"""Give a running session new weights between two runs: write them to another file, and rename it over the old one.

python examples/swap_weights.py
"""

from __future__ import annotations

import os
import tempfile

import numpy as np
from small_model import SIDE, make_model

import ort_delayed


def main() -> None:
    """Run, swap, run again with the same session."""
    with tempfile.TemporaryDirectory() as directory:
        make_model(directory)
        ort_delayed.convert_model(f"{directory}/model.onnx", f"{directory}/delayed.onnx", load_device="file")
        session = ort_delayed.InferenceSession(f"{directory}/delayed.onnx")
        feeds = {"h0": np.ones((1, SIDE), np.float32)}
        print(f"before: {session.run(None, feeds)[0].mean():+.4f}")

        # A rename replaces the file at once: a run that is reading goes on with the old one, the next reads the new.
        weights = np.fromfile(f"{directory}/weights.bin", np.float32)
        (weights * 0.5).tofile(f"{directory}/weights.bin.new")
        os.replace(f"{directory}/weights.bin.new", f"{directory}/weights.bin")
        print(f"after:  {session.run(None, feeds)[0].mean():+.4f}")


if __name__ == "__main__":
    main()
