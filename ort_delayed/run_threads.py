"""Running ONNX Runtime on a thread of ours while the caller's thread waits.

Python delivers signals to the main thread, and counts recursion per thread. An exception that either raises while a
Python op is inside ONNX Runtime (Ctrl-C, an alarm, a RecursionError near the limit) crosses a ``noexcept`` frame and
aborts the process. On a thread of its own an op meets neither. The threads are made below ``threading``, because the
trace and profile functions that it installs (``threading.settrace``) may raise too.
"""

from __future__ import annotations

import _thread
import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["RunThreads", "is_thread_of_others", "threads_of_call"]

_STARTED_AT_ONCE = max(2, os.cpu_count() or 1)
_STARTS_WITHIN = 10  # seconds; a machine has to be very busy for one

_Cancel = Callable[[bool], None]
"""Ends a run before its time; told whether the interpreter ends."""


_here = threading.local()


def threads_of_call() -> tuple[int, ...]:
    """This thread, and those that wait for what it does: its run's caller, that one's caller, and so on."""
    return threading.get_ident(), *getattr(_here, "waiting", ())


def is_thread_of_others() -> bool:
    """Whether neither Python nor we started this thread: it may be one of ONNX Runtime's pool, inside a run."""
    ours = getattr(_here, "is_ours", False)
    return not ours and isinstance(threading.current_thread(), threading._DummyThread)


class _Job:
    """One call: claimed by the thread that runs it, or by a caller who was interrupted before that."""

    def __init__(self, function: Callable[[], Any], cancel: _Cancel) -> None:
        self.function: Callable[[], Any] | None = function
        self.cancel = cancel
        self.result: Any = None
        self.error: BaseException | None = None
        self.mailbox: SimpleQueue[_Job | None] | None = None
        self.is_over = False
        self.waiting: tuple[int, ...] = ()
        self.claim = threading.Lock()
        self.over = threading.Lock()
        self.over.acquire()

    def execute(self, rest: Callable[[], None]) -> None:
        """Run the function; ``rest`` is called before the caller wakes up, so that its next run finds this thread."""
        claimed = self.claim.acquire(blocking=False)
        function, self.function = self.function, None
        try:
            if claimed and function is not None:
                _running.add(self)
                if _closing.is_set():
                    raise RuntimeError("a run was started while the interpreter shuts down")
                _here.waiting = self.waiting
                self.result = function()
        except BaseException as error:
            self.error = error
        finally:
            del function  # its closure holds the caller's feeds
            try:
                _here.waiting = ()
                rest()
            finally:  # whatever there is no memory for, nobody waits for ever
                if claimed:
                    _running.discard(self)
                    self.is_over = True
                    self.over.release()

    def fail(self, error: BaseException) -> None:
        """Instead of running: nobody will."""
        if self.claim.acquire(blocking=False):
            self.error = error
            self.is_over = True
            self.over.release()

    def withdraw(self) -> bool:
        """Make sure that the job never starts; False where it has started."""
        if not self.claim.acquire(blocking=False):
            return False
        self.function = None  # it refers to the session, and the mailbox may be that of a thread that never began
        if self.mailbox is not None:
            self.mailbox.put(self)  # wakes the thread that was taken for it; it finds the job claimed, and rests
        return True

    def give_up(self) -> None:
        """After an interruption: make sure that the job never starts, or cancel it and wait until it is over."""
        if self.withdraw():
            return
        while not self.is_over:
            try:
                self.cancel(False)
                self.over.acquire()
            except BaseException:  # a second interruption must not leave ONNX Runtime running behind our back
                continue


# Jobs that are inside ONNX Runtime now. At exit they are waited for: a thread that comes back from ONNX Runtime into
# an interpreter that is gone is ended by force, in the middle of C++ frames, which aborts the process.
_running: set[_Job] = set()
_closing = threading.Event()


@atexit.register
def _finish_runs() -> None:
    _closing.set()
    for job in list(_running):
        job.cancel(True)
    while _running:
        try:
            time.sleep(0.001)
        except BaseException:  # an interruption must not let the interpreter go before the runs
            continue


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)


