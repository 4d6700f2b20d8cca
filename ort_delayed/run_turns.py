"""Runs of one session under a budget take turns, whichever threads start them.

The order in which weights are used is what the pager goes by, and with two runs at once there is none. The second one's
pages would be taken for activations, too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ort_delayed.run_threads import is_thread_of_others, threads_of_call

__all__ = ["RunTurns"]


class RunTurns:
    """Whose turn it is.

    Attributes:
        is_parallel: whether the session runs in ORT_PARALLEL mode, set once that is known.
    """

    def __init__(self) -> None:
        self.is_parallel = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._thread: int | None = None  # the one that asked for the run whose turn it is

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, and have it.

        Raises:
            RuntimeError: the run is started from inside a run of the same session, which it would wait for; or the
                session was constructed in ORT_PARALLEL mode before a fork.
        """
        if self.is_parallel and self._pid != os.getpid():
            raise RuntimeError(
                "this session was constructed in ORT_PARALLEL mode before a fork: ONNX Runtime's threads are not in "
                "this process, and a run would never end. Construct the session in this process, or sequentially"
            )
        self._refuse_to_wait_for_itself()
        with self._lock:  # the main thread can be interrupted while it waits here
            held = self._lock
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                if held is self._lock:  # else this is a forked child, in which it is nobody's any more
                    self._thread = None

    def after_fork(self) -> None:
        """In a forked child: it is nobody's turn."""
        self._lock, self._thread = threading.Lock(), None

    def _refuse_to_wait_for_itself(self) -> None:
        # Of an operator on a thread of ONNX Runtime's pool, which it uses in parallel mode, it cannot be told what run
        # it belongs to.
        is_inside = self._thread in threads_of_call() or (
            self.is_parallel and self._thread is not None and is_thread_of_others()
        )
        if is_inside:
            raise RuntimeError(
                "a run of a session under a RAM budget was started from inside a run of the same session: its runs "
                "take turns, so this one would wait for ever. Use a second session, with a budget of its own"
            )
