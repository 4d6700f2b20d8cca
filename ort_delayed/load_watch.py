"""Watching a RAM budget while ONNX Runtime builds a session, and cancelling the load when it is exceeded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import onnxruntime

from ort_delayed.loader.budget import RamBudgetExceeded, RamProbeUnavailable
from ort_delayed.loader.probe import PeakRamProbe

__all__ = ["load_cancelled_beyond_budget"]

_INTERVAL_SECONDS = 0.002


@contextmanager
def load_cancelled_beyond_budget(
    options: onnxruntime.SessionOptions, probe: PeakRamProbe, operation: str
) -> Iterator[None]:
    """While a session is built from ``options`` in this context, ``probe`` is checked from another thread.

    ONNX Runtime releases the GIL while it builds and looks at the options' cancellation flag between its steps. The
    flag is cleared in the end, whatever happened, so the options can be used again.

    Args:
        options: what the session is built from; nobody else builds from them at the same time.
        probe: started; the last check at the end of the context counts what the thread was too late for.
        operation: what messages call the build.

    Raises:
        RamBudgetExceeded, RamProbeUnavailable: from the probe; ONNX Runtime's exception is the cause.
    """
    done = threading.Event()
    failed: list[RamBudgetExceeded | RamProbeUnavailable] = []

    def watch() -> None:
        while not done.wait(_INTERVAL_SECONDS):
            try:
                probe.checkpoint(operation)
            except (RamBudgetExceeded, RamProbeUnavailable) as error:
                failed.append(error.with_traceback(None))
                options.set_load_cancellation_flag(True)
                return

    watcher = threading.Thread(target=watch, name="ort_delayed load watch", daemon=True)
    watcher.start()
    try:
        yield
    except Exception as cancelled:
        done.set()
        watcher.join()
        if failed:
            # Popped: it refers to this frame, and would keep the session until garbage is collected.
            raise failed.pop() from cancelled
        raise
    finally:
        done.set()
        watcher.join()
        options.set_load_cancellation_flag(False)
    if failed:
        raise failed.pop()
    probe.checkpoint(operation)
