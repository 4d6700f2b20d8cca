"""Making a delayed node for a model."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from ort_delayed.ops.attributes import DOMAIN, OP_TYPE, read_attributes

__all__ = ["make_node"]


def make_node(
    output: str,
    *,
    filename: str,
    shape: Sequence[int],
    dtype: int,
    offset: int = 0,
    load_device: str = "file",
    runtime_device: str = "cpu",
    name: str | None = None,
    doc_string: str | None = None,
) -> onnx.NodeProto:
    """Make an ``ai.rt::DelayedInitializer`` node that yields ``output``.

    Args:
        output: name of the value that the node yields.
        filename: file that holds the raw little-endian bytes; relative to the model's directory, or absolute.
        shape: elements per axis; ``[]`` for a scalar.
        dtype: element type, a ``TensorProto.DataType`` value.
        offset: first byte of the payload in the file.
        load_device: ``"cpu"`` (read when the session is constructed) or ``"file"`` (read at every run).
        runtime_device: ``"cpu"``.
        name: the node's name; by default none.
        doc_string: the node's documentation; by default none.

    Raises:
        DelayedInitializerValueError, DelayedInitializerTypeError: as for a node read from a model.
    """
    node = onnx.helper.make_node(
        OP_TYPE,
        [],
        [output],
        name=name,
        doc_string=doc_string,
        domain=DOMAIN,
        dtype=int(dtype),
        # In the bytes of a path that is no UTF-8 text, read_attributes finds what is wrong.
        filename=filename.encode("utf-8", "surrogatepass"),
        load_device=load_device,
        offset=int(offset),
        runtime_device=runtime_device,
    )
    # make_attribute cannot tell the type of an empty list.
    node.attribute.append(
        onnx.helper.make_attribute("shape", [int(d) for d in shape], attr_type=onnx.AttributeProto.INTS)
    )
    read_attributes(node)
    return node
