"""What goes with a session, and what must not: files, mappings, threads, memory; runs that outlive its last name."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from delayed_models import save, single_weight, write
from subprocesses import run_snippet

import ort_delayed
from ort_delayed.ops import kernel
from ort_delayed.ops.buffers import BufferPool
from ort_delayed.ops.payloads import FilePayload

TWO_HUNDRED = """
import gc, os, sys
import numpy as np
import onnxruntime, ort_delayed
from delayed_models import delayed, model, node, save, value, write
from ort_delayed.loader.platform import release_free_memory
from pathlib import Path
directory, how = Path(sys.argv[1]), sys.argv[2]
SIZE = 512  # 1 MiB a weight
write(directory / "w.bin", np.eye(SIZE, dtype=np.float32))
nodes = [delayed("v", [SIZE, SIZE], load_device="cpu"), delayed("w", [SIZE, SIZE])]
nodes += [node("MatMul", ["x", "v"], ["h"]), node("MatMul", ["h", "w"], ["y"])]
path = save(directory / "m.onnx", model(nodes, [value("x", [1, SIZE])], [value("y", [1, SIZE])]))
x = np.ones((1, SIZE), np.float32)

def use():
    options = onnxruntime.SessionOptions()
    if how == "plain":
        session = onnxruntime.InferenceSession(ort_delayed.prepare_model(path, options), options)
    else:
        session = ort_delayed.InferenceSession(path, options)
    assert session.run(None, {"x": x})[0].sum() == SIZE
    if how == "failing":
        os.rename(directory / "w.bin", directory / "gone.bin")
        try:
            session.run(None, {"x": x})
            raise SystemExit("it ran")
        except FileNotFoundError:
            pass
        os.rename(directory / "gone.bin", directory / "w.bin")
    if how == "providers":
        session.set_providers(["CPUExecutionProvider"])
    if how == "async":
        session.run_async(None, {"x": x}, lambda *arguments: None, None)

def state():
    gc.collect()
    release_free_memory()
    if how == "async":
        import time
        time.sleep(0.5)
    with open("/proc/self/maps") as maps:
        mappings = len(maps.read().splitlines())
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * 4096
    from ort_delayed.ops.kernel import _table
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(_table.entries), mappings, resident

for _ in range(20):
    use()
before = state()
for _ in range(int(sys.argv[3])):
    use()
