"""ONNX external data: from a TensorProto's entries to the record of where its bytes are.

Source: the ONNX external-data specification (keys location, offset, length, checksum) and what ONNX Runtime accepts
beyond it: ``length`` absent or 0 means what the shape needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import onnx

from ort_delayed.loader.element_types import element_type_from_onnx, onnx_type_name
from ort_delayed.loader.quoting import listed, quoted
from ort_delayed.loader.tensor_on_disk import TensorOnDisk

__all__ = ["ExternalDataError", "external_tensor", "has_external_data", "nameable", "set_external_data"]

_INT64_MAX = 2**63 - 1


class ExternalDataError(ValueError):
    """The external-data entries of a tensor do not say where its bytes are."""


def has_external_data(tensor: onnx.TensorProto) -> bool:
    """Whether the tensor's bytes stand in another file than the model."""
    return tensor.data_location == onnx.TensorProto.EXTERNAL


def nameable(path: str) -> str:
    """The path itself, where a model can name it.

    Raises:
        ExternalDataError: it is not UTF-8 text, which a proto holds and ONNX Runtime takes for paths.
    """
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ExternalDataError(
            f"the path {quoted(path)} is not UTF-8 text, so no model can name it, and ONNX Runtime does not open it: "
            "rename it"
        ) from error
    return path


def external_tensor(tensor: onnx.TensorProto, model_directory: str) -> TensorOnDisk:
    """The record of an external tensor; ``location`` is taken relative to ``model_directory`` (absolute path).

    Nothing is opened and no link is resolved. An absolute location is taken as it stands.

    Raises:
        ExternalDataError: location missing or empty, offset or length not a non-negative number, a length that
            is not what type and shape need, negative or overflowing dims, a type without raw storage.
    """
    entries = {e.key: e.value for e in tensor.external_data}
    where = f"initializer {quoted(tensor.name)}: external data"
    location = entries.get("location", "")
    if not location or "\0" in location:
        raise ExternalDataError(f"{where} has no usable 'location', found {quoted(location)}")
    element_type = element_type_from_onnx(tensor.data_type)
    if element_type is None:
        raise ExternalDataError(f"{where} of type {onnx_type_name(tensor.data_type)} has no raw storage")
    shape = tuple(tensor.dims)
    if any(d < 0 for d in shape) or (nbytes := element_type.nbytes(shape)) > _INT64_MAX:
        raise ExternalDataError(f"{where}: the dims {listed(shape)} are not a shape of a tensor that can be stored")
    offset = _number(entries, "offset", where)
    length = _number(entries, "length", where)
    if length not in (0, nbytes):
        raise ExternalDataError(
            f"{where}: 'length' is {length}, a tensor of {element_type} and shape {listed(shape)} takes {nbytes} bytes"
        )
    # Not normalised: below a linked directory, "a/../b" is not "b".
    return TensorOnDisk(tensor.name, os.path.join(model_directory, location), offset, nbytes, shape, element_type)


def set_external_data(
    tensor: onnx.TensorProto, location: str, offset: int, length: int, *, keep: Iterable[str] = ()
) -> None:
    """Make ``tensor`` refer to ``length`` bytes at ``offset`` of ``location``; its inline values are cleared.

    ``keep`` names prefixes of further entries (``prepacked_``) that are kept as they are.

    Raises:
        ExternalDataError: the location is not UTF-8 text.
    """
    kept = [(e.key, e.value) for e in tensor.external_data if any(e.key.startswith(p) for p in keep)]
    for field in ("raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data"):
        tensor.ClearField(field)
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in [("location", nameable(location)), ("offset", str(offset)), ("length", str(length)), *kept]:
        tensor.external_data.add(key=key, value=value)


def _number(entries: dict[str, str], key: str, where: str) -> int:
    text = entries.get(key, "")
    if text == "":
        return 0
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= _INT64_MAX:
        raise ExternalDataError(f"{where}: '{key}' must be a number of bytes from 0 on, found {quoted(text)}")
    return value
