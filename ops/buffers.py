"""Buffers that payloads are read into and that are used again, so that a run does not fault in fresh pages per weight.

A buffer is lent as a numpy array. onnxruntime-extensions copies from that array after the op has returned and then
drops it; there is no call-back for that, so the array's own end is the moment at which its buffer is idle again.
"""

from __future__ import annotations

import mmap
import sys
import threading
import weakref

import numpy as np
import numpy.typing as npt

from ort_delayed.loader import platform

__all__ = ["BufferPool"]

_SMALL_BYTES = 64 << 10
_KEEP_BYTES = 16 << 20


class BufferPool:
    """Lends buffers of any size and keeps at most a few that are not in use.

    Anonymous mappings, not ``malloc``: glibc keeps freed blocks of up to 32 MiB, a mapping goes back at once.
    """

    def __init__(self) -> None:
        # Reentrant: a garbage collection may give an array back at any moment, also while its thread holds the lock.
        self._lock = threading.RLock()
        self._idle: list[mmap.mmap] = []
        self._lent: dict[int, weakref.ref[npt.NDArray[np.uint8]]] = {}

    def lend(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """A writable, contiguous array of ``nbytes`` bytes; its buffer is idle again when the array is collected."""
        if nbytes <= _SMALL_BYTES:
            return np.empty(nbytes, np.uint8)
        buffer = self._take(nbytes)
        array = np.frombuffer(buffer, np.uint8, nbytes)
        key = id(array)
        # The reference has to be kept: a collected weak reference calls nothing.
        self._lent[key] = weakref.ref(array, lambda _: self._give_back(key, buffer))
        return array

    def trim(self) -> None:
        """Give up idle buffers of more than 16 MiB; called when a run is over."""
        with self._lock:
            self._idle = [b for b in self._idle if len(b) <= _KEEP_BYTES][:1]

    def _take(self, nbytes: int) -> mmap.mmap:
        with self._lock:
            for index, buffer in enumerate(self._idle):
                # One that is far too large is not taken: after a huge embedding it would stay for the whole run.
                if nbytes <= len(buffer) <= max(4 * nbytes, _KEEP_BYTES):
                    return self._idle.pop(index)
            self._idle.clear()
        try:
            return platform.map_memory(nbytes)
        except OSError as error:
            raise MemoryError(f"no {nbytes} bytes can be mapped") from error

    def _give_back(self, key: int, buffer: mmap.mmap) -> None:
        self._lent.pop(key, None)
        if sys.is_finalizing():  # a daemon thread that was ended there may have held the lock
            return
        with self._lock:
            # One idle buffer is what a sequential run needs; parallel runs map their own.
            if not self._idle or len(self._idle[0]) < len(buffer):
                self._idle = [buffer]
