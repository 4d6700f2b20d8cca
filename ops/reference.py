"""The op for ``onnx.reference.ReferenceEvaluator``, complex types included."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.helper
from onnx.reference.op_run import OpRun

from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.ops.attributes import DOMAIN, Attributes, describe_node, read_attributes
from ort_delayed.ops.errors import Payload, payload_error
from ort_delayed.ops.payloads import read_payload

__all__ = ["DelayedInitializer"]


class DelayedInitializer(OpRun):
    """Reference implementation: ``ReferenceEvaluator(model, new_ops=[DelayedInitializer.in_directory(path)])``.

    The evaluator does not tell an op where its model stands; a relative ``filename`` is taken relative to the working
    directory, or to the directory given to :meth:`in_directory`. All 14 types of the specification are run. A ``cpu``
    payload is read when the evaluator is made, a ``file`` payload at every run.
    """

    op_domain = DOMAIN
    model_directory: str = ""

    @classmethod
    def in_directory(cls, path: str | os.PathLike[str]) -> type[DelayedInitializer]:
        """The same op for models whose relative filenames are relative to ``path``."""
        return type(cls.__name__, (cls,), {"model_directory": os.fspath(path), "op_domain": DOMAIN})

    def __init__(self, onnx_node, run_params, schema=None):  # type: ignore[no-untyped-def]  # as the base class has it
        super().__init__(onnx_node, run_params, schema)
        self._held: npt.NDArray[np.generic] | None = None
        if any(a.ref_attr_name for a in onnx_node.attribute):
            return  # in a function body: the values are known at each call
        attributes = read_attributes(onnx_node)
        if attributes.load_device == "cpu":
            self._held = self._read(attributes)

    def _run(self, **attributes: Any) -> tuple[npt.NDArray[np.generic]]:
        if self._held is not None:
            return (self._held.copy(),)
        node = onnx.NodeProto()
        node.CopyFrom(self.onnx_node)
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                value = attributes[attribute.name]
                attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, value, attr_type=attribute.type))
        return (self._read(read_attributes(node)),)

    def _read(self, attributes: Attributes) -> npt.NDArray[np.generic]:
        where = describe_node(self.onnx_node)
        path = os.path.abspath(os.path.join(self.model_directory, attributes.filename))
        tensor = TensorOnDisk(
            self.onnx_node.output[0],
            path,
            attributes.offset,
            attributes.nbytes,
            attributes.shape,
            attributes.element_type,
        )
        try:
            elements = read_payload(tensor, None, lambda nbytes: np.empty(nbytes, np.uint8))
        except Exception as cause:
            raise payload_error(Payload(where, path, tensor.offset, tensor.nbytes), cause) from cause
        return elements.reshape(attributes.shape)
