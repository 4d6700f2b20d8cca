"""``ort-delayed check``: every file of a model or a checkpoint, one line per fault."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from ort_delayed.cli.paths import directory
from ort_delayed.cli.printing import Table, print_json, print_table
from ort_delayed.cli.sizes import counted, size_text

if TYPE_CHECKING:
    from ort_delayed.checking import CheckReport

__all__ = ["add_parser", "files_table"]


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "check",
        parents=[shared],
        help="whether every file of a model or a checkpoint is there and sound",
        description="Checks that every file exists, is long enough and stands inside the directory, that headers and "
        "attributes are sound, and that a packed model was packed for this machine. No weight is read. One line per "
        "fault on standard error; exit status 1 if there is any.",
    )
    parser.add_argument("source", metavar="MODEL|WEIGHTS", help="an .onnx model, a .safetensors file, index, directory")
    parser.add_argument(
        "--weights-dir",
        metavar="DIR",
        type=directory,
        help="a fault is also a delayed node's file outside of this directory",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from ort_delayed.checking import check_weights

    found = check_weights(arguments.source, weights_dir=arguments.weights_dir)
    if arguments.json:
        print_json(found)
    else:
        print(found.source)
        print_table(files_table(found))
        for note in found.notes:
            print(f"note: {note}")
        sys.stdout.flush()
        for fault in found.faults:
            print(f"fault: {' '.join(fault.split())}", file=sys.stderr)
        if found:
            print(f"no faults ({counted(found.tensors, 'tensor')})")
    return 0 if found else 1


def files_table(found: CheckReport) -> Table:
    """A row per file."""
    rows = tuple(
        (f.path, "cannot be used" if f.nbytes is None else size_text(f.nbytes), str(f.tensors)) for f in found.files
    )
    return Table(("file", "size", "tensors"), rows, right=(1, 2))
