"""Settings that ONNX Runtime needs while it builds a session under a budget, lent to the caller's SessionOptions.

The caller's options are the caller's: what is set is put back. Options that nobody else will use are left as they
are, because ONNX Runtime logs a warning each time an entry is set that was there already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

import onnxruntime

__all__ = ["building_in_place"]

_PREPACKING_ENTRY = "session.disable_prepacking"


@contextmanager
def building_in_place(
    options: onnxruntime.SessionOptions, *, prepacking: bool, at_most_extended: bool, are_private: bool
) -> Iterator[None]:
    """While a session is built: weights are used where they are mapped, and activations are allocated one by one.

    With a memory pattern a second run takes one planned block for its activations, beside those that the first run
    has left in the arena: twice the memory, for each shape of inputs.

    Args:
        options: a lock on them is held.
        prepacking: whether kernels may take weights packed (a packed model's stand in its file).
        at_most_extended: whether optimizations beyond ORT_ENABLE_EXTENDED are left out. Those cast float16 weights to
            float32, and change the layout of convolutions' weights, once and for all, in memory.
        are_private: whether nobody else uses the options.
    """
    pattern, options.enable_mem_pattern = options.enable_mem_pattern, False
    level, levels = options.graph_optimization_level, onnxruntime.GraphOptimizationLevel
    modest = (levels.ORT_DISABLE_ALL, levels.ORT_ENABLE_BASIC, levels.ORT_ENABLE_EXTENDED)
    if at_most_extended and level not in modest:
        options.graph_optimization_level = levels.ORT_ENABLE_EXTENDED
    previous = "0"  # the default; an entry that was not there stays with it
    with contextlib.suppress(RuntimeError):
        previous = options.get_session_config_entry(_PREPACKING_ENTRY)
    wanted = "0" if prepacking else "1"
    if previous != wanted:
        options.add_session_config_entry(_PREPACKING_ENTRY, wanted)
    try:
        yield
    finally:
        options.enable_mem_pattern = pattern
        options.graph_optimization_level = level
        if previous != wanted and not are_private:
            options.add_session_config_entry(_PREPACKING_ENTRY, previous)
