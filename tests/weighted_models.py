"""Small ordinary models with weights of every storage, and running them without graph optimisations."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import ort_delayed

__all__ = ["constant", "external", "initializer", "model", "node", "run_delayed", "run_plain", "same_bits", "typed"]
__all__ += ["save", "unoptimised", "value", "weights"]

node = helper.make_node


def value(name: str, shape: Sequence[Any] | None, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def weights(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    """Reproducible values: floats around 0, integers over the whole small range."""
    generator = np.random.default_rng(seed)
    if np.issubdtype(np.dtype(dtype), np.floating):
        return generator.standard_normal(shape).astype(dtype)
    return generator.integers(0, 2 if dtype is bool else 100, shape).astype(dtype)


def initializer(name: str, array: np.ndarray) -> onnx.TensorProto:
    """Raw inline values."""
    return numpy_helper.from_array(array, name)


def typed(name: str, array: np.ndarray) -> onnx.TensorProto:
    """Values in the typed field that the element type has."""
    dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
    tensor = TensorProto(name=name, data_type=dtype, dims=array.shape)
    field = helper.tensor_dtype_to_field(dtype)
    if dtype in (TensorProto.FLOAT16, TensorProto.BOOL):
        array = array.view(np.uint16 if dtype == TensorProto.FLOAT16 else np.uint8)
    getattr(tensor, field).extend(array.ravel().tolist())
    return tensor


def external(
    name: str, array: np.ndarray, location: str, offset: int = 0, length: int | None = None
) -> onnx.TensorProto:
    """An initializer whose bytes are expected at ``offset`` of ``location``; ``length=None`` writes no length."""
    dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
    tensor = TensorProto(name=name, data_type=dtype, dims=array.shape, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    tensor.external_data.add(key="offset", value=str(offset))
    if length is not None:
        tensor.external_data.add(key="length", value=str(length))
    return tensor


def constant(output: str, array: np.ndarray | onnx.TensorProto, **settings: Any) -> onnx.NodeProto:
    tensor = array if isinstance(array, TensorProto) else numpy_helper.from_array(array)
    return helper.make_node("Constant", [], [output], value=tensor, **settings)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
    *,
    opset: int = 17,
    ir_version: int = 8,
    **settings: Any,
) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", opset)]
    opsets += [helper.make_opsetid(d, 1) for d in sorted({n.domain for n in nodes} - {""})]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers, **settings)
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=ir_version)


def unoptimised() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return options


def run_plain(path: str | os.PathLike[str], inputs: Mapping[str, Any] | None = None) -> list[Any]:
    session = onnxruntime.InferenceSession(
        os.fspath(path), unoptimised(), providers=["CPUExecutionProvider"], enable_fallback=0
    )
    return session.run(None, dict(inputs or {}))


def run_delayed(path: str | os.PathLike[str], inputs: Mapping[str, Any] | None = None) -> list[Any]:
    session = ort_delayed.InferenceSession(os.fspath(path), unoptimised(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(inputs or {}))


def same_bits(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two runs gave the same arrays, NaN payloads included."""
    return len(left) == len(right) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and (a.tolist() == b.tolist() if a.dtype == object else a.tobytes() == b.tobytes())
        for a, b in zip(left, right, strict=True)
    )


def save(proto: onnx.ModelProto, path: Path) -> Path:
    path.write_bytes(proto.SerializeToString())
    return path