class RunThreads:
    """The threads of one session: as many as it had runs at once. They end when it is closed."""

    def __init__(self) -> None:
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._idle: list[SimpleQueue[_Job | None]] = []
        self._threads: list[_Thread] = []
        self._waiting: deque[_Job] = deque()
        self._serving = 0  # threads that take jobs from those that wait

    def call(self, function: Callable[[], Any], cancel: _Cancel) -> Any:
        """Call ``function`` on another thread, wait for it, and return its result or raise its exception.

        An exception in the waiting thread (Ctrl-C) calls ``cancel``, waits until the function has returned, and
        then propagates.
        """
        job = _Job(function, cancel)
        job.waiting = threads_of_call()
        del function
        try:
            self._send(job)
            job.over.acquire()
        except BaseException:
            job.give_up()
            raise
        if job.error is not None:
            try:
                raise job.error
            finally:
                job.error = None
                del job
        return job.result

    def start(self, function: Callable[[], None], cancel: _Cancel) -> None:
        """Call ``function`` on another thread and do not wait for it; only the end of the interpreter does.

        No more than one per CPU run at once, the others wait: each may hold a weight. What the function refers to is
        let go of on that thread.
        """
        job = _Job(function, cancel)
        del function
        self._forget_threads_of_a_parent()
        self._waiting.append(job)
        with self._lock:
            if self._serving >= _STARTED_AT_ONCE:
                return
            self._serving += 1
        server = _Job(self._serve_waiting, lambda at_exit: None)
        try:
            self._send(server)
        except BaseException:
            if server.withdraw():
                with self._lock:
                    self._serving -= 1
                job.withdraw()
            raise

    def _serve_waiting(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._serving -= 1
                    return
                job = self._waiting.popleft()
            job.execute(lambda: None)
            del job

    def close(self) -> None:
        """End the threads and wait until they have ended, unless it is one of them that closes."""
        if self._pid != os.getpid():
            return
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.mailbox.put(None)
        for thread in threads:
            if thread.identity != threading.get_ident():
                thread.ended.acquire(timeout=5)

    def _send(self, job: _Job) -> None:
        self._forget_threads_of_a_parent()
        try:
            job.mailbox = self._idle.pop()
        except IndexError:
            thread = _Thread()
            job.mailbox = thread.mailbox
            # Before it is started: an interrupt may come at any moment, and then it is for close to end the thread.
            self._threads.append(thread)
            try:
                thread.start(self._idle)
            except Exception:
                self._threads.remove(thread)
                raise
        job.mailbox.put(job)

    def _forget_threads_of_a_parent(self) -> None:
        if self._pid != os.getpid():
            self._start_afresh()  # a fork copies no threads


class _Thread:
    """A thread that runs jobs. It refers to no session, and to a job only while it runs it."""

    def __init__(self) -> None:
        self.mailbox: SimpleQueue[_Job | None] = SimpleQueue()
        self.ended = threading.Lock()
        self.identity = 0

    def start(self, idle: list[SimpleQueue[_Job | None]]) -> None:
        """Start it; between jobs its mailbox is in ``idle``.

        Raises:
            RuntimeError: the system has no thread left.
            MemoryError: there is no memory for what a thread needs at once. Such a thread ends without a word.
        """
        self.ended.acquire()
        begun: SimpleQueue[BaseException | None] = SimpleQueue()
        self.identity = _thread.start_new_thread(_serve, (self.mailbox, idle, self.ended, begun))
        try:
            failure = begun.get(timeout=_STARTS_WITHIN)
        except Empty:
            failure = MemoryError(f"a thread to run the model on has not begun within {_STARTS_WITHIN} s")
        if failure is not None:
            self.mailbox.put(None)
            try:
                raise failure
            finally:
                del failure  # the error refers to this frame


def _serve(
    mailbox: SimpleQueue[_Job | None],
    idle: list[SimpleQueue[_Job | None]],
    ended: threading.Lock,
    begun: SimpleQueue[BaseException | None],
) -> None:
    try:
        _here.is_ours = True
        begun.put(None)
        while (job := mailbox.get()) is not None:
            job.execute(lambda: idle.append(mailbox))
            del job
    except BaseException as error:
        begun.put(error)
        while not mailbox.empty():
            waiting = mailbox.get()
            if waiting is not None:
                waiting.fail(error)
    finally:
        ended.release()
