"""The models that the benchmarks measure: pairs of a plain one and one with delayed initializers, on the same bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper
from stock_op import STOCK_DOMAIN, STOCK_OP

from ort_delayed.ops import make_node

__all__ = ["chain_models", "delivery_models", "inline_models", "small_node_models"]
__all__ += ["write_weights"]

FLOAT = TensorProto.FLOAT

FloatArray = npt.NDArray[np.float32]


def write_weights(path: str, count: int, side: int) -> None:
    """``count`` square float32 matrices, one after the other. A chain of MatMuls with them keeps the size of values.

    (Values that shrink along the chain would become subnormal, which are slow and would be measured instead.)
    """
    random = np.random.default_rng(0)
    bound = np.float32(np.sqrt(3 / side))
    with open(path, "wb") as file:
        for _ in range(count):
            ((random.random((side, side), np.float32) * 2 - 1) * bound).tofile(file)


def chain_models(directory: str, weights: str, count: int, side: int) -> dict[str, str]:
    """``count`` MatMuls in a row; paths of ``plain`` (external data) and ``delayed`` (file mode), both on ``weights``.

    The nodes of the delayed model stand where a converter puts them, each before its use.
    """
    products = [_product(i, count) for i in range(count)]
    plain = [_external(f"w{i}", (side, side), weights, i * side * side * 4) for i in range(count)]
    interleaved = [n for i, p in enumerate(products) for n in (_delayed(i, (side, side), weights), p)]
    ends = ([_tensor("x", ["batch", side])], [_tensor("y", ["batch", side])])
    return {
        "plain": _save(directory, "chain_plain", products, *ends, initializers=plain),
        "delayed": _save(directory, "chain_delayed", interleaved, *ends),
    }


def delivery_models(directory: str, weights: str, count: int, side: int) -> dict[str, str]:
    """``count`` weights of which one row each is used: nearly all the time of a run is delivering them.

    ``delayed`` takes them from the file, ``stock`` from a custom op of the benchmark that returns its array.
    """
    rows = [helper.make_node("Gather", [f"w{i}", "row"], [f"r{i}"], axis=0) for i in range(count)]
    total = helper.make_node("Sum", [f"r{i}" for i in range(count)], ["y"])
    ends = ([_tensor("row", [], TensorProto.INT64)], [_tensor("y", [side])])
    stock = [helper.make_node(STOCK_OP, [], [f"w{i}"], domain=STOCK_DOMAIN, index=i) for i in range(count)]
    delayed = [_delayed(i, (side, side), weights) for i in range(count)]
    return {
        "stock": _save(directory, "delivery_stock", [*stock, *rows, total], *ends),
        "delayed": _save(directory, "delivery_delayed", [*delayed, *rows, total], *ends),
    }


def small_node_models(directory: str, weights: str, count: int, load_device: str = "file") -> dict[str, str]:
    """``count`` Adds in a row, each of a weight of 16 floats: ``plain`` has them as initializers."""
    values = np.arange(count * 16, dtype=np.float32).reshape(count, 16) / (count * 16)
    values.tofile(weights)
    sums = [helper.make_node("Add", [f"h{i}" if i else "x", f"w{i}"], [_name(i, count)]) for i in range(count)]
    inline = [onnx.numpy_helper.from_array(v, f"w{i}") for i, v in enumerate(values)]
    interleaved = [n for i, s in enumerate(sums) for n in (_delayed(i, (16,), weights, load_device), s)]
    ends = ([_tensor("x", [16])], [_tensor("y", [16])])
    return {
        "plain": _save(directory, f"nodes_{count}_plain", sums, *ends, initializers=inline),
        "delayed": _save(directory, f"nodes_{count}_{load_device}", interleaved, *ends),
    }


def inline_models(directory: str, weights: str, count: int, side: int) -> dict[str, str]:
    """``count`` inline weights beside one bias, which ``delayed`` delays and ``plain`` has inline as well."""
    write_weights(weights, count, side)
    matrices = np.memmap(weights, np.float32, "r", shape=(count, side, side))
    inline = [onnx.numpy_helper.from_array(np.asarray(m), f"w{i}") for i, m in enumerate(matrices)]
    products = [_product(i, count, last="product") for i in range(count)]
    biased = helper.make_node("Add", ["product", "bias"], ["y"])
    ends = ([_tensor("x", ["batch", side])], [_tensor("y", ["batch", side])])
    bias = onnx.numpy_helper.from_array(np.asarray(matrices[0, 0]), "bias")
    delayed = make_node("bias", filename=os.path.basename(weights), shape=[side], dtype=FLOAT)
    return {
        "plain": _save(directory, "inline_plain", [*products, biased], *ends, initializers=[*inline, bias]),
        "delayed": _save(directory, "inline_delayed", [*products, delayed, biased], *ends, initializers=inline),
    }


def _name(i: int, count: int, last: str = "y") -> str:
    return f"h{i + 1}" if i + 1 < count else last


def _product(i: int, count: int, last: str = "y") -> onnx.NodeProto:
    return helper.make_node("MatMul", [f"h{i}" if i else "x", f"w{i}"], [_name(i, count, last)])


def _delayed(i: int, shape: tuple[int, ...], weights: str, load_device: str = "file") -> onnx.NodeProto:
    offset = i * int(np.prod(shape)) * 4
    return make_node(
        f"w{i}",
        filename=os.path.basename(weights),
        shape=shape,
        dtype=FLOAT,
        offset=offset,
        load_device=load_device,
        name=f"weight_{i}",
    )


def _external(name: str, shape: tuple[int, ...], weights: str, offset: int) -> onnx.TensorProto:
    tensor = TensorProto(name=name, data_type=FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
    length = int(np.prod(shape)) * 4
    for key, value in (("location", os.path.basename(weights)), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    return tensor


def _tensor(name: str, shape: Sequence[int | str], dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def _save(
    directory: str,
    name: str,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    *,
    initializers: Sequence[onnx.TensorProto] = (),
) -> str:
    graph = helper.make_graph(nodes, name, inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.rt", 1), helper.make_opsetid(STOCK_DOMAIN, 1)]
    path = os.path.join(directory, f"{name}.onnx")
    with open(path, "wb") as file:
        file.write(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
    return path
