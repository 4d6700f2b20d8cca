"""The raw little-endian bytes of a TensorProto, wherever its values stand: exactly, bit for bit."""

from __future__ import annotations

import numpy as np
import onnx

from ort_delayed.loader.element_types import ElementType, element_type_from_onnx
from ort_delayed.loader.external_data import external_tensor, has_external_data
from ort_delayed.loader.quoting import listed, quoted
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.skeletons import Skeleton

__all__ = ["MalformedTensorError", "float_list_bytes", "inline_bytes", "tensor_on_disk"]

_CARRIERS = {"float32": "float_data", "complex64": "float_data", "float64": "double_data", "complex128": "double_data"}
_CARRIERS |= {"int64": "int64_data", "uint64": "uint64_data", "uint32": "uint64_data"}
_INT32_CARRIER = "int32_data"  # for all others


class MalformedTensorError(ValueError):
    """A tensor's values are not what its element type and shape need."""


def tensor_on_disk(tensor: onnx.TensorProto, skeleton: Skeleton) -> TensorOnDisk | None:
    """Where the raw bytes of a tensor stand: in another file, or in the model file itself; None: in the proto.

    Raises:
        ExternalDataError, MalformedTensorError: the tensor does not say, or says something impossible.
    """
    if has_external_data(tensor):
        return external_tensor(tensor, skeleton.directory)
    lifted = skeleton.lifted(tensor)
    if lifted is None:
        return None
    element_type = _element_type(tensor)
    if lifted.field not in ("raw_data", _CARRIERS.get(element_type.name)):
        raise MalformedTensorError(f"tensor '{tensor.name}' of type {element_type} has its values in {lifted.field}")
    shape = tuple(tensor.dims)
    _check_size(tensor, element_type, lifted.range.nbytes)
    return TensorOnDisk(tensor.name, skeleton.path, lifted.range.offset, lifted.range.nbytes, shape, element_type)


def inline_bytes(tensor: onnx.TensorProto) -> bytes:
    """The raw bytes of a tensor whose values the proto holds, in ``raw_data`` or in a typed field.

    Values of narrow types in ``int32_data`` are narrowed as ONNX Runtime does it.

    Raises:
        MalformedTensorError: not as many values as the shape needs, or a type without raw bytes.
    """
    element_type = _element_type(tensor)
    if tensor.HasField("raw_data"):
        data: bytes = tensor.raw_data
    else:
        data = _typed_bytes(tensor, element_type)
    _check_size(tensor, element_type, len(data))
    return data


def float_list_bytes(attribute: onnx.AttributeProto) -> bytes:
    """The raw float32 bytes of an attribute's ``floats``."""
    # Through Python floats a signalling NaN would become a quiet one; on the wire each value is a tag and four bytes.
    only = onnx.AttributeProto()
    only.floats.MergeFrom(attribute.floats)
    wire = np.frombuffer(only.SerializeToString(), np.uint8)
    return wire.reshape(-1, 5)[:, 1:].tobytes()


def _typed_bytes(tensor: onnx.TensorProto, element_type: ElementType) -> bytes:
    field = _CARRIERS.get(element_type.name, _INT32_CARRIER)
    values = getattr(tensor, field)
    if field in ("float_data", "double_data"):
        # Packed on the wire: behind tag and length stand the raw bytes, NaN payloads included.
        only = onnx.TensorProto()
        getattr(only, field).MergeFrom(values)
        wire: bytes = only.SerializeToString()
        return wire[len(wire) - len(values) * (4 if field == "float_data" else 8) :]
    wide = np.fromiter(values, np.uint64 if field == "uint64_data" else np.int64, len(values))
    if element_type.name == "bool":
        wide = (wide != 0).astype(np.int64)
    # Packed 4-bit values stand in int32_data a byte each, floats of 16 and 8 bits as their bits.
    size = max(1, element_type.bits // 8)
    data: bytes = wide.astype(f"<u{size}").tobytes()
    return data


def _element_type(tensor: onnx.TensorProto) -> ElementType:
    found = element_type_from_onnx(tensor.data_type)
    if found is None:
        raise MalformedTensorError(f"tensor '{tensor.name}' has no raw bytes: its data_type is {tensor.data_type}")
    return found


def _check_size(tensor: onnx.TensorProto, element_type: ElementType, found: int) -> None:
    shape = list(tensor.dims)
    if any(d < 0 for d in shape) or found != element_type.nbytes(shape):
        raise MalformedTensorError(
            f"tensor {quoted(tensor.name)} of type {element_type} and shape {listed(shape)} holds {found} bytes of "
            f"values, {element_type.nbytes(shape)} are needed"
        )
