"""Models of some tens of MiB for sessions under budgets, and what a run's peak is measured with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

import ort_delayed

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

from measure import PeakMemory
from model_makers import DecoderSize, chain, decoder

__all__ = ["MIB", "PeakMemory", "feed", "memory_of", "plain", "small_chain", "small_decoder", "without_first_costs"]

MIB = 1 << 20
COUNT, SIDE = 16, 1024  # 16 weights of 4 MiB


def small_chain(directory: Path, *, biases: bool = True) -> str:
    """64 MiB: Add, MatMul and Tanh, 16 times. Or without the Adds."""
    return str(chain(COUNT, SIDE, biases=biases, directory=directory))


def small_dense_stack(directory: Path) -> str:
    """The chain with each bias behind its MatMul: dense layers, which ONNX Runtime fuses to Gemm."""
    made = onnx.load(small_chain(directory), load_external_data=False)
    for add, product, tanh in zip(made.graph.node[::3], made.graph.node[1::3], made.graph.node[2::3], strict=True):
        assert [add.op_type, product.op_type, tanh.op_type] == ["Add", "MatMul", "Tanh"]
        add.input[0], product.input[0] = product.output[0], add.input[0]
        tanh.input[0] = add.output[0]
        add_first = onnx.NodeProto()
        add_first.CopyFrom(add)
        add.CopyFrom(product)
        product.CopyFrom(add_first)
    path = str(directory / "dense.onnx")
    onnx.save(made, path)
    return path


def small_decoder(directory: Path) -> str:
    """48 MiB, 16 of them an embedding and 16 an output projection."""
    return str(decoder(DecoderSize(4, 512, 8, 1024, 8192, 64), directory=directory))


def feed(model: str, rows: int = 1) -> dict[str, np.ndarray]:
    if "decoder" in model:
        return {"ids": (np.arange(rows, dtype=np.int64) * 37 % 8192)[None]}
    return {"x": np.random.default_rng(0).standard_normal((rows, SIDE)).astype(np.float32)}


def plain(model: str, rows: int = 1) -> bytes:
    """What plain ONNX Runtime computes, prepacking disabled."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    result: bytes = onnxruntime.InferenceSession(model, options).run(None, feed(model, rows))[0].tobytes()
    return result


def without_first_costs() -> None:
    """Make and run a session, so that the library's own text counts for nothing that is measured later."""
    made = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "x"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, [256, 256])],
        [onnx.helper.make_tensor_value_info("y", 1, [256, 256])],
    )
    model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    session = ort_delayed.InferenceSession(model.SerializeToString(), ram_budget=1 << 28)
    session.run(None, {"x": np.ones((256, 256), np.float32)})


@contextmanager
def memory_of(budget: int) -> Iterator[PeakMemory]:
    """Fails where the process's high-water mark passes ``budget`` bytes above its start."""
    memory = PeakMemory()
    yield memory
    peak = memory.peak()
    assert peak <= budget, f"peak {peak / MIB:.1f} MiB, budget {budget / MIB:.1f} MiB"
