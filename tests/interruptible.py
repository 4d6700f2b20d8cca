"""For snippets about interruptions: a session whose reads are slow enough to be interrupted, and how to check a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from delayed_models import delayed, model, node, save, value, write

import ort_delayed
from ort_delayed.ops.buffers import BufferPool
from ort_delayed.ops.payloads import FilePayload

__all__ = ["CHAIN", "chain", "check", "slow_reads", "write_weight"]

CHAIN = 12
WEIGHT = np.array([[0, 1, 0], [0, 0, 1], [1, 0, 0]], np.float32)
X = np.array([[1, -2, 3]], np.float32)


def write_weight(directory: str) -> None:
    write(Path(directory) / "w.bin", WEIGHT)


def chain(directory: str, **settings: Any) -> onnxruntime.InferenceSession:
    """A session of twelve products with a delayed permutation, which give the input back."""
    nodes = []
    for i in range(CHAIN):
        names = [f"h{i}" if i else "x", f"h{i + 1}" if i + 1 < CHAIN else "y"]
        nodes += [delayed(f"w{i}", [3, 3]), node("MatMul", [names[0], f"w{i}"], [names[1]])]
    made = model(nodes, [value("x", ["n", 3])], [value("y", ["n", 3])])
    return ort_delayed.InferenceSession(save(Path(directory) / "m.onnx", made), **settings)


def check(session: onnxruntime.InferenceSession) -> None:
    """A run gives the right result."""
    assert np.array_equal(session.run(None, {"x": X})[0], X)


def slow_reads(seconds: float) -> None:
    """Make every read of a payload take that long, in pure Python, so that signals find the interpreter at work."""
    original = FilePayload.elements

    def elements(self: FilePayload, pool: BufferPool) -> Any:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass
        return original(self, pool)

    FilePayload.elements = elements  # type: ignore[method-assign]
