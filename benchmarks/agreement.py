"""Whether two ways of running computed the same: the time of a wrong result is not worth printing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cases import Case

__all__ = ["compare_outputs"]

# Of the largest number of the outputs. float16 has ten bits, and a quantized value that falls to the other side of a
# step is another step in all layers after it.
_CLOSE = {"float16": 0.03, "int8": 0.03}
_CLOSE_ELSE = 1e-3


def compare_outputs(case: Case, group: Sequence[Case], saved: Mapping[str, str]) -> dict[str, Any]:
    """``agreement`` and ``difference`` of a case with the one that it should agree with.

    ``saved`` has the file of each way's outputs, by the way's name.
    """
    way = case.way
    names = {c.way.name for c in group}
    expected = way.same_as if way.same_as in names else way.reference
    if expected == way.name or expected not in names:
        return {}
    if not (os.path.exists(saved[way.name]) and os.path.exists(saved[expected])):
        return {}  # refused
    with np.load(saved[way.name]) as own, np.load(saved[expected]) as other:
        if own.files != other.files:
            return {"agreement": "differ"} if own.files else {}  # a floor computes nothing
        pairs = [(own[name], other[name]) for name in other.files]
    same = all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)
    if same:
        return {"agreement": "same bytes"}
    if any(a.shape != b.shape for a, b in pairs):
        return {"agreement": "differ"}
    difference = max(float(np.abs(a - b).max()) for a, b in pairs)
    most = _CLOSE.get(case.model.kind, _CLOSE_ELSE) * max(float(np.abs(b).max()) for _, b in pairs)
    # Not `difference > most`: that is false for NaN.
    close = difference <= most and expected != way.same_as
    return {"agreement": "close" if close else "differ", "difference": difference}
