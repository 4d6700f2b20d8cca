"""Makes models whose weights are of another kind than a float32 matrix: int8, float16, convolutions, LSTM.

Each function returns the path of the model, makes it only if it is not there yet, and makes the same bytes on every
machine with the same numpy. Between two large weights stands a bias, as exporters write it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from graph_writer import FLOAT, GraphWriter, made, value_info
from model_makers import CACHE
from onnx import TensorProto

__all__ = ["convolutional", "float16", "int8", "lstm"]


def int8(count: int = 24, side: int = 2048, *, directory: Path = CACHE) -> Path:
    """``count`` times DynamicQuantizeLinear, MatMulInteger with a square int8 weight, rescaling, a bias, Tanh."""
    with made(directory, f"int8-{count}x{side}") as (path, new):
        if new:
            graph = GraphWriter(path)
            scale = graph.constant(np.sqrt(3 / side) / 127, np.float32)
            value = "x"
            for i in range(count):
                quantized, factor, zero = (f"{part}_{i}" for part in ("quantized", "scale", "zero"))
                graph.add_node("DynamicQuantizeLinear", [value], [quantized, factor, zero])
                weight = graph.external((graph.uniform(side, side) * 127).astype(np.int8), f"layers.{i}.weight")
                product = graph.add("Cast", graph.add("MatMulInteger", quantized, weight, zero), to=FLOAT)
                value = graph.add("Mul", product, graph.add("Mul", factor, scale))
                value = graph.add("Add", value, graph.bias(side, f"layers.{i}.bias"))
                value = graph.add("Tanh", value, output=graph.last("y", i, count))
            graph.save([value_info("x", ["batch", side])], [value_info("y", ["batch", side])])
    return path


def float16(count: int = 24, side: int = 2048, *, directory: Path = CACHE) -> Path:
    """``count`` times MatMul with a square float16 weight, a bias, Tanh, all in float16; inputs and outputs float32."""
    with made(directory, f"float16-{count}x{side}") as (path, new):
        if new:
            graph = GraphWriter(path)
            bound = np.float32(np.sqrt(3 / side))
            value = graph.add("Cast", "x", to=TensorProto.FLOAT16)
            for i in range(count):
                weight = graph.external((graph.uniform(side, side) * bound).astype(np.float16), f"layers.{i}.weight")
                bias = graph.bias(side, f"layers.{i}.bias", np.float16)
                value = graph.add("Tanh", graph.add("Add", graph.add("MatMul", value, weight), bias))
            graph.add("Cast", value, output="y", to=FLOAT)
            graph.save([value_info("x", ["batch", side])], [value_info("y", ["batch", side])])
    return path


def convolutional(count: int = 24, channels: int = 512, side: int = 7, *, directory: Path = CACHE) -> Path:
    """``count`` residual blocks: Conv 3 x 3 with a bias, Relu, Add; images of ``side`` x ``side``."""
    with made(directory, f"convolutional-{count}x{channels}") as (path, new):
        if new:
            graph = GraphWriter(path)
            # Each block adds to its input: small enough that the values of the last one are still of order one.
            bound = np.float32(np.sqrt(3 / (9 * channels)) / 4)
            value = "x"
            for i in range(count):
                weight = graph.external(graph.uniform(channels, channels, 3, 3) * bound, f"layers.{i}.weight")
                bias = graph.bias(channels, f"layers.{i}.bias")
                convolved = graph.add("Conv", value, weight, bias, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
                value = graph.add("Add", value, graph.add("Relu", convolved), output=graph.last("y", i, count))
            shape = ["batch", channels, side, side]
            graph.save([value_info("x", shape)], [value_info("y", shape)])
    return path


def lstm(count: int = 8, hidden: int = 1024, *, directory: Path = CACHE) -> Path:
    """``count`` LSTM layers, one on the other; input ``x`` of shape (sequence, 1, hidden)."""
    with made(directory, f"lstm-{count}x{hidden}") as (path, new):
        if new:
            graph = GraphWriter(path)
            bound = np.float32(np.sqrt(1 / hidden))
            direction = graph.constant([1])
            value = "x"
            for i in range(count):
                gates = [
                    graph.external(graph.uniform(1, 4 * hidden, hidden) * bound, f"layers.{i}.{part}")
                    for part in ("weight", "recurrence")
                ]
                bias = graph.inline(graph.random(1, 8 * hidden) * np.float32(0.01), f"layers.{i}.bias")
                value = graph.add(
                    "Squeeze",
                    graph.add("LSTM", value, *gates, bias, hidden_size=hidden),
                    direction,
                    output=graph.last("y", i, count),
                )
            shape = ["sequence", 1, hidden]
            graph.save([value_info("x", shape)], [value_info("y", shape)])
    return path
