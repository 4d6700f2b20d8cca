"""Weights on disk: where each tensor's bytes are, and how they are read. Knows no ONNX Runtime."""

from ort_delayed.loader.element_types import ElementType
from ort_delayed.loader.tensor_on_disk import TensorOnDisk

__all__ = ["ElementType", "TensorOnDisk"]
