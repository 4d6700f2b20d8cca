"""The six attributes of a delayed node, checked once and held as a frozen record.

The rules are those of the specification of ``ai.rt::DelayedInitializer`` version 1: all six are required,
``load_device`` is ``"cpu"`` or ``"file"``, ``runtime_device`` is ``"cpu"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import onnx

from ort_delayed.loader.element_types import ELEMENT_TYPES, ElementType, element_type_from_onnx, onnx_type_name
from ort_delayed.loader.quoting import listed, quoted
from ort_delayed.ops.errors import DelayedInitializerTypeError, DelayedInitializerValueError

__all__ = ["DOMAIN", "LOAD_DEVICES", "OP_TYPE", "OP_VERSION", "RUNTIME_DEVICES", "Attributes", "check_carried"]
__all__ += ["describe_node", "is_delayed", "read_attributes"]

DOMAIN = "ai.rt"
OP_TYPE = "DelayedInitializer"
OP_VERSION = 1
LOAD_DEVICES = ("cpu", "file")
RUNTIME_DEVICES = ("cpu",)
_INT64_MAX = 2**63 - 1

_ATTRIBUTE_TYPES = {
    "dtype": onnx.AttributeProto.INT,
    "filename": onnx.AttributeProto.STRING,
    "load_device": onnx.AttributeProto.STRING,
    "offset": onnx.AttributeProto.INT,
    "runtime_device": onnx.AttributeProto.STRING,
    "shape": onnx.AttributeProto.INTS,
}


@dataclass(frozen=True, slots=True)
class Attributes:
    """What one delayed node asks for.

    Attributes:
        element_type: the row of the table of element types that ``dtype`` names.
        shape: elements per axis.
        filename: as the node has it, not resolved.
        offset: first byte of the payload.
        load_device: ``"cpu"`` or ``"file"``.
        runtime_device: ``"cpu"``.
    """

    element_type: ElementType
    shape: tuple[int, ...]
    filename: str
    offset: int
    load_device: str
    runtime_device: str = "cpu"

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.element_type.nbytes(self.shape)


def is_delayed(node: onnx.NodeProto) -> bool:
    """Whether the node is an ``ai.rt::DelayedInitializer``."""
    return node.op_type == OP_TYPE and node.domain == DOMAIN


def describe_node(node: onnx.NodeProto) -> str:
    """How messages name a delayed node: by its name and by what it yields."""
    outputs = quoted(node.output[0]) if len(node.output) == 1 else listed(node.output) if node.output else "nothing"
    return f"DelayedInitializer node {quoted(node.name)} (yields {outputs})"


def read_attributes(node: onnx.NodeProto, bound: Mapping[str, onnx.AttributeProto] | None = None) -> Attributes:
    """Check a delayed node and return what it asks for.

    Args:
        node: the node. It must have no input and one output.
        bound: values for reference attributes (``ref_attr_name``), where the node stands in a function body.

    Raises:
        DelayedInitializerValueError: a missing, mistyped or impossible attribute, inputs, not one output.
        DelayedInitializerTypeError: ``dtype`` is not one of the types that the specification allows.
    """
    where = describe_node(node)
    if any(node.input):
        _refuse(where, f"takes no inputs, found {listed(node.input)}")
    if len(node.output) != 1 or not node.output[0]:
        _refuse(where, f"has exactly one output, found {listed(node.output)}")
    values = _values(node, where, bound or {})
    element_type = element_type_from_onnx(values["dtype"])
    if element_type is None or not element_type.in_schema:
        allowed = ", ".join(onnx_type_name(t.onnx) for t in ELEMENT_TYPES if t.in_schema and t.onnx is not None)
        raise DelayedInitializerTypeError(
            f"{where}: dtype {onnx_type_name(values['dtype'])} has no raw byte storage that the op yields; "
            f"it must be one of {allowed}",
            node=where,
        )
    shape = tuple(values["shape"])
    if any(d < 0 for d in shape):
        _refuse(where, f"shape must hold no negative number, found {listed(shape)}")
    offset = values["offset"]
    if offset < 0:
        _refuse(where, f"offset must be a number of bytes from 0 on, found {offset}")
    # With a zero among the dims the product says nothing about the others, which ONNX Runtime multiplies all the same.
    largest = element_type.nbytes([max(d, 1) for d in shape])
    if largest > _INT64_MAX or offset > _INT64_MAX - largest:
        _refuse(
            where, f"offset {offset} and shape {listed(shape)} of {element_type} overflow a file offset (2**63 - 1)"
        )
    filename = _text(values["filename"], "filename", where)
    if not filename or "\0" in filename:
        _refuse(where, f"filename must name a file, found {quoted(filename)}")
    load_device = _choice(values["load_device"], "load_device", LOAD_DEVICES, where)
    runtime_device = _choice(values["runtime_device"], "runtime_device", RUNTIME_DEVICES, where)
    return Attributes(element_type, shape, filename, offset, load_device, runtime_device)


def check_carried(attributes: Attributes, where: str) -> None:
    """Refuse an element type that ONNX Runtime cannot carry (complex: it has no complex tensors).

    Raises:
        DelayedInitializerTypeError: for complex64 and complex128; ``onnx.reference`` runs those.
    """
    if not attributes.element_type.delayed:
        raise DelayedInitializerTypeError(
            f"{where}: ONNX Runtime has no {attributes.element_type} tensors; "
            "onnx.reference with ort_delayed.ops.DelayedInitializer runs them",
            node=where,
        )


def _values(node: onnx.NodeProto, where: str, bound: Mapping[str, onnx.AttributeProto]) -> dict[str, Any]:
    found: dict[str, onnx.AttributeProto] = {}
    for attribute in node.attribute:
        if attribute.name in found:
            _refuse(where, f"has the attribute {quoted(attribute.name)} twice")
        reference = attribute.ref_attr_name
        if reference and reference not in bound:
            _refuse(
                where, f"attribute {quoted(attribute.name)} refers to {quoted(reference)}, which the call does not give"
            )
        found[attribute.name] = bound[reference] if reference else attribute
    missing = sorted(_ATTRIBUTE_TYPES.keys() - found.keys())
    if missing:
        _refuse(where, f"lacks the required attribute{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}")
    values: dict[str, Any] = {}
    for name, expected in _ATTRIBUTE_TYPES.items():
        attribute = found[name]
        # An empty list written by a serializer that leaves types out has no type of its own.
        if attribute.type != expected and not (name == "shape" and attribute.type == onnx.AttributeProto.UNDEFINED):
            kinds = onnx.AttributeProto.AttributeType
            _refuse(
                where,
                f"attribute '{name}' must be of type {kinds.Name(expected)}, found {kinds.Name(attribute.type)}",
            )
        values[name] = onnx.helper.get_attribute_value(attribute) if attribute.type == expected else []
    return values


def _text(value: bytes, name: str, where: str) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        _refuse(where, f"{name} is not UTF-8 text, found {quoted(value)}")


def _choice(value: bytes, name: str, allowed: tuple[str, ...], where: str) -> str:
    text = _text(value, name, where)
    if text not in allowed:
        _refuse(where, f"{name} must be {' or '.join(map(repr, allowed))}, found {quoted(text)}")
    return text


def _refuse(where: str, reason: str) -> NoReturn:
    raise DelayedInitializerValueError(f"{where}: {reason}", node=where)
