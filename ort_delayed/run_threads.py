"""Running ONNX Runtime on a thread of ours while the caller's thread waits.

Python delivers signals to the main thread, and counts recursion per thread. An exception that either raises while a
Python op is inside ONNX Runtime (Ctrl-C, an alarm, a RecursionError near the limit) crosses a ``noexcept`` frame and
aborts the process. On a thread of its own an op meets neither.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

__all__ = ["RunThreads"]


class _Job:
    """One call: claimed by the thread that runs it, or by a caller who was interrupted before that."""

    def __init__(self, function: Callable[[], Any], cancel: Callable[[], None]) -> None:
        self.function: Callable[[], Any] | None = function
        self.cancel = cancel
        self.result: Any = None
        self.error: BaseException | None = None
        self.mailbox: SimpleQueue[_Job | None] | None = None
        self.is_over = False
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
                self.result = function()
        except BaseException as error:
            self.error = error
        finally:
            del function  # its closure holds the caller's feeds
            rest()
            if claimed:
                _running.discard(self)
                self.is_over = True
                self.over.release()

    def give_up(self) -> None:
        """After an interruption: make sure that the job never starts, or cancel it and wait until it is over."""
        if self.claim.acquire(blocking=False):
            if self.mailbox is not None:
                self.mailbox.put(self)  # wakes the thread that was taken for it; it finds the job claimed, and rests
            return
        while not self.is_over:
            try:
                self.cancel()
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
        job.cancel()
    while _running:
        time.sleep(0.001)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)


class RunThreads:
    """The threads of one session: as many as it had runs at once. They end when it is closed."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._idle: list[SimpleQueue[_Job | None]] = []
        self._threads: list[tuple[SimpleQueue[_Job | None], threading.Thread]] = []

    def call(self, function: Callable[[], Any], cancel: Callable[[], None]) -> Any:
        """Call ``function`` on another thread, wait for it, and return its result or raise its exception.

        An exception in the waiting thread (Ctrl-C) calls ``cancel``, waits until the function has returned, and
        then propagates.
        """
        job = _Job(function, cancel)
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

    def close(self) -> None:
        """End the threads and wait until they have ended, unless it is one of them that closes."""
        if self._pid != os.getpid():
            return
        threads, self._threads = self._threads, []
        for mailbox, _ in threads:
            mailbox.put(None)
        for _, thread in threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=5)

    def _send(self, job: _Job) -> None:
        if self._pid != os.getpid():
            self._pid, self._idle, self._threads = os.getpid(), [], []  # a fork copies no threads
        try:
            job.mailbox = self._idle.pop()
        except IndexError:
            job.mailbox = SimpleQueue()
            thread = threading.Thread(
                target=_serve, args=(job.mailbox, self._idle), name="ort_delayed run", daemon=True
            )
            self._threads.append((job.mailbox, thread))
            thread.start()
        job.mailbox.put(job)


def _serve(mailbox: SimpleQueue[_Job | None], idle: list[SimpleQueue[_Job | None]]) -> None:
    """What a thread does. It refers to no session, and to a job only while it runs it."""
    while (job := mailbox.get()) is not None:
        job.execute(lambda: idle.append(mailbox))
        del job
