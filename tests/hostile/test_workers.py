"""Servers with workers: processes forked and spawned, threads that come and go, and sessions that outlive them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hostile_operations import prepare
from subprocesses import run_snippet

fork = pytest.mark.skipif(sys.platform != "linux", reason="forks, and budgets")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("sources"))


def script(directory: Path, text: str) -> Path:
    """A program in a file: a spawned process imports its parent's."""
    path = directory / "server.py"
    path.write_text(text)
    return path


SERVER = """
import multiprocessing, os, sys
from pathlib import Path
import numpy as np

sessions = {}

def start(directory):
    import ort_delayed
    directory = Path(directory)
    for name, settings in (("delayed", {}), ("cpu", {}), ("packed", {}), ("model", {"ram_budget": 256 << 20})):
        sessions[name] = ort_delayed.InferenceSession(directory / f"{name}.onnx", **settings)

def serve(request):
    name, seed = request
    from stand_ins import feeds
    return name, os.getpid(), sessions[name].run(None, feeds())[0]

def main(method, directory):
    expected = np.load(directory / "expected.npy")
    requests = [(name, i) for i in range(12) for name in ("delayed", "cpu", "packed", "model")]
    with multiprocessing.get_context(method).Pool(2, start, (str(directory),)) as pool:
        answers = pool.map(serve, requests, chunksize=1)
        pool.close()
        pool.join()
    assert len(answers) == len(requests)
    for name, pid, output in answers:
        assert pid != os.getpid()
        np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
    print(method, len({pid for _, pid, _ in answers}), "workers")

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_server_whose_workers_each_have_sessions(method: str, sources: Path, tmp_path: Path) -> None:
    if method != "spawn" and sys.platform == "win32":
        pytest.skip("no fork")
    path = script(tmp_path, SERVER)
    code = """
    import os, subprocess
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, *sys.argv[1:]], check=True, env=environment, timeout=100)
    """
    assert "workers" in run_snippet(code, path, method, sources, timeout=110)


LOCKED = """
import contextlib, os, signal, threading
from pathlib import Path
from hostile_operations import OPERATIONS
from ort_delayed.loader.process_lock import ProcessLock
sources, out = Path(sys.argv[1]), Path(sys.argv[2])
for operation in OPERATIONS.values():
    operation(sources, out)
    for path in out.iterdir():
        path.unlink()

# Every lock of a module of ours is held by a thread that the child does not have.
kinds = (ProcessLock, type(threading.Lock()), type(threading.RLock()))
modules = [m for name, m in sys.modules.items() if name.split(".")[0] == "ort_delayed"]
locks = {id(v): v for m in modules for v in vars(m).values() if isinstance(v, kinds)}
assert len(locks) >= 5, locks
held, over = threading.Event(), threading.Event()

def hold():
    with contextlib.ExitStack() as stack:
        for lock in locks.values():
            stack.enter_context(lock)
        held.set()
        over.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    status = 1
    signal.alarm(40)  # a deadlock ends here
    try:
        for operation in OPERATIONS.values():
            operation(sources, out)
            for path in out.iterdir():
                path.unlink()
        status = 0
    finally:
        os._exit(status)
status = os.waitpid(child, 0)[1]
over.set()
thread.join()
assert status == 0, os.waitstatus_to_exitcode(status)
"""


@fork
def test_a_fork_while_other_threads_hold_locks(sources: Path, tmp_path: Path) -> None:
    """Ours. What a thread inside ONNX Runtime holds when the process forks is lost to the child (docs/limits.md)."""
    run_snippet(LOCKED, sources, tmp_path)


THREADS = """
import gc, threading
from pathlib import Path
import ort_delayed
from hostile_operations import _check, left_behind
sources = Path(sys.argv[1])
MODELS = (("delayed.onnx", {}), ("cpu.onnx", {}), ("packed.onnx", {}), ("model.onnx", {"ram_budget": 256 << 20}))

