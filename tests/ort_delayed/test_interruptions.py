"""Signals, recursion, tracing, forks, memory, and the end of the interpreter: nothing aborts the process.

Each snippet runs in a process of its own; an abort is an exit status, a deadlock a timeout.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from subprocesses import run_snippet

SETUP = """
import gc, os, random, signal, sys, threading, time
import numpy as np
import onnxruntime, ort_delayed
from interruptible import X, chain, check, slow_reads, write_weight
directory = sys.argv[1]
write_weight(directory)
"""

FIFTY_INTERRUPTS = """
slow_reads(0.002)
session = chain(directory)
check(session)
generator = random.Random(int(sys.argv[2]))
interrupted = 0
for _ in range(50):
    timer = threading.Timer(generator.uniform(0, 0.03), os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        session.run(None, {"x": X})
        timer.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        interrupted += 1
        timer.join()
    check(session)
assert interrupted >= 45, interrupted
assert threading.active_count() <= 3, threading.enumerate()
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_fifty_interrupts(seed: int, tmp_path: Path) -> None:
    run_snippet(SETUP + FIFTY_INTERRUPTS, tmp_path, str(seed))


def test_an_interrupt_during_an_interrupt(tmp_path: Path) -> None:
    run_snippet(
        SETUP
        + """
slow_reads(0.01)
session = chain(directory)
check(session)
def interrupt_eight_times():
    time.sleep(0.03)
    for _ in range(8):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.002)

for _ in range(10):
    killer = threading.Thread(target=interrupt_eight_times)
    killer.start()
    ended = False
    try:
        session.run(None, {"x": X})
    except KeyboardInterrupt:
        ended = True
    for _ in range(9):  # each of the eight may interrupt this waiting
        try:
            killer.join()
            time.sleep(0.01)
        except KeyboardInterrupt:
            pass
    assert ended
    check(session)
""",
        tmp_path,
    )


def test_options_of_the_caller_are_not_left_terminated(tmp_path: Path) -> None:
    run_snippet(
        SETUP
        + """
slow_reads(0.005)
session = chain(directory)
run_options = onnxruntime.RunOptions()
threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    session.run(None, {"x": X}, run_options)
    raise SystemExit("not interrupted")
except KeyboardInterrupt:
    pass
assert run_options.terminate is False
assert np.array_equal(session.run(None, {"x": X}, run_options)[0], X)
""",
        tmp_path,
    )


@pytest.mark.parametrize("method", ["run", "run_with_iobinding"])
def test_an_alarm_whose_handler_raises(method: str, tmp_path: Path) -> None:
    run_snippet(
        SETUP
        + """
class Late(Exception):
    pass

def handler(signum, frame):
    raise Late

slow_reads(0.002)
signal.signal(signal.SIGALRM, handler)
session = chain(directory)
late = 0
for n in range(20):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.001 * n)
        if sys.argv[2] == "run":
            session.run(None, {"x": X})
        else:
            binding = session.io_binding()
            binding.bind_cpu_input("x", X)
            binding.bind_output("y")
            session.run_with_iobinding(binding)
        time.sleep(0.05)
    except Late:
        late += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    check(session)
assert late == 20, late
""",
        tmp_path,
        method,
    )


def test_runs_near_the_recursion_limit(tmp_path: Path) -> None:
    run_snippet(
        SETUP
        + """
session = chain(directory)
check(session)
outcomes = set()

def deep(frames):
    if frames:
        return deep(frames - 1)
    try:
        outcomes.add(np.array_equal(session.run(None, {"x": X})[0], X))
    except RecursionError:
        outcomes.add("RecursionError")

for left in range(3, 60):
    depth = len(__import__("inspect").stack())
    deep(sys.getrecursionlimit() - depth - left)
assert outcomes <= {True, "RecursionError"}, outcomes
check(session)
""",
        tmp_path,
    )


def test_garbage_collection_around_runs(tmp_path: Path) -> None:
    run_snippet(
        SETUP
        + """
gc.set_threshold(1, 1, 1)
session = chain(directory)
for n in range(20):
    check(session)
    cycle = [chain(directory)]
    cycle.append(cycle)
    del cycle
    os.rename(f"{directory}/w.bin", f"{directory}/gone.bin")
    try:
        session.run(None, {"x": X})
        raise SystemExit("it ran")
    except FileNotFoundError as error:
        keep = error
    os.rename(f"{directory}/gone.bin", f"{directory}/w.bin")
gc.collect()
check(session)
""",
        tmp_path,
    )


@pytest.mark.parametrize("tracer", ["settrace", "setprofile"])
def test_tracing(tracer: str, tmp_path: Path) -> None:
    run_snippet(
        SETUP
        + """
seen = set()
def trace(frame, event, argument):
    seen.add(frame.f_code.co_name)
    return trace
for module in (sys, threading):
    getattr(module, sys.argv[2])(trace)
session = chain(directory)
check(session)
os.unlink(f"{directory}/w.bin")
try:
    session.run(None, {"x": X})
    raise SystemExit("it ran")
except FileNotFoundError:
    pass
write_weight(directory)
check(session)
""",
        tmp_path,
        tracer,
    )


@pytest.mark.parametrize("tracer", ["settrace", "setprofile"])
def test_a_trace_function_that_raises(tracer: str, tmp_path: Path) -> None:
    run_snippet(
        SETUP
        + """
armed = False
def trace(frame, event, argument):
    if armed and threading.current_thread() is not threading.main_thread():
        raise RuntimeError("from the trace function")
    return trace
getattr(threading, sys.argv[2])(trace)
session = chain(directory)
check(session)
armed = True
check(session)
""",
        tmp_path,
        tracer,
    )


def test_warnings_as_errors(tmp_path: Path) -> None:
    run_snippet(
        SETUP
        + """
session = chain(directory)
check(session)
os.unlink(f"{directory}/w.bin")
try:
    session.run(None, {"x": X})
    raise SystemExit("it ran")
except FileNotFoundError:
    pass
""",
        tmp_path,
        python_options=("-W", "error::RuntimeWarning", "-W", "error::ResourceWarning", "-W", "error::UserWarning"),
    )


def test_a_logging_handler_that_raises(tmp_path: Path) -> None:
    run_snippet(
        SETUP
        + """
import logging
class Raising(logging.Handler):
    def handle(self, record):
        raise KeyboardInterrupt
logging.getLogger("ort_delayed").addHandler(Raising())
chain(directory)
options = onnxruntime.SessionOptions()
session = onnxruntime.InferenceSession(ort_delayed.prepare_model(f"{directory}/m.onnx", options), options)
os.unlink(f"{directory}/w.bin")
try:
    session.run(None, {"x": X})
    raise SystemExit("it ran")
except Exception as error:
    assert "w.bin" in str(error), error
write_weight(directory)
check(session)
""",
        tmp_path,
    )


def test_fork(tmp_path: Path) -> None:
    run_snippet(
        SETUP
        + """
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = chain(directory, sess_options=options)
check(session)
for _ in range(5):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            check(session)
            check(chain(directory, sess_options=options))
            del session
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    check(session)
""",
        tmp_path,
    )


def test_a_forked_child_that_ends_in_the_usual_way(tmp_path: Path) -> None:
    run_snippet(
        SETUP
        + """
import multiprocessing
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = chain(directory, sess_options=options)
check(session)
context = multiprocessing.get_context("fork")
for _ in range(3):
    process = context.Process(target=check, args=(session,))
    process.start()
    process.join(30)
    assert process.exitcode == 0, process.exitcode
check(session)
""",
        tmp_path,
    )


MEMORY = """
import resource
from delayed_models import delayed, model, node, save, value
nbytes = 256 << 20
with open(f"{directory}/large.bin", "wb") as file:
    file.truncate(nbytes)
nodes = [delayed("w", [nbytes // 4], "large.bin"), node("Size", ["w"], ["y"])]
path = save(__import__("pathlib").Path(directory) / "large.onnx", model(nodes, [], [value("y", [], 7)]))
session = ort_delayed.InferenceSession(path)
with open("/proc/self/statm") as statm:
    mapped = int(statm.read().split()[0]) * 4096
free, hard = resource.getrlimit(resource.RLIMIT_AS)
for slack in (32 << 20, 128 << 20, 300 << 20):
    resource.setrlimit(resource.RLIMIT_AS, (mapped + slack, hard))
    try:
        session.run(None, {})
        raise SystemExit("there was memory")
    except MemoryError as error:
        assert isinstance(error, ort_delayed.DelayedInitializerError), error
        assert "268435456 bytes" in str(error), error
    except Exception as error:  # ONNX Runtime's own copy did not fit in
        assert slack > nbytes, error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (free, hard))
assert session.run(None, {})[0] == nbytes // 4
"""


def test_no_memory_for_a_payload(tmp_path: Path) -> None:
    run_snippet(SETUP + MEMORY, tmp_path)


# --- the end of the interpreter ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("daemon", [True, False])
@pytest.mark.parametrize("given_options", [True, False])
def test_the_interpreter_ends_during_a_run_of_another_thread(daemon: bool, given_options: bool, tmp_path: Path) -> None:
    run_snippet(
        SETUP
        + """
slow_reads(0.01)
session = chain(directory)
run_options = onnxruntime.RunOptions() if sys.argv[3] == "True" else None

def work():
    for _ in range(3):
        session.run(None, {"x": X}, run_options)

threading.Thread(target=work, daemon=sys.argv[2] == "True").start()
time.sleep(0.03)
""",
        tmp_path,
        str(daemon),
        str(given_options),
    )


def test_the_interpreter_ends_during_asynchronous_runs(tmp_path: Path) -> None:
    for delay in ("0", "0.03"):
        run_snippet(
            SETUP
            + """
slow_reads(0.005)
session = chain(directory)
for n in range(6):
    session.run_async(None, {"x": X}, lambda *arguments: None, n)
del session
time.sleep(float(sys.argv[2]))
""",
            tmp_path,
            delay,
        )


def test_the_interpreter_is_interrupted_while_it_ends(tmp_path: Path) -> None:
    run_snippet(
        SETUP
        + """
from ort_delayed import run_threads
slow_reads(0.02)
session = chain(directory)
run_options = onnxruntime.RunOptions()
threading.Thread(target=lambda: session.run(None, {"x": X}, run_options), daemon=True).start()
time.sleep(0.03)

def interrupt():
    while run_threads._running:
        if run_threads._closing.is_set():
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.001)

threading.Thread(target=interrupt, daemon=True).start()
""",
        tmp_path,
    )


def test_sessions_that_live_until_the_end(tmp_path: Path) -> None:
    run_snippet(
        SETUP
        + """
import builtins
builtins.kept = [chain(directory) for _ in range(3)]
for session in kept:
    check(session)
cycle = [chain(directory)]
cycle.append(cycle)
check(cycle[0])
""",
        tmp_path,
    )
