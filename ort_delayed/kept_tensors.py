"""External tensors that stay constants: kept within reach of a model that goes to another directory."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from ort_delayed.conversion_plan import Decision
from ort_delayed.conversion_report import TensorReport
from ort_delayed.external_files import external_tensors
from ort_delayed.loader.external_data import external_tensor, set_external_data
from ort_delayed.payload_files import PayloadReader
from ort_delayed.skeletons import Skeleton

__all__ = ["decision_report", "inline_others", "put_inline", "relocate"]


def relocate(decision: Decision, data_name: str, reader: PayloadReader) -> None:
    """Keep an external tensor within reach of the new model."""
    candidate, tensor = decision.candidate, decision.candidate.proto
    if not isinstance(tensor, onnx.TensorProto) or candidate.stored is None:
        return
    if decision.inline:
        put_inline(tensor, reader.read(candidate.stored))
    elif decision.offset is not None:
        # Prepacked ranges belong to the file they were written for.
        keep = ("prepacked_", "checksum") if decision.filename is not None else ()
        location = decision.filename if decision.filename is not None else data_name
        set_external_data(tensor, location, decision.offset, candidate.nbytes, keep=keep)


def inline_others(skeleton: Skeleton, decisions: Sequence[Decision], reader: PayloadReader) -> None:
    """Put external values that are neither initializers nor Constants (a ConstantOfShape's value) into the model."""
    known = {id(d.candidate.proto) for d in decisions}
    for tensor in list(external_tensors(skeleton.model)):
        if id(tensor) not in known:
            put_inline(tensor, reader.read(external_tensor(tensor, skeleton.directory)))


def put_inline(tensor: onnx.TensorProto, data: bytes) -> None:
    """Give the tensor these raw bytes as its value."""
    tensor.raw_data = data
    tensor.ClearField("data_location")
    del tensor.external_data[:]


def decision_report(decision: Decision, data_name: str | None) -> TensorReport:
    """The row of a report about a candidate."""
    c = decision.candidate
    reason, path, offset = c.keep or "", decision.filename, decision.offset
    if decision.in_data_file:
        path = data_name
    if decision.action == "kept" and decision.inline:
        reason += "; put into the model"
    elif decision.action == "kept" and decision.in_data_file:
        reason += "; copied to the data file as external data"
    elif decision.action == "kept" and c.external and c.stored is not None and decision.offset is None:
        path, offset = _location(c.proto), c.stored.offset
    return TensorReport(
        c.name, c.scope.label, c.kind, c.element_type, c.shape, c.nbytes, decision.action, reason, path, offset
    )


def _location(proto: onnx.TensorProto | onnx.AttributeProto) -> str | None:
    """The file of an external tensor as the model names it."""
    entries = proto.external_data if isinstance(proto, onnx.TensorProto) else proto.t.external_data
    return next((entry.value for entry in entries if entry.key == "location"), None)
