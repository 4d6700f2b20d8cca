"""Makes the larger models that budgets are measured on, in a cache directory that git ignores.

    chain(count, side, biases)   Add of a bias (or not), MatMul, Tanh, again and again
    decoder(...)                 a decoder-only transformer as exporters write it, with random weights
    external_copy(model)         any model with its inline weights moved to one external file

Each function returns the path of the model, and makes it only if it is not there yet. The values are the same on
every machine with the same numpy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["CACHE", "DecoderSize", "chain", "decoder", "external_copy", "external_files"]

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "benchmark-models"
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
_PAGE = 4096
_EXTERNAL_BYTES = 1024


def chain(count: int = 64, side: int = 2048, *, biases: bool = True, directory: Path = CACHE) -> Path:
    """``count`` times Add of a ``side``-wide bias (inline), MatMul with a square external weight, Tanh.

    Input ``x`` of shape (batch, side), output ``y``. Without biases the graph has no small weights at all.
    """
    name = f"chain-{count}x{side}" + ("" if biases else "-no-biases")
    with _made(directory, name) as (path, new):
        if new:
            graph = _Graph(path)
            bound = np.float32(np.sqrt(3 / side))
            value = "x"
            for i in range(count):
                if biases:
                    bias = graph.inline(graph.random(side) * np.float32(0.01), f"bias_{i}")
                    value = graph.add("Add", value, bias)
                weight = graph.external((graph.uniform(side, side)) * bound, f"weight_{i}")
                value = graph.add("MatMul", value, weight)
                value = graph.add("Tanh", value, output="y" if i == count - 1 else None)
            graph.save([_value("x", ["batch", side])], [_value("y", ["batch", side])])
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
    with _made(directory, name) as (path, new):
        if new:
            _write_decoder(_Graph(path), size)
    return path


def external_copy(model: Path, *, directory: Path = CACHE) -> Path:
    """A copy of a model whose inline initializers of 1 KiB and more stand in one external file, page-aligned."""
    with _made(directory, model.stem + "-external") as (path, new):
        if new:
            proto = onnx.load(os.fspath(model))
            with open(path.with_suffix(".bin"), "wb") as data:
                for tensor in proto.graph.initializer:
                    values = numpy_helper.to_array(tensor)
                    if values.nbytes >= _EXTERNAL_BYTES:
                        tensor.CopyFrom(_write_external(data, values, tensor.name))
            path.write_bytes(proto.SerializeToString())
    return path


def external_files(model: Path) -> list[Path]:
    """The files that hold a model's external data."""
    proto = onnx.load(os.fspath(model), load_external_data=False)
    names = {e.value for t in proto.graph.initializer for e in t.external_data if e.key == "location"}
    return sorted(model.parent / name for name in names)


# --- Writing a graph --------------------------------------------------------------------------------------------------


@contextmanager
def _made(directory: Path, name: str) -> Iterator[tuple[Path, bool]]:
    """The model's path, and whether it has still to be made; a model that was not finished is made again."""
    directory.mkdir(parents=True, exist_ok=True)
    path, finished = directory / f"{name}.onnx", directory / f"{name}.finished"
    new = not finished.exists()
    yield path, new
    if new:
        finished.touch()


def _value(name: str, shape: Sequence[int | str], kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _write_external(data: object, values: np.ndarray, name: str) -> TensorProto:
    data.write(b"\0" * (-data.tell() % _PAGE))
    tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(values.dtype), dims=values.shape)
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": Path(data.name).name, "offset": str(data.tell()), "length": str(values.nbytes)}
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    values.tofile(data)
    return tensor


@dataclass
class _Graph:
    """A graph that is being written; weights go to the file beside the model as they come."""

    path: Path
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[TensorProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._data = open(self.path.with_suffix(".bin"), "wb")  # noqa: SIM115  (closed by `save`)

    def random(self, *shape: int) -> np.ndarray:
        return self._random.standard_normal(shape, np.float32)

    def uniform(self, *shape: int) -> np.ndarray:
        return self._random.random(shape, np.float32) * 2 - 1

    def inline(self, values: np.ndarray, name: str) -> str:
        self.initializers.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def external(self, values: np.ndarray, name: str) -> str:
        self.initializers.append(_write_external(self._data, values, name))
        return name

    def constant(self, values: object, kind: type = np.int64) -> str:
        return self.inline(np.array(values, kind), f"constant_{len(self.initializers)}")

    def add(self, op_type: str, *inputs: str, output: str | None = None, **attributes: object) -> str:
        name = f"{op_type}_{len(self.nodes)}"
        output = output or f"{name}_output"
        self.nodes.append(helper.make_node(op_type, inputs, [output], name, **attributes))
        return output

    def save(self, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]) -> None:
        self._data.close()
        graph = helper.make_graph(self.nodes, self.path.stem, inputs, outputs, self.initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        self.path.write_bytes(model.SerializeToString())


def _write_decoder(graph: _Graph, size: DecoderSize) -> None:
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
        [_value("ids", ["batch", "sequence"], INT64)],
        [_value("logits", ["batch", "sequence", size.vocabulary])],
    )
