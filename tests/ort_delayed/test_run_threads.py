"""The threads that ONNX Runtime runs on: results, errors, reuse, interruption, and their end."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from ort_delayed import run_threads
from ort_delayed.run_threads import RunThreads


@pytest.fixture
def threads() -> RunThreads:
    return RunThreads()


def ignore(at_exit: bool) -> None:
    pass


def test_results_and_errors(threads: RunThreads) -> None:
    assert threads.call(lambda: 42, ignore) == 42
    error = ValueError("on purpose")

    def fail() -> None:
        raise error

    with pytest.raises(ValueError, match="on purpose") as caught:
        threads.call(fail, ignore)
    assert caught.value is error
    assert threads.call(threading.get_ident, ignore) != threading.get_ident()
    threads.close()


def test_one_thread_serves_runs_one_after_the_other(threads: RunThreads) -> None:
    assert len({threads.call(threading.get_ident, ignore) for _ in range(20)}) == 1
    assert len(threads._threads) == 1
    threads.close()


def test_calls_at_once_have_threads_of_their_own(threads: RunThreads) -> None:
    barrier = threading.Barrier(4, timeout=30)
    callers = [threading.Thread(target=lambda: threads.call(barrier.wait, ignore)) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert len(threads._threads) == 4
    threads.close()


def test_started_functions_run_a_few_at_a_time(threads: RunThreads) -> None:
    lock, running, most, done = threading.Lock(), [0], [0], threading.Semaphore(0)

    def work() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.005)
        with lock:
            running[0] -= 1
        done.release()

    for _ in range(30):
        threads.start(work, ignore)
    for _ in range(30):
        assert done.acquire(timeout=30)
    assert 1 <= most[0] <= run_threads._STARTED_AT_ONCE
    threads.close()


def test_a_started_function_that_raises_does_not_stop_the_others(threads: RunThreads) -> None:
    done = threading.Event()

    def fail() -> None:
        raise RuntimeError

    threads.start(fail, ignore)
    threads.start(done.set, ignore)
    assert done.wait(30)
    threads.close()


def interrupted_call(threads: RunThreads, function: Callable[[], object], cancel: Callable[[bool], None]) -> None:
    """A call whose waiting is interrupted: the lock that the caller waits for raises once, as a signal would."""
    original = run_threads._Job

    class Interrupting:
        def __init__(self, lock: threading.Lock) -> None:
            self._lock, self._left = lock, 1

        def acquire(self, *arguments: object, **settings: object) -> bool:
            if self._left:
                self._left = 0
                time.sleep(0.02)
                raise KeyboardInterrupt
            return self._lock.acquire()

        def release(self) -> None:
            self._lock.release()

    class Job(original):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            self.over = Interrupting(self.over)

    run_threads._Job = Job  # type: ignore[misc]
    try:
        threads.call(function, cancel)
    finally:
        run_threads._Job = original  # type: ignore[misc]


def test_an_interruption_cancels_and_waits(threads: RunThreads) -> None:
    cancelled, ended = threading.Event(), []

    def work() -> None:
        assert cancelled.wait(30)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted_call(threads, work, lambda at_exit: cancelled.set())
    assert ended == [True]
    assert threads.call(lambda: 1, ignore) == 1
    assert not run_threads._running
    threads.close()


def test_a_thread_that_cannot_be_started(threads: RunThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(run_threads._thread, "start_new_thread", refuse)
        for call in (threads.call, threads.start):
            with pytest.raises(RuntimeError, match="can't start"):
                call(lambda: None, ignore)
    assert threads.call(lambda: 1, ignore) == 1
    done = threading.Event()
    threads.start(done.set, ignore)
    assert done.wait(30)
    threads.close()


def test_closing_from_a_thread_of_its_own_does_not_wait_for_itself(threads: RunThreads) -> None:
    begun = time.monotonic()
    threads.call(threads.close, ignore)
    assert time.monotonic() - begun < 4  # the time-out is 5 s
    threads.close()


def test_a_thread_that_ends_before_it_has_begun_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens where there is no memory for a new thread's first frame: nobody is told."""
    threads = RunThreads()
    monkeypatch.setattr(run_threads, "_STARTS_WITHIN", 0.05)
    with monkeypatch.context() as patched:
        patched.setattr(run_threads._thread, "start_new_thread", lambda function, arguments: 1)
        with pytest.raises(MemoryError, match="has not begun"):
            threads.call(lambda: 1, lambda at_exit: None)
        references = []

        def run() -> None:
            inputs = np.ones(1)
            references.append(weakref.ref(inputs))
            threads.call(functools.partial(np.sum, inputs), lambda at_exit: None)

        gc.disable()
        try:
            with contextlib.suppress(MemoryError):
                run()
            assert references[0]() is None  # no error's frames keep it until garbage is collected
        finally:
            gc.enable()
    assert threads.call(lambda: 2, lambda at_exit: None) == 2
    threads.close()


def test_a_thread_that_fails_as_it_begins_or_rests_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """No memory for what a thread notes of itself, some of the time."""

        fails = True

        def __setattr__(self, name: str, value: object) -> None:
            if self.fails:
                raise MemoryError("no memory")

    threads = RunThreads()
    with monkeypatch.context() as patched:
        patched.setattr(run_threads, "_here", Full())
        with pytest.raises(MemoryError, match="no memory"):
            threads.call(lambda: 1, lambda at_exit: None)
        patched.setattr(Full, "fails", False)
        assert threads.call(lambda: patched.setattr(Full, "fails", True) or 3, lambda at_exit: None) == 3
    assert threads.call(lambda: 4, lambda at_exit: None) == 4
    threads.close()
