"""Models with external data for tests of installing: small, of many layers, and the token classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from checkpoints import external_initializer
from onnx import TensorProto, helper

__all__ = [
    "chain",
    "chain_weights",
    "classifier_graph",
    "feed",
    "graph_model",
    "node",
    "run",
    "save_external",
    "unpacked_options",
]
__all__ += ["value"]

node = helper.make_node


def value(name: str, shape: Sequence[Any] | None, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def chain_weights(layers: int = 4, side: int = 16, *, seed: int = 0) -> dict[str, np.ndarray]:
    """``encoder.layer.N.weight``, square float32 matrices."""
    rng = np.random.default_rng(seed)
    return {f"encoder.layer.{i}.weight": rng.standard_normal((side, side)).astype(np.float32) for i in range(layers)}


def chain(weights: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """``y = x @ w0 @ w1 ...``; its initializers are external and have no place yet, see :func:`save_external`."""
    names = list(weights)
    nodes = [
        node("MatMul", [f"h{i}" if i else "x", name], [f"h{i + 1}" if i + 1 < len(names) else "y"])
        for i, name in enumerate(names)
    ]
    side = next(iter(weights.values())).shape[0]
    return graph_model(nodes, [value("x", ["n", side])], [value("y", None)])


def graph_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
    *,
    opset: int = 21,
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.rt", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def save_external(
    path: Path, model: onnx.ModelProto, weights: Mapping[str, np.ndarray], *, location: str = "weights.bin"
) -> str:
    """Write the model with ``weights`` as external initializers of its main graph; returns its path."""
    data = bytearray()
    for name, array in weights.items():
        model.graph.initializer.append(external_initializer(name, array, location, len(data)))
        data += array.tobytes()
    (path.parent / location).parent.mkdir(parents=True, exist_ok=True)
    (path.parent / location).write_bytes(data)
    path.write_bytes(model.SerializeToString())
    return str(path)


def classifier_graph(weights: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """The token classifier of :func:`checkpoints.decode_spans`, from ``tokens`` to ``tags``."""
    nodes = [node("Gather", ["embeddings.word_embeddings.weight", "tokens"], ["h0"])]
    layers = sum(name.endswith("dense.weight") for name in weights)
    for i in range(layers):
        layer = f"encoder.layer.{i}.dense"
        nodes += [
            node("MatMul", [f"h{i}", f"{layer}.weight"], [f"p{i}"]),
            node("Add", [f"p{i}", f"{layer}.bias"], [f"s{i}"]),
            node("Tanh", [f"s{i}"], [f"h{i + 1}"]),
        ]
    nodes += [
        node("Mul", [f"h{layers}", "norm.weight"], ["normed"]),
        node("MatMul", ["normed", "classifier.weight"], ["product"]),
        node("Add", ["product", "classifier.bias"], ["logits"]),
        node("ArgMax", ["logits"], ["tags"], axis=-1, keepdims=0),
    ]
    tokens = value("tokens", ["n"], TensorProto.INT64)
    return graph_model(nodes, [tokens], [value("tags", ["n"], TensorProto.INT64)])


def unpacked_options() -> onnxruntime.SessionOptions:
    """Options for a plain session to compare with: prepacking changes the last bits."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def feed(side: int = 16, rows: int = 3) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(5).standard_normal((rows, side)).astype(np.float32)}


def run(model: str | bytes, options: onnxruntime.SessionOptions | None = None, feeds: Any = None) -> np.ndarray:
    """The first output of a plain session."""
    options = unpacked_options() if options is None else options
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"], enable_fallback=0)
    result: np.ndarray = session.run(None, feed() if feeds is None else feeds)[0]
    return result
