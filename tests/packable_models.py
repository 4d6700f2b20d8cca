"""Small models, each with something that packing has to deal with; weights are as large as it takes to be packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ort_delayed.ops import make_node

__all__ = ["PACKABLE", "Packable", "delayed_copy", "random", "save_external"]

FLOAT = TensorProto.FLOAT
Array = np.ndarray


@dataclass(frozen=True)
class Packable:
    """A model in one proto, and an input for it."""

    model: onnx.ModelProto
    feeds: Mapping[str, Array]


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32) * np.float32(0.1)


def made(
    nodes: Sequence[onnx.NodeProto],
    weights: Mapping[str, Array],
    feeds: Mapping[str, Array],
    outputs: Sequence[str] = ("y",),
    *,
    types: Mapping[str, int] | None = None,
) -> Packable:
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()
    ]
    results = [helper.make_tensor_value_info(n, (types or {}).get(n, FLOAT), None) for n in outputs]
    graph = helper.make_graph(
        nodes, "graph", inputs, results, [numpy_helper.from_array(w, n) for n, w in weights.items()]
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("ai.rt", 1)]
    return Packable(helper.make_model(graph, opset_imports=opsets, ir_version=8), feeds)


def chain() -> Packable:
    """MatMul, Add, Tanh, three times: fused, with biases that stay external and small."""
    nodes, weights, value = [], {}, "x"
    for i in range(3):
        weights |= {f"w{i}": random(256, 256, seed=i), f"b{i}": random(512, seed=i)[:256]}
        nodes += [
            helper.make_node("MatMul", [value, f"w{i}"], [f"m{i}"]),
            helper.make_node("Add", [f"m{i}", f"b{i}"], [f"a{i}"]),
            helper.make_node("Tanh", [f"a{i}"], [f"h{i}" if i < 2 else "y"]),
        ]
        value = f"h{i}"
    return made(nodes, weights, {"x": random(3, 256)})


def convolution() -> Packable:
    """Conv with BatchNormalization: ONNX Runtime folds them, and lays the weights out in blocks of the processor's."""
    weights = {"w": random(64, 64, 3, 3), "scale": random(64), "bias": random(64, seed=1), "mean": random(64, seed=2)}
    weights["variance"] = np.abs(random(64, seed=3)) + np.float32(1)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "scale", "bias", "mean", "variance"], ["n"]),
        helper.make_node("Relu", ["n"], ["y"]),
    ]
    return made(nodes, weights, {"x": random(1, 64, 16, 16)})


def recurrent() -> Packable:
    """LSTM: one node packs two weights."""
    weights = {"w": random(1, 512, 128), "r": random(1, 512, 128, seed=1), "b": random(1, 1024)}
    nodes = [helper.make_node("LSTM", ["x", "w", "r", "b"], ["y", "", ""], hidden_size=128)]
    return made(nodes, weights, {"x": random(4, 2, 128)})


def quantized() -> Packable:
    """Weights of int8, through DynamicQuantizeLinear and MatMulInteger, as quantisation tools write it."""
    weights = {"w": (random(256, 256) * 300).astype(np.int8), "zero": np.array(0, np.int8), "scale": np.float32(0.01)}
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulInteger", ["q", "w", "z", "zero"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=FLOAT),
        helper.make_node("Mul", ["s", "scale"], ["both"]),
        helper.make_node("Mul", ["f", "both"], ["y"]),
    ]
    return made(nodes, {k: np.asarray(v) for k, v in weights.items()}, {"x": random(3, 256)})


def block_quantized() -> Packable:
    """MatMulNBits: 4-bit weights, scales in blocks, as text generation models have them."""
    weights = {
        "w": np.random.default_rng(0).integers(0, 256, (256, 8, 16)).astype(np.uint8),
        "scales": np.abs(random(256 * 8)),
    }
    settings = {"K": 256, "N": 256, "bits": 4, "block_size": 32}
    nodes = [helper.make_node("MatMulNBits", ["x", "w", "scales"], ["y"], domain="com.microsoft", **settings)]
    return made(nodes, weights, {"x": random(3, 256)})


