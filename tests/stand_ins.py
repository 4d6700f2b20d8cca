"""A small encoder and its checkpoint, as files that examples, snippets and the command line are tried on.

model.onnx, model.onnx.data     the encoder, its weights in external data; inputs input_ids and attention_mask
inline.onnx                     the same with its weights inline
artifacts/                      the same weights as a checkpoint of two shards and an index
checkpoint/                     the same in one .safetensors file
feeds.npz                       inputs
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from checkpoints import save_index, save_safetensors
from onnx import TensorProto, helper, numpy_helper

__all__ = ["LAYERS", "encoder", "encoder_weights", "feeds", "write_stand_ins"]

WIDTH, LAYERS, VOCABULARY = 256, 3, 1000
Array = npt.NDArray[np.generic]


def encoder_weights() -> dict[str, Array]:
    """About 2.8 MiB: an embedding, three layers of matrix, bias and norm, a head."""
    rng = np.random.default_rng(11)

    def f32(*shape: int) -> Array:
        return (rng.standard_normal(shape) / 16).astype(np.float32)

    weights = {"embeddings.word_embeddings.weight": f32(VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        weights[f"encoder.layer.{i}.dense.weight"] = f32(WIDTH, WIDTH)
        weights[f"encoder.layer.{i}.dense.bias"] = f32(WIDTH)
        weights[f"encoder.layer.{i}.norm.weight"] = f32(WIDTH)
        weights[f"encoder.layer.{i}.norm.bias"] = f32(WIDTH)
    weights["classifier.weight"] = f32(WIDTH, 5)
    return weights


def encoder() -> onnx.ModelProto:
    """The encoder with its weights inline."""
    node = helper.make_node
    nodes = [node("Gather", ["embeddings.word_embeddings.weight", "input_ids"], ["h0"])]
    for i in range(LAYERS):
        own = f"encoder.layer.{i}"
        nodes += [
            node("MatMul", [f"h{i}", f"{own}.dense.weight"], [f"m{i}"]),
            node("Add", [f"m{i}", f"{own}.dense.bias"], [f"a{i}"]),
            node("LayerNormalization", [f"a{i}", f"{own}.norm.weight", f"{own}.norm.bias"], [f"n{i}"], axis=-1),
            node("Tanh", [f"n{i}"], [f"h{i + 1}"]),
        ]
    nodes += [
        node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["mask", "axes"], ["wide_mask"]),
        node("MatMul", [f"h{LAYERS}", "classifier.weight"], ["scores"]),
        node("Mul", ["scores", "wide_mask"], ["logits"]),
    ]
    axes = ["batch", "sequence"]
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, axes) for n in ("input_ids", "attention_mask")]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [*axes, 5])]
    initializers = [numpy_helper.from_array(w, name) for name, w in encoder_weights().items()]
    initializers.append(numpy_helper.from_array(np.array([-1]), "axes"))
    graph = helper.make_graph(nodes, "encoder", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def feeds(batch: int = 1, sequence: int = 8) -> dict[str, Array]:
    """Inputs of the encoder."""
    ids = np.random.default_rng(5).integers(0, VOCABULARY, (batch, sequence))
    return {"input_ids": ids, "attention_mask": np.ones((batch, sequence), np.int64)}


def write_stand_ins(directory: Path) -> Path:
    """Write all of them; returns the directory."""
    model = encoder()
    onnx.save(model, directory / "inline.onnx")
    onnx.save_model(model, directory / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    weights = encoder_weights()
    names = list(weights)
    (directory / "artifacts").mkdir()
    halves = {
        "model-00001-of-00002.safetensors": {n: weights[n] for n in names[:6]},
        "model-00002-of-00002.safetensors": {n: weights[n] for n in names[6:]},
    }
    save_index(directory / "artifacts" / "model.safetensors.index.json", halves)
    save_safetensors(directory / "checkpoint" / "model.safetensors", weights)
    np.savez(directory / "feeds.npz", **feeds())
    return directory
