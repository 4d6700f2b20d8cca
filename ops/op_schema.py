"""The op's schema, so that ``onnx.checker`` and ``onnx.shape_inference`` know ``ai.rt::DelayedInitializer``."""

from __future__ import annotations

import atexit

import onnx
import onnx.defs
from onnx.defs import OpSchema

from ort_delayed.loader.element_types import ELEMENT_TYPES
from ort_delayed.ops.attributes import DOMAIN, OP_TYPE, OP_VERSION

__all__ = ["register_schema", "schema"]

_DOC = """\
Yields a tensor whose bytes are stored, raw and little-endian, in a file: `element count x item size` bytes of
`filename` from byte `offset` on.

`load_device` says when they are read. With "cpu" they are read once, when the session is constructed, and every run
yields a copy of those bytes, whatever has become of the file. With "file" constructing a session does not touch the
file, which need not exist yet, and every run yields what the file holds then. `runtime_device` must be "cpu".

The shape of the output is the attribute `shape`, its element type the attribute `dtype`.
"""


def _attribute(name: str, kind: OpSchema.AttrType, description: str) -> OpSchema.Attribute:
    return OpSchema.Attribute(name, kind, description, required=True)


def _infer(ctx: onnx.shape_inference.InferenceContext) -> None:
    dtype, shape = ctx.get_attribute("dtype"), ctx.get_attribute("shape")
    if dtype is None or shape is None:
        return  # a reference attribute in a function body: known where the function is called
    ctx.set_output_type(0, onnx.helper.make_tensor_type_proto(dtype.i, list(shape.ints)))


schema: OpSchema = OpSchema(
    OP_TYPE,
    DOMAIN,
    OP_VERSION,
    doc=_DOC,
    outputs=[OpSchema.FormalParameter("output", "T", "Tensor produced by the delayed initializer.")],
    type_constraints=[
        (
            "T",
            sorted(f"tensor({t.ort or t.name})" for t in ELEMENT_TYPES if t.in_schema),
            "Constrain output to tensor types backed by raw byte storage.",
        )
    ],
    attributes=[
        _attribute(
            "dtype",
            OpSchema.AttrType.INT,
            "Element type of the output tensor, encoded as a TensorProto::DataType value.",
        ),
        _attribute("filename", OpSchema.AttrType.STRING, "File that contains the serialized tensor payload."),
        _attribute("load_device", OpSchema.AttrType.STRING, 'Where the initializer is first loaded: "cpu" or "file".'),
        _attribute("offset", OpSchema.AttrType.INT, "Byte offset of the tensor payload within `filename`."),
        _attribute("runtime_device", OpSchema.AttrType.STRING, 'Where the initializer is moved at runtime: "cpu".'),
        _attribute("shape", OpSchema.AttrType.INTS, "Shape of the output tensor."),
    ],
)
"""The ``onnx.defs.OpSchema`` of ``ai.rt::DelayedInitializer``, version 1."""


def register_schema() -> None:
    """Register :data:`schema` with ``onnx.defs``; one registered before (by a reload) is replaced."""
    _deregister_schema()
    schema.set_type_and_shape_inference_function(_infer)
    onnx.defs.register_schema(schema)


def _deregister_schema() -> None:
    if onnx.defs.has(OP_TYPE, domain=DOMAIN, max_inclusive_version=OP_VERSION):
        onnx.defs.deregister_schema(OP_TYPE, OP_VERSION, DOMAIN)


# onnx before 1.23 keeps registered schemas until after the interpreter has gone, and then hangs (1.19) or crashes
# (1.20 to 1.22) on one that holds a Python function.
atexit.register(_deregister_schema)