def half() -> Packable:
    """float16, for which ONNX Runtime has few kernels on a CPU: it casts the weights."""
    weights = {"w": random(256, 256).astype(np.float16)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return made(nodes, weights, {"x": random(3, 256).astype(np.float16)}, types={"y": TensorProto.FLOAT16})


def tied() -> Packable:
    """One weight for an embedding and two products, and another with the same bytes under a name of its own."""
    w = random(256, 256)
    nodes = [
        helper.make_node("Gather", ["w", "ids"], ["e"]),
        helper.make_node("MatMul", ["e", "w"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["i"]),
        helper.make_node("MatMul", ["i", "copy"], ["y"]),
    ]
    return made(nodes, {"w": w, "copy": w.copy()}, {"ids": np.array([[3, 1, 2]], np.int64)})


def branches() -> Packable:
    """An If whose branches have weights of their own under one name, and read one from outside."""

    def branch(seed: int) -> onnx.GraphProto:
        nodes = [
            helper.make_node("MatMul", ["h", "w"], ["i"]),
            helper.make_node("MatMul", ["i", "outer"], [f"out{seed}"]),
        ]
        yields = [helper.make_tensor_value_info(f"out{seed}", FLOAT, None)]
        return helper.make_graph(
            nodes, f"b{seed}", [], yields, [numpy_helper.from_array(random(256, 256, seed=seed), "w")]
        )

    nodes = [
        helper.make_node("Tanh", ["x"], ["h"]),
        helper.make_node("If", ["condition"], ["y"], then_branch=branch(1), else_branch=branch(2)),
    ]
    return made(nodes, {"outer": random(256, 256)}, {"x": random(3, 256), "condition": np.array(True)})


def loop() -> Packable:
    """A Loop whose body multiplies by a weight of the body's."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("MatMul", ["state", "w"], ["next"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", FLOAT, [3, 256]),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", FLOAT, [3, 256]),
        ],
        [numpy_helper.from_array(random(256, 256), "w")],
    )
    nodes = [helper.make_node("Loop", ["trips", "", "x"], ["y"], body=body)]
    return made(nodes, {}, {"x": random(3, 256), "trips": np.array(3, np.int64)})


def small_only() -> Packable:
    """Nothing that is worth a data file."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return made(nodes, {"w": random(8, 8)}, {"x": random(3, 8)})


PACKABLE: dict[str, Callable[[], Packable]] = {
    f.__name__: f
    for f in (
        chain,
        convolution,
        recurrent,
        quantized,
        block_quantized,
        half,
        tied,
        branches,
        loop,
        small_only,
    )
}


def save_external(model: onnx.ModelProto, path: Path, *, least_bytes: int = 1024) -> Path:
    """Save a model with its larger initializers in one external file."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    location = path.name + ".data"
    onnx.save_model(copy, str(path), save_as_external_data=True, location=location, size_threshold=least_bytes)
    return path


def delayed_copy(model: onnx.ModelProto, path: Path) -> Path:
    """The same model with each initializer of the main graph from 4 KiB on as a delayed node."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    large = [t for t in copy.graph.initializer if len(t.raw_data) >= 4096]
    nodes = []
    with open(path.with_suffix(".weights"), "wb") as file:
        for tensor in large:
            nodes.append(
                make_node(
                    tensor.name,
                    filename=path.with_suffix(".weights").name,
                    shape=list(tensor.dims),
                    dtype=tensor.data_type,
                    offset=file.tell(),
                )
            )
            file.write(tensor.raw_data)
    kept = [t for t in copy.graph.initializer if len(t.raw_data) < 4096]
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(kept)
    nodes.extend(copy.graph.node)
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    path.write_bytes(copy.SerializeToString())
    return path
