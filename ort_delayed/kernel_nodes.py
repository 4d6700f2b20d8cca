"""The nodes that stand for a delayed node in the graph that ONNX Runtime gets: the kernel, and the guard behind it.

The guard is a Reshape to the declared shape. An op that fails must not raise (the process would abort), so it yields a
tensor that does not fit, and ONNX Runtime stops the run with an ordinary exception, which names the guard.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper

from ort_delayed.loader.element_types import ELEMENT_TYPES, ElementType
from ort_delayed.loader.quoting import quoted_path
from ort_delayed.ops.attributes import DOMAIN
from ort_delayed.ops.errors import Payload
from ort_delayed.ops.kernel import HANDLE_ATTRIBUTE, kernel_op_type

__all__ = [
    "GUARD_MARK",
    "guard_name",
    "guard_node",
    "kernel_node",
    "let_wait",
    "shape_constant",
    "unfused_shape",
    "unknown_condition",
]

GUARD_MARK = "ort_delayed guard"
"""Begins the name of every Reshape guard; ONNX Runtime's message about a failed run has that name in it."""


def kernel_node(element_type: ElementType, handle: int, output: str, *, name: str) -> onnx.NodeProto:
    """The node that yields the payload which ``handle`` stands for."""
    kernel = onnx.NodeProto(op_type=kernel_op_type(element_type), domain=DOMAIN, name=name)
    kernel.output.append(output)
    kernel.attribute.append(helper.make_attribute(HANDLE_ATTRIBUTE, handle))
    return kernel


_WAITING = {kernel_op_type(t): kernel_op_type(t, waits=True) for t in ELEMENT_TYPES if t.delayed}


def let_wait(kernel: onnx.NodeProto, awaited: str) -> None:
    """Make a kernel wait until ``awaited``, an int64 value, is there."""
    kernel.op_type = _WAITING[kernel.op_type]
    kernel.input.append(awaited)


def guard_name(payload: Payload) -> str:
    """What a guard is called: all that a plain session's exception can say about the payload."""
    text = (
        f"{GUARD_MARK} of {payload.node}, file {quoted_path(payload.path)}, offset {payload.offset}, "
        f"{payload.nbytes} bytes needed (input shape {{0,N,F}}: the read failed with error N after F bytes)"
    )
    # The name ends up in messages, in profiles (JSON) and in dot files.
    return re.sub(r"[^\x20-\x7e]", "?", text).replace("\\", "/").replace('"', "'")


def guard_node(
    unchecked: str, output: str, shape: Sequence[int], shape_name: str | None, *, name: str, opset: int
) -> onnx.NodeProto:
    """The Reshape from what a kernel yields to the declared shape.

    ``shape_name`` is the value that holds the shape; None where the opset has it as an attribute (before 5).
    """
    guard = onnx.NodeProto(op_type="Reshape", name=name)
    guard.input.append(unchecked)
    guard.output.append(output)
    if shape_name is None:
        guard.attribute.append(helper.make_attribute("shape", shape, attr_type=onnx.AttributeProto.INTS))
        return guard
    guard.input.append(shape_name)
    if opset >= 14 and 0 in shape:
        guard.attribute.append(helper.make_attribute("allowzero", 1))
    return guard


def shape_constant(name: str, shape: Sequence[int]) -> onnx.NodeProto:
    """The node that yields a shape for guards."""
    # A Constant node, not an initializer: before IR version 4 every initializer had to be a graph input as well.
    value = onnx.TensorProto(
        data_type=onnx.TensorProto.INT64, dims=[len(shape)], raw_data=np.array(shape, "<i8").tobytes()
    )
    constant = onnx.NodeProto(op_type="Constant", name=name)
    constant.output.append(name)
    constant.attribute.append(helper.make_attribute("value", value))
    return constant


def unfused_shape(guarded: str, once: str, output: str) -> onnx.NodeProto:
    """The node between the guard of what may be a shape, and the nodes that take it.

    ONNX Runtime's ReshapeFusion takes a Reshape, Squeeze or Unsqueeze behind another for a chain on the same data, also
    where what the first yields is the *shape* of the second, and makes them one: a type error, or for int64 data wrong
    numbers. A Tile by ``once``, which holds a 1, stands in no chain.
    """
    tile = onnx.NodeProto(op_type="Tile", name=guarded)
    tile.input.extend([guarded, once])
    tile.output.append(output)
    return tile


def unknown_condition(condition: str, false: str, output: str) -> onnx.NodeProto:
    """The node that makes an If's condition one that ONNX Runtime does not know before a run.

    Where it knows the condition, if only after constant folding, ONNX Runtime takes the branch's nodes into the graph
    around the If: at the end of the node list, so that their loads run first of all, and under names of its own, so
    that its message about a failed run names no guard. ``false`` is a delayed False, which it cannot fold.
    """
    unknown = onnx.NodeProto(op_type="Or", name=output)
    unknown.input.extend([condition, false])
    unknown.output.append(output)
    return unknown
