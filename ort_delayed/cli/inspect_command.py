"""``ort-delayed inspect``: what a model or a checkpoint holds, and where the bytes are."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from ort_delayed.cli.printing import Table, print_json, print_table
from ort_delayed.cli.sizes import counted, size_text

if TYPE_CHECKING:
    from ort_delayed.inspecting import InspectedTensor, Inspection, ModelValue

__all__ = ["add_parser", "files_table", "groups_table", "summary", "tensors_table", "values_table"]

_SMALL_BYTES, _MANY = 1024, 4
_STORAGES = {
    "checkpoint": "in the checkpoint",
    "inline": "inline in the model file",
    "external": "in external data files",
    "file": "delayed, read at every run",
    "cpu": "delayed, read when the session is made",
}


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "inspect",
        parents=[shared],
        help="what a model or a checkpoint holds, and where the bytes are",
        description="Shows layer groups, tensors, element types and files of an ONNX model or a safetensors "
        "checkpoint. No weight is read.",
    )
    parser.add_argument("source", metavar="MODEL|WEIGHTS", help="an .onnx model, a .safetensors file, index, directory")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from ort_delayed.inspecting import inspect_weights

    found = inspect_weights(arguments.source)
    if arguments.json:
        print_json(found)
        return 0
    print("\n".join(summary(found)))
    print()
    if found.inputs or found.outputs:
        print_table(values_table(found))
        print()
    print_table(tensors_table(found) if arguments.tensors else groups_table(found))
    print()
    print_table(files_table(found))
    return 0


def summary(found: Inspection) -> list[str]:
    """The lines above the tables."""
    kind = "ONNX model" if found.source_format == "onnx" else "safetensors checkpoint"
    packed = ", packed by ort-delayed" if found.is_packed else ""
    lines = [found.source, f"{kind}{packed}: {counted(len(found.tensors), 'tensor')}, {size_text(found.total_bytes)}"]
    for storage, text in _STORAGES.items():
        own = [t for t in found.tensors if t.storage == storage]
        if own and (storage != "checkpoint"):
            lines.append(f"  {size_text(sum(t.nbytes for t in own)):>10}  {text}, {counted(len(own), 'tensor')}")
    if found.shared_bytes:
        lines.append(f"  {size_text(found.shared_bytes):>10}  of these are shared by several tensors")
    return lines


def values_table(found: Inspection) -> Table:
    """A row per input and output of a model."""
    rows = tuple(
        (title, value.name, value.element_type, _axes_text(value))
        for title, values in (("input", found.inputs), ("output", found.outputs))
        for value in values
    )
    return Table(("", "name", "type", "shape"), rows, flexible=(1, 3))


def groups_table(found: Inspection) -> Table:
    """A row per layer group; those of next to no bytes (shapes, axes), of which a model can have hundreds, in one."""
    small = [g for g in found.groups if g.nbytes < _SMALL_BYTES]
    if len(small) < _MANY:
        small = []
    rows = tuple(
        (g.name, str(g.tensors), size_text(g.nbytes), " ".join(g.element_types)) for g in found.groups if g not in small
    )
    if small:
        types = sorted({t for g in small for t in g.element_types})
        tensors, nbytes = str(sum(g.tensors for g in small)), size_text(sum(g.nbytes for g in small))
        rows += ((f"({len(small)} more, each below 1 KiB)", tensors, nbytes, " ".join(types)),)
    return Table(("layer group", "tensors", "size", "types"), rows, right=(1, 2), flexible=(0, 3))


def tensors_table(found: Inspection) -> Table:
    """A row per tensor."""
    names = {f.path: f"[{i}]" for i, f in enumerate(found.files)}
    rows = tuple(
        (t.name, t.element_type, _shape_text(t.shape), size_text(t.nbytes), _where(t, names)) for t in found.tensors
    )
    return Table(("tensor", "type", "shape", "size", "file: offset"), rows, right=(3,))


def files_table(found: Inspection) -> Table:
    """A row per file."""
    base = found.source if os.path.isdir(found.source) else os.path.dirname(found.source)
    rows = tuple(
        (
            f"[{i}] {_below(f.path, base)}",
            "not there" if f.nbytes is None else size_text(f.nbytes),
            str(f.tensors),
            size_text(f.tensor_bytes),
        )
        for i, f in enumerate(found.files)
    )
    return Table(("file", "size", "tensors", "of them"), rows, right=(1, 2, 3))


def _axes_text(value: ModelValue) -> str:
    return "" if value.shape is None else f"[{', '.join(map(str, value.shape))}]"


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _where(t: InspectedTensor, names: dict[str, str]) -> str:
    place = f"{names[t.path]}: {t.offset}" if t.offset is not None else names[t.path]
    return f"{place} {t.storage}" if t.storage != "checkpoint" else place


def _below(path: str, directory: str) -> str:
    return os.path.relpath(path, directory) if path.startswith(directory.rstrip(os.sep) + os.sep) else path
