"""The graphs that a node carries: If branches, Loop and Scan bodies."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

__all__ = ["node_bodies"]

_GRAPHLESS = {getattr(onnx.AttributeProto, kind) for kind in ("FLOAT", "INT", "STRING", "FLOATS", "INTS", "STRINGS")}
_GRAPHLESS |= {onnx.AttributeProto.TENSOR}


def node_bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs among a node's attributes, a list of graphs included."""
    for attribute in node.attribute:
        # Most attributes say so; asking each for its graphs takes a third of preparing a model of thousands of nodes.
        if attribute.type in _GRAPHLESS:
            continue
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs
