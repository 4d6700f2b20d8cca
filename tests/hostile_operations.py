"""One of everything that the library does, on small files, for tests of what happens when the system refuses.

Each operation reads from a directory that :func:`prepare` has filled, checks its own result, and writes into another
one at most ``result.onnx`` and the data file that goes with it.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
from stand_ins import encoder_weights, feeds, write_stand_ins

import ort_delayed
from ort_delayed.checking import check_weights
from ort_delayed.inspecting import inspect_weights
from ort_delayed.ops import kernel
from ort_delayed.planning import plan_session

__all__ = ["OPERATIONS", "WRITING", "contents", "is_typed", "left_behind", "prepare"]

BUDGET = 256 << 20


def prepare(directory: Path) -> Path:
    """Models and checkpoints of one small encoder in every form, and what it computes."""
    write_stand_ins(directory)
    source = directory / "model.onnx"
    ort_delayed.convert_model(source, directory / "delayed.onnx")
    ort_delayed.convert_model(source, directory / "cpu.onnx", load_device="cpu")
    ort_delayed.pack_model(source, directory / "packed.onnx")
    np.save(directory / "expected.npy", onnxruntime.InferenceSession(source).run(None, feeds())[0])
    return directory


def _check(session: onnxruntime.InferenceSession, sources: Path) -> None:
    found, expected = session.run(None, feeds())[0], np.load(sources / "expected.npy")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def _session(name: str, **settings: object) -> Callable[[Path, Path], None]:
    def operation(sources: Path, out: Path) -> None:
        session = ort_delayed.InferenceSession(sources / name, enable_fallback=0, **settings)  # type: ignore[arg-type]
        _check(session, sources)

    return operation


def _confined(sources: Path, out: Path) -> None:
    _check(ort_delayed.InferenceSession(sources / "delayed.onnx", weights_dir=sources, enable_fallback=0), sources)


def _prepared(sources: Path, out: Path) -> None:
    options = onnxruntime.SessionOptions()
    model = ort_delayed.prepare_model(sources / "delayed.onnx", options)
    _check(onnxruntime.InferenceSession(model, options, enable_fallback=0), sources)


def _stream(sources: Path, out: Path) -> None:
    total = 0

    def consumer(group: object) -> None:
        nonlocal total
        total += sum(w.nbytes for w in group.tensors.values())  # type: ignore[attr-defined]

    loader = ort_delayed.StreamingWeightLoader(sources / "artifacts", ram_budget=BUDGET)
    loader.stream(consumer)
    assert total == sum(w.nbytes for w in encoder_weights().values())


def _install(sources: Path, out: Path) -> None:
    options = onnxruntime.SessionOptions()
    installed = ort_delayed.stream_install(sources / "model.onnx", options, ram_budget=BUDGET)
    _check(installed.create_session(enable_fallback=0), sources)


def _convert(sources: Path, out: Path) -> None:
    ort_delayed.convert_model(sources / "inline.onnx", out / "result.onnx")


def _copy(sources: Path, out: Path) -> None:
    ort_delayed.convert_model(sources / "model.onnx", out / "result.onnx", copy=True)


def _restore(sources: Path, out: Path) -> None:
    ort_delayed.restore_model(sources / "delayed.onnx", out / "result.onnx")


def _pack(sources: Path, out: Path) -> None:
    ort_delayed.pack_model(sources / "model.onnx", out / "result.onnx")


def _look(sources: Path, out: Path) -> None:
    for name in ("delayed.onnx", "packed.onnx", "artifacts"):
        assert inspect_weights(sources / name)
        check_weights(sources / name)  # what the system refuses is a fault in its report
    plan_session(sources / "delayed.onnx", BUDGET)


WRITING: dict[str, Callable[[Path, Path], None]] = {
    "convert": _convert,
    "copy": _copy,
    "restore": _restore,
    "pack": _pack,
}
OPERATIONS: dict[str, Callable[[Path, Path], None]] = {
    "file": _session("delayed.onnx"),
    "cpu": _session("cpu.onnx"),
    "confined": _confined,
    "prepared": _prepared,
    "budget": _session("model.onnx", ram_budget=BUDGET),
    "packed": _session("packed.onnx"),
    "packed under a budget": _session("packed.onnx", ram_budget=BUDGET),
    "stream": _stream,
    "install": _install,
    "look": _look,
    **WRITING,
}


def is_typed(error: BaseException) -> bool:
    """Whether an application can tell this error: ours, the system's, or ONNX Runtime's own."""
    by = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError | MemoryError) or by in ("ort_delayed", "onnxruntime")


def contents(directory: Path) -> dict[str, str]:
    """Every file below the directory and a digest of what it holds."""
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def left_behind() -> tuple[int, int, int]:
    """Descriptors, threads and handles of this process (Linux), garbage collected."""
    gc.collect()
    entries: dict[int, object] = dict(kernel._table.entries)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(entries)
