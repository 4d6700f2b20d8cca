"""``--print-completion``: a script for the shell that completes commands, options and file names (extra ``cli``)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

__all__ = ["PrintCompletion"]

_SHELLS = ("bash", "zsh", "tcsh")


class PrintCompletion(argparse.Action):
    """Prints the script and exits; a usage error where shtab, which writes it, is not installed."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:  # noqa: A002
        super().__init__(option_strings, dest, metavar="SHELL", choices=_SHELLS, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Argparse calls this when it meets the option."""
        try:
            import shtab
        except ImportError:
            parser.error(f"{option_string} needs the extra 'cli': pip install 'ort-delayed[cli]'")
        for action in _positionals(parser):
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # what shtab looks for
        print(shtab.complete(parser, str(values)))
        parser.exit()


def _positionals(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The positional arguments of a parser and of its commands: all of them are files."""
    for action in parser._actions:  # argparse has no public way to ask
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _positionals(command)
        elif not action.option_strings:
            yield action
