"""The delayed nodes that a model has already: what they ask for, and giving them new file names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import onnx

from ort_delayed.conversion_plan import Layout, stored_filename
from ort_delayed.conversion_report import TensorReport
from ort_delayed.loader.external_data import nameable
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.ops.attributes import DOMAIN, OP_VERSION, Attributes, describe_node, is_delayed, read_attributes
from ort_delayed.ops.errors import DelayedInitializerValueError
from ort_delayed.value_uses import Scope

__all__ = ["DelayedNode", "find_delayed_nodes", "import_domain", "plan_delayed_nodes", "rename_files"]


@dataclass(frozen=True, slots=True)
class DelayedNode:
    """A delayed node of the source.

    Attributes:
        scope: the graph or function that it stands in.
        node: the node.
        attributes: what it asks for.
        payload: where its bytes stand, the directory of the source applied.
        filename: the file as the new model names it; None for the data file.
        offset: the payload's first byte in that file.
    """

    scope: Scope
    node: onnx.NodeProto = field(compare=False, repr=False)
    attributes: Attributes
    payload: TensorOnDisk
    filename: str | None
    offset: int

    @property
    def copied(self) -> bool:
        """Whether the payload goes to the data file."""
        return self.filename is None


def find_delayed_nodes(scopes: Sequence[Scope], directory: str, *, relocated: bool) -> list[DelayedNode]:
    """Every delayed node of the model whose attributes stand on it.

    Args:
        scopes: the scopes of the model.
        directory: the directory of the source.
        relocated: whether the nodes will be changed; a node that a function's calls complete cannot be.

    Raises:
        DelayedInitializerError: a node that is not what the specification allows, or cannot be changed.
    """
    found = []
    for scope in scopes:
        for node in scope.nodes:
            if not is_delayed(node):
                continue
            if any(a.ref_attr_name for a in node.attribute):
                if relocated:
                    where = describe_node(node)
                    raise DelayedInitializerValueError(
                        f"{where} in {scope.label}: each call of the function gives its attributes, so its file cannot "
                        "be named anew; convert into the source's directory without copy=True",
                        node=where,
                    )
                continue
            a = read_attributes(node)
            path = os.path.join(directory, a.filename)
            payload = TensorOnDisk(node.output[0], path, a.offset, a.nbytes, a.shape, a.element_type)
            found.append(DelayedNode(scope, node, a, payload, a.filename, a.offset))
    return found


def plan_delayed_nodes(
    nodes: Iterable[DelayedNode], layout: Layout, *, directory: str, moved: bool, copy: bool
) -> list[DelayedNode]:
    """The nodes with the file that each names in the new model; see ``plan_conversion`` for the arguments."""
    planned = []
    for n in nodes:
        filename: str | None = n.attributes.filename
        offset = n.offset
        if copy:
            filename, offset = None, layout.place_stored((n.payload.path, n.payload.offset), n.payload.nbytes)
        elif moved and not os.path.isabs(n.attributes.filename):
            filename = stored_filename(n.payload.path, directory)
        planned.append(DelayedNode(n.scope, n.node, n.attributes, n.payload, filename, offset))
    return planned


def rename_files(nodes: Iterable[DelayedNode], data_name: str) -> None:
    """Give the nodes their planned files and offsets."""
    for n in nodes:
        for attribute in n.node.attribute:
            if attribute.name == "filename":
                attribute.s = nameable(n.filename if n.filename is not None else data_name).encode()
            elif attribute.name == "offset":
                attribute.i = n.offset


def delayed_node_report(node: DelayedNode, data_name: str | None) -> TensorReport:
    """The row of a report about a delayed node that the source had."""
    a = node.attributes
    reason = "it is a delayed node already"
    if node.filename is not None and node.filename != a.filename:
        reason += f", whose file was named {a.filename!r} from the source's directory"
    return TensorReport(
        node.payload.name,
        node.scope.label,
        "delayed node",
        a.element_type.name,
        a.shape,
        a.nbytes,
        "written" if node.copied else "kept",
        reason,
        node.filename if node.filename is not None else data_name,
        node.offset,
    )


def import_domain(holder: onnx.ModelProto | onnx.FunctionProto) -> None:
    """Import the op's domain, once."""
    if all(opset.domain != DOMAIN for opset in holder.opset_import):
        holder.opset_import.add(domain=DOMAIN, version=OP_VERSION)
