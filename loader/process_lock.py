"""Locks of the whole process that a forked child finds free."""

from __future__ import annotations

import os
import threading

__all__ = ["ProcessLock"]


class ProcessLock:
    """A lock for the process's lifetime, for ``with``. In a forked child it is free.

    The thread that held it when the process was forked is not in the child, and would never release it there.
    """

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()
