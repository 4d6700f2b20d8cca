"""What one row of a benchmark does in its own process: construct a session one way, run it, measure both."""

from __future__ import annotations

import time

import numpy as np
import onnxruntime
from measure import PeakMemory, Result, median_seconds
from stock_op import open_stock

__all__ = ["OPENERS", "measure_delivery", "measure_session"]


def measure_session(opener: str, model: str, throw_away: str, batch: int, side: int, runs: int, output: str) -> Result:
    """Construct a session and run it on ``batch`` rows of ``side`` floats (``batch`` 0: on ``side`` floats).

    Memory is counted above a baseline taken after a throw-away session of the same kind, so that the library's own
    text and its first allocations count for no row. The outputs are saved as ``output``, to be compared.
    """
    open_session = OPENERS[opener]
    small = open_session(throw_away)
    small.run(None, {"x": _values(1, small.get_inputs()[0].shape[-1])})
    del small
    memory = PeakMemory()
    start = time.perf_counter()
    session = open_session(model)
    result: Result = {"construct": time.perf_counter() - start, "rss_constructed": memory.now()}
    result["peak_constructing"] = memory.peak()
    feeds = {"x": _values(batch, side) if batch else _values(1, side)[0]}
    result["seconds"] = median_seconds(lambda: session.run(None, feeds), runs=runs)
    result["peak"] = memory.peak()
    np.save(output, session.run(None, feeds)[0])
    return result


def measure_delivery(opener: str, model: str, weights: str, count: int, side: int, runs: int, output: str) -> Result:
    """Seconds a run of a model that does nearly nothing but deliver weights; ``opener`` may also be ``"stock"``."""
    if opener == "stock":
        session = open_stock(model, np.fromfile(weights, np.float32, count * side * side).reshape(count, side, side))
    else:
        session = OPENERS[opener](model)
    feeds = {"row": np.array(1, np.int64)}
    result: Result = {"seconds": median_seconds(lambda: session.run(None, feeds), runs=runs, warm_up=1)}
    np.save(output, session.run(None, feeds)[0])
    return result


def _open_plain(model: str) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model)


def _open_without_prepacking(model: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    return onnxruntime.InferenceSession(model, options)


def _open_delayed(model: str) -> onnxruntime.InferenceSession:
    # Here and not above: the rows of plain ONNX Runtime do without it.
    import ort_delayed

    return ort_delayed.InferenceSession(model)


OPENERS = {"plain": _open_plain, "unpacked": _open_without_prepacking, "delayed": _open_delayed}
"""Ways to open a session: plain ONNX Runtime, the same with prepacking disabled, ort_delayed."""


def _values(batch: int, side: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((batch, side), np.float32)
