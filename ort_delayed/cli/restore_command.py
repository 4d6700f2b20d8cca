"""``ort-delayed restore``: delayed initializers of a model become ordinary ones again."""

from __future__ import annotations

import argparse
from typing import Any

from ort_delayed.cli.written_models import add_destination_arguments, print_report, refusing_to_replace

__all__ = ["add_parser"]


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "restore",
        parents=[shared],
        help="make delayed initializers ordinary ones again",
        description="Writes a model that any ONNX runtime loads, its weights as external data. The source stays as it "
        "is.",
    )
    add_destination_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from ort_delayed.restoring import restore_model

    with refusing_to_replace(arguments, "restoring") as progress:
        report = restore_model(
            arguments.source, arguments.destination, overwrite=arguments.overwrite, progress=progress
        )
    print_report(report, arguments)
    return 0