def in_a_thread(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]

def round_trip():
    for name, settings in MODELS:
        # Made on one thread, which has ended; run on two others, one after the other; let go of on a fourth.
        holder = [in_a_thread(lambda: ort_delayed.InferenceSession(sources / name, **settings))]
        for _ in range(2):
            in_a_thread(lambda: _check(holder[0], sources))
        in_a_thread(holder.clear)

round_trip()
before = left_behind()
for _ in range(5):
    round_trip()
assert left_behind() == before, (before, left_behind())
"""


@fork
def test_a_session_made_run_and_dropped_on_different_threads(sources: Path) -> None:
    run_snippet(THREADS, sources)


COLLECTED = """
import gc, itertools, random, weakref
from pathlib import Path
import numpy as np, onnxruntime, ort_delayed
from hostile_operations import left_behind
from stand_ins import feeds
sources = Path(sys.argv[1])
expected = np.load(sources / "expected.npy")

def of_ours(name, **settings):
    options = onnxruntime.SessionOptions()
    session = ort_delayed.InferenceSession(sources / name, options, **settings)
    binding = session.io_binding()
    for key, array in feeds().items():
        binding.bind_cpu_input(key, array)
    binding.bind_output("logits")
    session.run_with_iobinding(binding)
    return {"options": options, "session": session, "binding": binding, "values": binding.get_outputs()}

def prepared():
    options = onnxruntime.SessionOptions()
    model = ort_delayed.prepare_model(sources / "delayed.onnx", options)
    session = onnxruntime.InferenceSession(model, options)
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(session.run(None, feeds())[0])]
    return {"options": options, "model": model, "session": session, "values": values}

def installed():
    options = onnxruntime.SessionOptions()
    model = ort_delayed.stream_install(sources / "model.onnx", options, ram_budget=256 << 20)
    session = model.create_session()
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(session.run(None, feeds())[0])]
    return {"options": options, "installed": model, "session": session, "values": values}

MAKERS = [lambda: of_ours("delayed.onnx"), lambda: of_ours("model.onnx", ram_budget=256 << 20), prepared, installed]

def drop(things, order):
    for name in order:
        thing = things.pop(name)
        if name == "values":
            np.testing.assert_allclose(thing[0].numpy(), expected, rtol=1e-4, atol=1e-5)
        del thing
        if "session" in things:
            np.testing.assert_allclose(things["session"].run(None, feeds())[0], expected, rtol=1e-4, atol=1e-5)

for make in MAKERS:
    drop(make(), list(make()))
before = left_behind()
generator = random.Random(1)
for make in MAKERS:
    orders = list(itertools.permutations(make()))
    for order in generator.sample(orders, 5):
        drop(make(), order)
    things = make()
    things["itself"] = things  # and once by the collector, in an order of its own
    del things
assert left_behind() == before, (before, left_behind())
"""


@fork
def test_collection_in_any_order(sources: Path) -> None:
    run_snippet(COLLECTED, sources)


EXIT = """
import builtins, threading, time
from pathlib import Path
import numpy as np, onnxruntime, ort_delayed
from hostile_operations import _check
from stand_ins import feeds
sources = Path(sys.argv[1])
options = onnxruntime.SessionOptions()
installed = ort_delayed.stream_install(sources / "model.onnx", options, ram_budget=256 << 20)
builtins.kept = [
    ort_delayed.InferenceSession(sources / "model.onnx", ram_budget=256 << 20),
    ort_delayed.InferenceSession(sources / "packed.onnx", ram_budget=256 << 20),
    ort_delayed.InferenceSession(sources / "delayed.onnx"),
    ort_delayed.InferenceSession(sources / "cpu.onnx"),
    # Without delayed nodes and without a budget, runs are ONNX Runtime's own.
    ort_delayed.InferenceSession(sources / "packed.onnx"),
    installed.create_session(),
]
builtins.groups = ort_delayed.StreamingWeightLoader(sources / "artifacts", ram_budget=256 << 20).iter_layer_groups()
builtins.group = next(builtins.groups)  # mapped, its probe open
for session in kept:
    _check(session, sources)

