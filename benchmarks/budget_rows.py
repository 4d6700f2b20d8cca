"""What one row of the budget benchmark does in its own process: a session under a budget, or a plain one beside it."""

from __future__ import annotations

import hashlib
import json
import os
import time

import numpy as np
import onnx
import onnxruntime
from measure import PeakMemory, Result, median_seconds
from onnx import helper

__all__ = ["measure_in_group", "measure_row", "measure_tick"]

_GROUP = "ORT_DELAYED_MEMORY_GROUP"


def measure_row(model: str, budget: int, size: int, runs: int, way: str = "mapped") -> Result:
    """Construct a session and run it on inputs of ``size`` rows or tokens; ``budget`` 0: none, opened this ``way``.

    ``"mapped"`` is plain with its weights mapped in place, ``"default"`` plain as it comes, ``"ours"`` ort_delayed.

    Memory is counted above a baseline taken after a throw-away session. ``digest`` is that of the outputs' bytes.
    """
    throw_away = _open(_small_model(), budget and 1 << 28, way)
    throw_away.run(None, {"x": np.ones((64, 64), np.float32)})
    del throw_away
    np.random.default_rng(1).standard_normal(8)  # its modules are loaded when they are first used
    memory = PeakMemory()
    start = time.perf_counter()
    session = _open(model, budget, way)
    result: Result = {"construct": time.perf_counter() - start, "peak_constructing": memory.peak()}
    feeds = _feeds(session, size)
    result["seconds"] = median_seconds(lambda: session.run(None, feeds), runs=runs)
    result["peak"] = memory.peak()
    result["digest"] = _digest(session.run(None, feeds))
    if budget:
        plan, report = session.memory_plan, session.memory_report
        result["dropped"] = report.last_run.dropped_bytes
        forced = plan.mapped_bytes + plan.session_bytes + plan.activations_bytes + plan.headroom_bytes - budget
        result["forced"] = max(forced, 0)
        result["headroom"] = plan.headroom_bytes
        result["ticks"] = report.last_run.ticks
        result["reliefs"] = report.last_run.reliefs
    return result


def measure_in_group(model: str, budget: int, size: int, runs: int, way: str = "mapped") -> Result:
    """Seconds a run, after the first, of a process that has joined the memory control group it is told of.

    ``budget`` 0: none, opened as :func:`measure_row` says.
    """
    with open(os.path.join(os.environ[_GROUP], "cgroup.procs"), "w") as processes:
        processes.write(str(os.getpid()))
    session = _open(model, budget, way)
    feeds = _feeds(session, size)
    result: Result = {"seconds": median_seconds(lambda: session.run(None, feeds), runs=runs, warm_up=1)}
    result["digest"] = _digest(session.run(None, feeds))
    return result


def measure_tick(model: str, budget: int, runs: int) -> Result:
    """Seconds that a node takes which delivers a small weight and asks the pager, and what of it is the pager's.

    ``seconds`` is the node by ONNX Runtime's profile: the way into Python and back, with caches that the weights
    before it have filled, is most of it. ``pager`` is what the pager itself takes, without the system calls that give
    up pages.
    """
    import ort_delayed
    from ort_delayed.budget_keeper import BudgetKeeper
    from ort_delayed.loader import platform as system

    dropping, asked = 0.0, []
    give_up, tick = system.give_up_pages, BudgetKeeper._on_tick

    def timed_give_up(address: int, nbytes: int) -> None:
        nonlocal dropping
        start = time.perf_counter()
        give_up(address, nbytes)
        dropping += time.perf_counter() - start

    def timed_tick(keeper: BudgetKeeper, group: int) -> None:
        nonlocal dropping
        dropping, start = 0.0, time.perf_counter()
        tick(keeper, group)
        asked.append(time.perf_counter() - start - dropping)

    system.give_up_pages = timed_give_up
    BudgetKeeper._on_tick = timed_tick
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = os.path.join(os.path.dirname(model), "ticks")
    session = ort_delayed.InferenceSession(model, options, ram_budget=budget)
    feeds = _feeds(session, 1)
    for _ in range(runs):
        session.run(None, feeds)
    profile = session.end_profiling()
    with open(profile) as file:
        events = json.load(file)
    os.remove(profile)
    ticks = [e["dur"] for e in events if e["name"].endswith("/tick_kernel_time")]
    return {
        "seconds": float(np.median(ticks)) / 1e6,
        "pager": float(np.median(asked)),
        "ticks": len(ticks) / runs,
    }


def _open(model: str | bytes, budget: int, way: str) -> onnxruntime.InferenceSession:
    if budget or way == "ours":
        # Here and not above: the rows of plain ONNX Runtime do without it.
        import ort_delayed

        return ort_delayed.InferenceSession(model, ram_budget=budget or None)
    options = onnxruntime.SessionOptions()
    if way == "mapped":
        options.add_session_config_entry("session.disable_prepacking", "1")
    return onnxruntime.InferenceSession(model, options)


def _feeds(session: onnxruntime.InferenceSession, size: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    feeds = {}
    for taken in session.get_inputs():
        if taken.type == "tensor(float)":
            feeds[taken.name] = random.standard_normal((size, taken.shape[-1]), np.float32)
        elif "mask" in taken.name:
            feeds[taken.name] = np.ones((1, size), np.int64)
        elif "type" in taken.name:
            feeds[taken.name] = np.zeros((1, size), np.int64)
        else:
            feeds[taken.name] = random.integers(0, 30000, (1, size))
    return feeds


def _digest(outputs: list[np.ndarray]) -> float:
    digest = hashlib.sha256()
    for output in outputs:
        digest.update(np.ascontiguousarray(output).tobytes())
    # Results are numbers; 48 bits of the digest are an exact float.
    return float(int.from_bytes(digest.digest()[:6], "big"))


def _small_model() -> bytes:
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [64, 64]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "x"], ["y"])], "small", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    serialized: bytes = model.SerializeToString()
    return serialized
