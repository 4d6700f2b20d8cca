"""Deciding, before anything is written, what a conversion does with each tensor: pure functions over facts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import onnx

from ort_delayed.loader.element_types import element_type_from_onnx, onnx_type_name
from ort_delayed.loader.external_data import has_external_data
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.new_files import PAGE_BYTES
from ort_delayed.operator_inputs import reason_body_stays
from ort_delayed.skeletons import LIFTED_BYTES, Skeleton
from ort_delayed.tensor_values import tensor_on_disk
from ort_delayed.value_uses import Scope, Uses

__all__ = ["Candidate", "Decision", "Layout", "Select", "find_candidates", "plan_conversion", "stored_filename"]

Select = Callable[[str, onnx.TensorProto], bool] | Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A constant of the model: what it is, where its bytes stand, and why it stays where it does.

    Attributes:
        scope: the graph or function that it stands in.
        name: the value's name.
        kind: ``"initializer"`` or ``"Constant"``.
        proto: what holds its values: a TensorProto, or the attribute of a Constant node that is a list of numbers.
        onnx_type: its ``TensorProto.DataType``.
        element_type: that type's name, for reports.
        shape: elements per axis.
        nbytes: bytes of its raw values; 0 for types without.
        stored: where they stand in a file, or None where the proto holds them.
        external: whether that file is another one than the model.
        keep: why it stays a constant, or None.
    """

    scope: Scope
    name: str
    kind: str
    proto: onnx.TensorProto | onnx.AttributeProto = field(compare=False, repr=False)
    onnx_type: int
    element_type: str
    shape: tuple[int, ...]
    nbytes: int
    stored: TensorOnDisk | None = None
    external: bool = False
    keep: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done with one candidate.

    Attributes:
        action: ``"written"``, ``"referenced"`` or ``"kept"``.
        filename: the file as the new model names it: of a referenced payload, or of a kept tensor that stays
            external. None for the data file, whose name is known when it is written, and for inline values.
        offset: the payload's first byte in its file; None for a kept tensor whose bytes are not moved.
        inline: the values of a kept external tensor are put into the model.
    """

    candidate: Candidate
    action: str
    filename: str | None = None
    offset: int | None = None
    inline: bool = False

    @property
    def in_data_file(self) -> bool:
        """Whether the payload goes to the data file."""
        return self.offset is not None and self.filename is None


def find_candidates(
    skeleton: Skeleton, scopes: Sequence[Scope], uses: Uses, *, min_bytes: int, select: Select
) -> list[Candidate]:
    """Every initializer and Constant of the model with its facts and its reason to stay, in order of first use."""
    found: list[Candidate] = []
    for scope in scopes:
        if scope.graph is not None:
            for tensor in scope.graph.initializer:
                found.append(_from_tensor(scope, tensor.name, "initializer", tensor, skeleton))
        for node in scope.nodes:
            if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and len(node.output) == 1:
                found.extend(_from_constant(scope, node, skeleton))
    chosen = _selector(select)
    last = len(uses.order)
    found.sort(key=lambda c: uses.order.get((c.scope, c.name), last))
    # Before IR version 4 every initializer had to be listed as an input; ONNX Runtime takes those for constants.
    listed = skeleton.model.ir_version >= 4
    inputs = {s: {i.name for i in s.graph.input} if listed and s.graph is not None else set() for s in scopes}
    return [replace(c, keep=_reason_to_keep(c, uses, min_bytes, chosen, inputs[c.scope])) for c in found]


def plan_conversion(
    candidates: Iterable[Candidate],
    layout: Layout,
    *,
    directory: str,
    moved: bool,
    copy: bool,
    reachable: Callable[[str, str], str | None],
) -> list[Decision]:
    """What to do with each candidate.

    Args:
        candidates: in the order in which their payloads are to stand in the data file.
        layout: the data file, which gets their payloads.
        directory: the destination's directory, links resolved.
        moved: whether the source stands in another directory, so that relative locations have to be re-pointed.
        copy: whether payloads that stand in other files are copied.
        reachable: ``(path, directory)`` to the location by which ONNX Runtime finds that file, or None.
    """
    decisions = []
    for candidate in candidates:
        stored = candidate.stored if candidate.external else None
        if candidate.keep is None and (stored is None or copy):
            decisions.append(Decision(candidate, "written", offset=layout.place(candidate)))
        elif candidate.keep is None and stored is not None:
            filename = stored_filename(stored.path, directory)
            decisions.append(Decision(candidate, "referenced", filename, stored.offset))
        elif stored is None or not (moved or copy):
            decisions.append(Decision(candidate, "kept"))
        else:
            decisions.append(_keep_external(candidate, stored, directory, layout, copy, reachable))
    return decisions


def stored_filename(path: str, directory: str) -> str:
    """How a model in ``directory`` names a file: relative below that directory, absolute otherwise.

    Links in the file's directory are resolved, so that ``..`` behind a link means what the system takes it for; a
    link in the last place is kept, since it is often what is replaced by an update.
    """
    folder, name = os.path.split(path)
    resolved = os.path.join(os.path.realpath(folder), name)
    inside = resolved.startswith(directory.rstrip(os.sep) + os.sep)
    return os.path.relpath(resolved, directory) if inside else resolved


class Layout:
    """The data file that is planned: page-aligned payloads, each file's same bytes once."""

    def __init__(self) -> None:
        self.end = 0
        self._places: dict[tuple[str, int, int], int] = {}

    def place(self, candidate: Candidate) -> int:
        """The offset at which the payload goes, or already went."""
        stored = candidate.stored
        return self.place_stored((stored.path, stored.offset) if stored is not None else None, candidate.nbytes)

    def place_stored(self, source: tuple[str, int] | None, nbytes: int) -> int:
        """The same for bytes at a path and offset; ``None`` for bytes that stand in no file."""
        key = (*source, nbytes) if source is not None else None
        if key is not None and key in self._places:
            return self._places[key]
        offset = -(-self.end // PAGE_BYTES) * PAGE_BYTES
        self.end = offset + nbytes
        if key is not None:
            self._places[key] = offset
        return offset


def _keep_external(
    candidate: Candidate,
    stored: TensorOnDisk,
    directory: str,
    layout: Layout,
    copy: bool,
    reachable: Callable[[str, str], str | None],
) -> Decision:
    location = None if copy else reachable(stored.path, directory)
    if location is not None:
        return Decision(candidate, "kept", location, stored.offset)
    # A Constant cannot be external for ONNX Runtime, and what it needs while loading must be inline.
    if candidate.nbytes < LIFTED_BYTES or candidate.kind == "Constant":
        return Decision(candidate, "kept", inline=True)
    return Decision(candidate, "kept", offset=layout.place(candidate))


def _from_tensor(scope: Scope, name: str, kind: str, tensor: onnx.TensorProto, skeleton: Skeleton) -> Candidate:
    element_type = element_type_from_onnx(tensor.data_type)
    shape = tuple(tensor.dims)
    label = element_type.name if element_type is not None else onnx_type_name(tensor.data_type)
    nbytes = element_type.nbytes(shape) if element_type is not None else 0
    stored = tensor_on_disk(tensor, skeleton) if element_type is not None else None
    external = has_external_data(tensor)
    return Candidate(scope, name, kind, tensor, tensor.data_type, label, shape, nbytes, stored, external)


def _from_constant(scope: Scope, node: onnx.NodeProto, skeleton: Skeleton) -> list[Candidate]:
    name = node.output[0]
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            continue
        if attribute.name == "value":
            return [_from_tensor(scope, name, "Constant", attribute.t, skeleton)]
        if attribute.name == "value_floats":
            shape = (len(attribute.floats),)
            return [Candidate(scope, name, "Constant", attribute, 1, "float32", shape, 4 * shape[0])]
        if attribute.name == "value_ints":
            shape = (len(attribute.ints),)
            return [Candidate(scope, name, "Constant", attribute, 7, "int64", shape, 8 * shape[0])]
    return []


def _selector(select: Select) -> Callable[[Candidate], bool]:
    if select is None:
        return lambda candidate: True
    if isinstance(select, str):
        raise TypeError(
            f"select must be a callable or a list of patterns, found the text {select!r}; write [{select!r}]"
        )
    if callable(select):
        return lambda candidate: bool(select(candidate.name, _header(candidate)))
    patterns = list(select)
    return lambda candidate: any(fnmatchcase(candidate.name, pattern) for pattern in patterns)


def _header(candidate: Candidate) -> onnx.TensorProto:
    """A TensorProto that says what the tensor is, without its values."""
    return onnx.TensorProto(name=candidate.name, data_type=candidate.onnx_type, dims=candidate.shape)


def _reason_to_keep(
    candidate: Candidate, uses: Uses, min_bytes: int, chosen: Callable[[Candidate], bool], inputs: set[str]
) -> str | None:
    scope, name = candidate.scope, candidate.name
    element_type = element_type_from_onnx(candidate.onnx_type)
    if element_type is None or not element_type.delayed:
        return f"ONNX Runtime's Python operators cannot carry {candidate.element_type}"
    if isinstance(candidate.proto, onnx.TensorProto) and candidate.proto.HasField("segment"):
        return "it is stored in segments"
    if name in inputs:
        return "it is a graph input too: a caller may give another value"
    if scope.parent is None and scope.graph is not None and uses.is_output(scope, name):
        return "it is an output of the model"
    if not uses.is_read(scope, name):
        return "nothing reads it"
    reason = _reason_of_bodies(scope) or uses.reason_to_stay_constant(scope, name)
    if reason is not None:
        return reason
    if candidate.nbytes < max(min_bytes, 1):
        return f"smaller than min_bytes={min_bytes}" if candidate.nbytes else "it has no elements"
    return None if chosen(candidate) else "not selected"


def _reason_of_bodies(scope: Scope | None) -> str | None:
    while scope is not None and scope.holder is not None:
        reason = reason_body_stays(scope.holder)
        if reason is not None:
            return reason
        scope = scope.parent
    return None
