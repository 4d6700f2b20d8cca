"""A thread that looks at memory while a run or a construction is under way, and sleeps otherwise.

It has to act long before the limit: a look can be late, because it needs the GIL and a free core.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

__all__ = ["Watcher"]


class Watcher:
    """Calls ``look`` again and again between :meth:`start` and :meth:`stop`; owns the thread, so close it.

    Args:
        look: looks, acts, and returns the seconds until the next look.
        failed: gets what ``look`` raised. The thread has ended then; the next :meth:`start` begins another one. It
            must see to it that what is under way does not go on unwatched.
    """

    def __init__(self, look: Callable[[], float], failed: Callable[[BaseException], None]) -> None:
        self._look = look
        self._failed = failed
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._users = 0
        self._awake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look from now on. Calls nest, and may come from several threads."""
        if self._pid != os.getpid():
            self._reset()  # a fork copies no threads, and perhaps a lock that one of them held
        with self._lock:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._watch, name="ort_delayed memory watch", daemon=True)
                thread.start()  # where the system has no thread left this raises, and nothing has been started
                self._thread = thread
            self._users += 1
            self._awake.set()

    def stop(self) -> None:
        """End what the matching :meth:`start` began."""
        with self._lock:
            self._users -= 1
            if self._users <= 0:
                self._awake.clear()

    def close(self) -> None:
        """End the thread and wait until it has ended. Safe to call twice, in a forked child, and from the thread."""
        if self._pid != os.getpid():
            return
        self._closed = True
        self._awake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def _watch(self) -> None:
        while True:
            self._awake.wait()
            if self._closed:
                return
            try:
                pause = self._look()
            except BaseException as error:  # nobody could catch it on this thread: the owner tells who waits
                # First: a start from here on begins another thread, and who started before is told.
                with self._lock:
                    self._thread = None
                self._failed(error)
                return
            time.sleep(pause)
