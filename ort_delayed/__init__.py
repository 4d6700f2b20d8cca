"""ort-delayed: ONNX Runtime models whose weights arrive when they are needed."""

from ort_delayed.library import get_library_path, register_custom_ops
from ort_delayed.ops.errors import DelayedInitializerError
from ort_delayed.session import InferenceSession, prepare_model

__all__ = [
    "DelayedInitializerError",
    "InferenceSession",
    "get_library_path",
    "prepare_model",
    "register_custom_ops",
]
