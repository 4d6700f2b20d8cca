"""A custom op as onnxruntime-extensions documents it: it returns an array, whose values the extension takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime

__all__ = ["STOCK_DOMAIN", "STOCK_OP", "open_stock"]

STOCK_DOMAIN, STOCK_OP = "bench", "StockWeight"
_weights: list[np.ndarray] = []


def open_stock(path: str, weights: Sequence[np.ndarray]) -> onnxruntime.InferenceSession:
    """A session on a model whose stock nodes yield these weights, by their attribute ``index``."""
    from onnxruntime_extensions import PyCustomOpDef, get_library_path, onnx_op

    is_declared = bool(_weights)
    _weights[:] = weights
    if not is_declared:  # a session would not survive a second declaration in its domain

        @onnx_op(
            op_type=f"{STOCK_DOMAIN}::{STOCK_OP}",
            inputs=[],
            outputs=[PyCustomOpDef.dt_float],
            attrs={"index": PyCustomOpDef.dt_int64},
        )
        def stock_weight(index: int) -> np.ndarray:
            return _weights[index]

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(get_library_path())
    return onnxruntime.InferenceSession(path, options)
