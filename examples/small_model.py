"""A model for examples that are started without one: sixteen layers of 4 MiB, weights in external data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["LAYERS", "SIDE", "make_model"]

LAYERS, SIDE = 16, 1024


def make_model(directory: str | Path) -> str:
    """Write the model and ``weights.bin`` beside it; returns the model's path."""
    rng = np.random.default_rng(0)
    nodes, initializers = [], []
    for i in range(LAYERS):
        weight = rng.standard_normal((SIDE, SIDE), np.float32) / np.float32(SIDE**0.5)
        bias = rng.standard_normal(SIDE, np.float32)
        initializers += [
            numpy_helper.from_array(weight, f"layers.{i}.weight"),
            numpy_helper.from_array(bias, f"layers.{i}.bias"),
        ]
        nodes += [
            helper.make_node("MatMul", [f"h{i}", f"layers.{i}.weight"], [f"m{i}"]),
            helper.make_node("Add", [f"m{i}", f"layers.{i}.bias"], [f"a{i}"]),
            helper.make_node("Tanh", [f"a{i}"], [f"h{i + 1}"]),
        ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", SIDE]) for n in ("h0", f"h{LAYERS}"))
    graph = helper.make_graph(nodes, "small", [x], [y], initializers)
    path = str(Path(directory, "model.onnx"))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save_model(model, path, save_as_external_data=True, location="weights.bin")
    return path
