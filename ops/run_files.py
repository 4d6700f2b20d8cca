"""Weight files that stay open while one run reads them, so that thousands of nodes do not each open theirs.

A run reads one file as it was opened first: replaced meanwhile, the next run reads what took its place. What a run
opens belongs to the thread that runs it, and to nobody else: runs of other threads may have begun before a file was
replaced. An operator on a thread of ONNX Runtime's pool (parallel mode), and every one in a plain
``onnxruntime.InferenceSession``, opens its file and closes it again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ort_delayed.loader.files import open_weights

__all__ = ["files_stay_open", "weights_file"]

# Weights mostly stand in one file, or in shards that are used one after the other.
_MOST_OPEN = 4


class _OpenFiles(threading.local):
    descriptors: dict[tuple[str, tuple[str, ...] | None], int] | None = None


_open = _OpenFiles()


@contextmanager
def files_stay_open() -> Iterator[None]:
    """While this lasts, :func:`weights_file` on this thread leaves up to four files open; then they are closed."""
    before = _open.descriptors
    opened = _open.descriptors = {}
    try:
        yield
    finally:
        _open.descriptors = before
        for fd in opened.values():
            _close(fd)


def weights_file(path: str, within: tuple[str, ...] | None) -> tuple[int, bool]:
    """A descriptor of the file, for reading, and whether it stays open: otherwise the caller closes it.

    Raises:
        OSError: as :func:`open_weights` does.
    """
    kept = _open.descriptors
    if kept is None:
        return open_weights(path, within=within), False
    key = (path, within)
    fd = kept.get(key)
    if fd is None:
        fd = open_weights(path, within=within)
        if len(kept) >= _MOST_OPEN:
            _close(kept.pop(next(iter(kept))))
        kept[key] = fd
    return fd, True


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # nothing was written, so nothing is lost
        os.close(fd)
