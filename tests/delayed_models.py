"""Small models with delayed nodes, built in memory, and the files that they read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ort_delayed.ops import make_node

__all__ = ["FLOAT", "delayed", "function", "model", "node", "output_only", "save", "single_weight", "value", "write"]

FLOAT = TensorProto.FLOAT
node = helper.make_node


def value(name: str, shape: Sequence[Any] | None, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def delayed(output: str, shape: Sequence[int], filename: str = "w.bin", **attributes: Any) -> onnx.NodeProto:
    """A delayed node; float32, mode ``file``, named after its output unless told otherwise."""
    settings = {"dtype": FLOAT, "name": output, **attributes}
    return make_node(output, filename=filename, shape=shape, **settings)


def function(name: str, inputs: list[str], outputs: list[str], nodes: list[onnx.NodeProto], **settings: Any) -> Any:
    """A model-local function of the domain ``local``."""
    opsets = [helper.make_opsetid("", settings.pop("opset", 17)), helper.make_opsetid("ai.rt", 1)]
    opsets.append(helper.make_opsetid("local", 1))
    return helper.make_function("local", name, inputs, outputs, nodes, opsets, **settings)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto] = (),
    outputs: Sequence[onnx.ValueInfoProto] = (),
    *,
    initializers: Sequence[onnx.TensorProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
    opset: int | None = 17,
    ir_version: int = 8,
) -> onnx.ModelProto:
    """A model of these nodes; ``opset=None`` leaves the import of the standard operators out."""
    opsets = [helper.make_opsetid("ai.rt", 1)]
    if opset is not None:
        opsets.append(helper.make_opsetid("", opset))
    if functions:
        opsets.append(helper.make_opsetid("local", 1))
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=ir_version)


def output_only(shape: Sequence[int], **attributes: Any) -> onnx.ModelProto:
    """A model that yields one delayed tensor, ``y``, and nothing else."""
    return model([delayed("y", shape, **attributes)], [], [value("y", shape, attributes.get("dtype", FLOAT))])


def single_weight(**attributes: Any) -> onnx.ModelProto:
    """``y = x @ w`` with a delayed ``w`` of shape [3, 3]."""
    nodes = [delayed("w", [3, 3], **attributes), node("MatMul", ["x", "w"], ["y"])]
    return model(nodes, [value("x", ["n", 3])], [value("y", ["n", 3])])


def write(path: Path, *arrays: np.ndarray, padding: bytes = b"") -> Path:
    """Write ``padding``, then the arrays' bytes one after the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(padding + b"".join(np.ascontiguousarray(a).tobytes() for a in arrays))
    return path


def save(path: Path, made: onnx.ModelProto) -> str:
    """Write the model and return its path, as ``InferenceSession`` takes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(made.SerializeToString())
    return str(path)