after = state()
assert after[:3] == before[:3], (before, after)
assert after[3] - before[3] < 20, (before, after)
assert after[4] - before[4] < 8 << 20, (before, after)
"""


@pytest.mark.parametrize(
    ("how", "sessions"), [("ours", 200), ("plain", 60), ("failing", 60), ("providers", 40), ("async", 40)]
)
def test_sessions_leave_nothing_behind(how: str, sessions: int, tmp_path: Path) -> None:
    # Each session has threads of its own, and glibc gives each thread an arena that it keeps (docs/limits.md): with one
    # for all, what stays resident is what was not given back.
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MALLOC_ARENA_MAX", "1")
        run_snippet(TWO_HUNDRED, tmp_path, how, str(sessions), timeout=120)


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> threading.Event:
    """Make reads slow; the event is set when the first one has begun."""
    begun, original = threading.Event(), FilePayload.elements

    def elements(self: FilePayload, pool: BufferPool) -> Any:
        begun.set()
        time.sleep(seconds)
        return original(self, pool)

    monkeypatch.setattr(FilePayload, "elements", elements)
    return begun


def session_of(directory: Path, weight: np.ndarray) -> onnxruntime.InferenceSession:
    write(directory / "w.bin", weight)
    return ort_delayed.InferenceSession(save(directory / "m.onnx", single_weight()))


def test_a_session_goes_with_its_last_name(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    gc.disable()
    try:
        entries = set(kernel._table.entries)
        session = session_of(tmp_path, weight)
        session.run(None, {"x": x})
        gone = weakref.ref(session)
        assert set(kernel._table.entries) - entries
        del session
        assert gone() is None
        assert not set(kernel._table.entries) - entries
    finally:
        gc.enable()


def test_an_error_keeps_no_session_alive(tmp_path: Path, x: np.ndarray) -> None:
    gc.disable()
    try:
        session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", single_weight()))
        errors: list[BaseException] = []
        try:
            session.run(None, {"x": x})
        except FileNotFoundError as error:
            errors.append(error.with_traceback(None))
        gone = weakref.ref(session)
        del session
        gc.enable()
        gc.collect()
        assert gone() is None
        assert errors
    finally:
        gc.enable()


def test_dropped_during_an_asynchronous_run(
    tmp_path: Path, weight: np.ndarray, x: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = slow(monkeypatch, 0.05)
    session = session_of(tmp_path, weight)
    gone, got, done = weakref.ref(session), [], threading.Event()

    def callback(results: Any, data: Any, message: str) -> None:
        got.extend([results, message])
        done.set()

    session.run_async(None, {"x": x}, callback, None)
    assert begun.wait(30)
    del session
    gc.collect()
    assert done.wait(30)
    assert got[1] == ""
    assert np.array_equal(got[0][0], x @ weight)
    for _ in range(100):
        if gone() is None:
            break
        time.sleep(0.05)
    assert gone() is None


def test_dropped_by_one_thread_while_another_runs_it(
    tmp_path: Path, weight: np.ndarray, x: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = slow(monkeypatch, 0.05)
    holder = [session_of(tmp_path, weight)]
    got: list[np.ndarray] = []

    def work() -> None:
        got.extend(holder[0].run(None, {"x": x}))

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(30)
    holder.clear()
    gc.collect()
    thread.join(30)
    assert np.array_equal(got[0], x @ weight)


def test_providers_set_during_a_run_of_another_thread(
    tmp_path: Path, weight: np.ndarray, x: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = slow(monkeypatch, 0.1)
    session = session_of(tmp_path, weight)
    got: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: got.extend(session.run(None, {"x": x})))
    thread.start()
    assert begun.wait(30)
    session.set_providers(["CPUExecutionProvider"])
    thread.join(30)
    for y in (got[0], session.run(None, {"x": x})[0]):
        assert np.array_equal(y, x @ weight)


def test_a_threads_end_is_waited_for(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    session = session_of(tmp_path, weight)
    session.run(None, {"x": x})
    tasks = len(list(Path("/proc/self/task").iterdir()))
    del session
    gc.collect()
    assert len(list(Path("/proc/self/task").iterdir())) < tasks


GOES_AT_ONCE = """
import gc, sys, weakref
import numpy as np
import onnxruntime, ort_delayed
from delayed_models import delayed, model, node, save, value, write
from pathlib import Path
onnxruntime.set_default_logger_severity(4)
directory = Path(sys.argv[1])
write(directory / "w.bin", np.eye(8, dtype=np.float32))
path = save(
    directory / "m.onnx",
    model([delayed("w", [8, 8]), node("MatMul", ["x", "w"], ["y"])], [value("x", [1, 8])], [value("y", [1, 8])]),
)
sessions, feeds = [], []

def use():
    session = ort_delayed.InferenceSession(path)
    x = np.ones((1, 8), np.float32)
    sessions.append(weakref.ref(session))
    feeds.append(weakref.ref(x))
    (directory / "w.bin").unlink(missing_ok=True)
    session.run(None, {"x": x})

gc.collect()
gc.disable()
try:
    use()
except FileNotFoundError:
    pass
else:
    raise SystemExit("it ran")
assert sessions[0]() is None and feeds[0]() is None
"""


def test_a_session_whose_run_failed_goes_at_once_and_not_with_the_garbage(tmp_path: Path) -> None:
    run_snippet(GOES_AT_ONCE, tmp_path)
