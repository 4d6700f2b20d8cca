"""The texts of an ONNX model, and those among them that are none: a proto hands out what is not UTF-8 as bytes.

Whoever reads a model asks here first: bytes in the place of a name are a TypeError wherever names are used.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from google.protobuf.message import DecodeError

from ort_delayed.loader.node_bodies import node_bodies
from ort_delayed.loader.quoting import quoted

__all__ = ["fault_in_texts", "iter_texts", "parse_model"]

_PLAIN = {getattr(onnx.AttributeProto, kind) for kind in ("FLOAT", "INT", "STRING", "FLOATS", "INTS", "STRINGS")}


def parse_model(data: bytes) -> onnx.ModelProto:
    """The model that these bytes are.

    Raises:
        DecodeError: they are none. Protobuf's implementation in Python, which there is where no compiled one is, says
            that of names that are not UTF-8 too.
    """
    try:
        model: onnx.ModelProto = onnx.ModelProto.FromString(data)
    except UnicodeDecodeError as error:
        raise DecodeError(str(error)) from error
    return model


def fault_in_texts(model: onnx.ModelProto) -> str | None:
    """What is wrong with the first name of a model that is not UTF-8 text; None where all are."""
    for where, text in iter_texts(model):
        if isinstance(text, bytes):
            # What stands there may be bytes itself, and of any length.
            kind, name = where
            return f"{kind} {quoted(name)}: {quoted(text)} is not UTF-8 text, which every name in a model must be"
    return None


def iter_texts(model: onnx.ModelProto) -> Iterator[tuple[tuple[str, str | bytes], str | bytes]]:
    """Every name in a model, with the kind and the name of what it stands in. One that is not UTF-8 comes as bytes.

    Keys and values of external data count as names, and so does the documentation of nodes and tensors, which goes
    along when one becomes the other.
    """
    for holder in (model, *model.functions):
        for opset in holder.opset_import:
            yield ("import of operators", opset.domain), opset.domain
    pending = [model.graph]
    for node in model.graph.node:
        yield from _of_node(node)
    for function in model.functions:
        here = ("function", function.name)
        texts = (function.name, function.domain, function.overload, *function.input, *function.output)
        for text in (*texts, *function.attribute, *(a.name for a in function.attribute_proto)):
            yield here, text
        for node in function.node:
            yield from _of_node(node)
            pending.extend(node_bodies(node))
        for value in function.value_info:
            yield here, value.name
    while pending:
        graph = pending.pop()
        yield from _of_graph(graph)
        for node in graph.node:
            if graph is not model.graph:
                yield from _of_node(node)
            pending.extend(node_bodies(node))


def _of_node(node: onnx.NodeProto) -> Iterator[tuple[tuple[str, str | bytes], str | bytes]]:
    here = ("node", node.name)
    for text in (node.name, node.op_type, node.domain, node.overload, node.doc_string):
        yield here, text
    for text in (*node.input, *node.output):
        yield here, text
    for attribute in node.attribute:
        yield here, attribute.name
        yield here, attribute.ref_attr_name
        if attribute.type not in _PLAIN and (attribute.HasField("t") or attribute.tensors):
            for tensor in (attribute.t, *attribute.tensors):
                yield from _of_tensor(tensor)


def _of_graph(graph: onnx.GraphProto) -> Iterator[tuple[tuple[str, str | bytes], str | bytes]]:
    here = ("graph", graph.name)
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield here, value.name
    for tensor in graph.initializer:
        yield from _of_tensor(tensor)
    for sparse in graph.sparse_initializer:
        yield from _of_tensor(sparse.values)
        yield from _of_tensor(sparse.indices)


def _of_tensor(tensor: onnx.TensorProto) -> Iterator[tuple[tuple[str, str | bytes], str | bytes]]:
    here = ("tensor", tensor.name)
    yield here, tensor.name
    yield here, tensor.doc_string
    for entry in tensor.external_data:
        yield here, entry.key
        yield here, entry.value