def run(session):
    while True:
        session.run(None, feeds())

if sys.argv[2] != "idle":
    for session in kept[:4]:
        threading.Thread(target=run, args=(session,), daemon=True).start()
    time.sleep(float(sys.argv[2]))
cycle = [kept]
cycle.append(cycle)
print("ends")
"""


@fork
@pytest.mark.parametrize("after", ["idle", "0.05"])
def test_the_interpreter_ends_with_live_sessions_of_every_kind(after: str, sources: Path) -> None:
    """While daemon threads run them, or not. (In plain ONNX Runtime such a thread aborts the process.)"""
    assert "ends" in run_snippet(EXIT, sources, after)


EXIT_LOCKED = """
import builtins, threading
from pathlib import Path
import ort_delayed
from ort_delayed.loader import resident_memory
from ort_delayed.ops.buffers import BufferPool
held = threading.Event()
pool = BufferPool()

def hold():
    with resident_memory._recorder._lock, pool._lock:
        held.set()
        threading.Event().wait()

loader = ort_delayed.StreamingWeightLoader(Path(sys.argv[1]) / "artifacts", ram_budget=1 << 28)
builtins.groups = loader.iter_layer_groups()
builtins.group = next(builtins.groups)
builtins.array = pool.lend(1 << 20)
threading.Thread(target=hold, daemon=True).start()
held.wait()
print("ends")
"""


@fork
def test_the_interpreter_ends_though_a_daemon_thread_was_ended_with_locks_in_its_hands(sources: Path) -> None:
    """What is finalised at the very end, a stream that was left half way and a lent buffer, waits for nobody."""
    assert "ends" in run_snippet(EXIT_LOCKED, sources, timeout=30)


SIGNALS = """
import random, signal, time
from pathlib import Path
import onnxruntime
onnxruntime.set_default_logger_severity(4)
from hostile_operations import OPERATIONS, contents, is_typed, left_behind
sources, out, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
operation = OPERATIONS[name]

def once():
    operation(sources, out)
    made = contents(out)
    for path in out.iterdir():
        path.unlink()
    return made

signal.signal(signal.SIGALRM, signal.default_int_handler)  # raises as Ctrl-C does, and is punctual
expected = once()
began = time.perf_counter()
once()
seconds = time.perf_counter() - began
left = left_behind()
before = contents(sources)
generator = random.Random(int(sys.argv[4]))
interrupted = done = 0
for _ in range(16):
    try:
        signal.setitimer(signal.ITIMER_REAL, generator.uniform(0.0001, seconds))
        operation(sources, out)
        signal.setitimer(signal.ITIMER_REAL, 0)
        done += 1
    except KeyboardInterrupt:
        interrupted += 1
    names = sorted(str(p.relative_to(out)) for p in out.rglob("*"))
    assert not [n for n in names if "partial" in n or "packing" in n], names
    assert contents(out) in ({}, expected), names
    for path in out.iterdir():
        path.unlink()
assert contents(sources) == before
# An interrupt that comes in a finalizer is ignored by Python, and the finalizer with it: now and then that is one.
allowed = (2, 2, 12)
assert all(now <= then + more for now, then, more in zip(left_behind(), left, allowed)), (left, left_behind())
assert once() == expected
print(name, f"{seconds:.3f} s,", interrupted, "interrupted,", done, "done")
assert interrupted > 4
"""


@fork
@pytest.mark.parametrize("name", ["file", "budget", "stream", "install", "convert", "pack"])
def test_interrupts_in_every_phase(name: str, sources: Path, tmp_path: Path) -> None:
    """Constructing and running, streaming, installing, writing: Ctrl-C at random moments of the whole of it."""
    run_snippet(SIGNALS, sources, tmp_path, name, "11", timeout=120)
