"""Parsing the command line, and turning what goes wrong into one line and an exit status."""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence

from ort_delayed.cli import (
    check_command,
    convert_command,
    inspect_command,
    pack_command,
    plan_command,
    restore_command,
    run_command,
    stream_command,
)
from ort_delayed.cli.completion import PrintCompletion
from ort_delayed.cli.errors import CommandError, UsageError, message_of

__all__ = ["build_parser", "main"]

_COMMANDS = (
    inspect_command,
    check_command,
    plan_command,
    run_command,
    stream_command,
    convert_command,
    restore_command,
    pack_command,
)

_FAILED, _USAGE, _INTERRUPTED, _BROKEN_PIPE = 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0: done. 1: the model, its files or the budget are at fault. 2: the command line is. 130: interrupted.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name need not be text, nor need a terminal know every letter: both are shown escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = _parsed(argv)
    try:
        status = int(arguments.run(arguments))
        # Here, not at exit, where a reader that has gone would be a message that nobody asked for.
        sys.stdout.flush()
    except UsageError as error:
        return _fail(arguments, error, _USAGE)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        print(f"ort-delayed {arguments.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except Exception as error:
        return _fail(arguments, error, _FAILED)
    return status


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        # argparse would show the usage of the whole program, which does not have the options of its commands.
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="ort-delayed",
        description="ONNX Runtime models whose weights arrive when they are needed.",
        epilog="Sizes are written 512MiB, 1.5GB or 300000000 (bytes). Exit status: 1 if the model, its files or the "
        "budget are at fault, 2 if the command line is, 130 if interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        help="print a completion script for bash, zsh or tcsh and exit (extra cli)",
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands, shared)
    for own in commands.choices.values():
        own.set_defaults(parser=own)
    return parser


def _fail(arguments: argparse.Namespace, error: Exception, status: int) -> int:
    if arguments.debug:
        traceback.print_exception(error)
    print(f"ort-delayed {arguments.command}: error: {message_of(error)}", file=sys.stderr)
    if not arguments.debug and not _says_enough(error):
        # What no part of the library says by itself may be a fault of its own.
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}, line {last.lineno}"
        print(f"({type(error).__name__} in {where}; --debug shows the traceback)", file=sys.stderr)
    return status


def _says_enough(error: Exception) -> bool:
    """Whether an error is one of those with which the library or ONNX Runtime refuses something."""
    kinds = CommandError | UsageError | OSError | ValueError | MemoryError | RuntimeError
    return isinstance(error, kinds) or type(error).__module__.startswith("onnxruntime.")


class _Version(argparse.Action):
    """Looks the version up when it is asked for: reading a distribution's metadata takes a while."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:  # noqa: A002
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        import importlib.metadata

        print(f"ort-delayed {importlib.metadata.version('ort-delayed')}")
        parser.exit()
