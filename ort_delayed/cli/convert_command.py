"""``ort-delayed convert``: constants of a model become delayed initializers."""

from __future__ import annotations

import argparse
from typing import Any

from ort_delayed.cli.errors import UsageError
from ort_delayed.cli.written_models import add_destination_arguments, print_report, refusing_to_replace

__all__ = ["add_parser"]


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "convert",
        parents=[shared],
        help="make the weights of a model delayed initializers",
        description="Writes a model whose weights are ai.rt::DelayedInitializer nodes. The source stays as it is.",
    )
    add_destination_arguments(parser)
    parser.add_argument(
        "--load-device",
        choices=("file", "cpu"),
        default="file",
        help="read weights at every run (file, the default) or when a session is made (cpu)",
    )
    parser.add_argument("--min-bytes", metavar="N", type=int, help="smallest payload that is delayed (4096)")
    parser.add_argument(
        "--select", metavar="PATTERN", action="append", help="delay only names like this, such as 'encoder.*'; repeat"
    )
    parser.add_argument("--copy", action="store_true", help="copy payloads of external files to the new data file too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from ort_delayed.converting import MIN_BYTES, convert_model

    if arguments.min_bytes is not None and arguments.min_bytes < 0:
        raise UsageError(f"--min-bytes must be a number of bytes from 0 on, found {arguments.min_bytes}")
    with refusing_to_replace(arguments, "converting") as progress:
        report = convert_model(
            arguments.source,
            arguments.destination,
            load_device=arguments.load_device,
            min_bytes=MIN_BYTES if arguments.min_bytes is None else arguments.min_bytes,
            select=arguments.select,
            copy=arguments.copy,
            overwrite=arguments.overwrite,
            progress=progress,
        )
    print_report(report, arguments)
    return 0
