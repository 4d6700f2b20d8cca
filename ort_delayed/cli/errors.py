"""Errors of the command line, and how an error of the library is said in one line."""

from __future__ import annotations

__all__ = ["CommandError", "UsageError", "message_of"]


class CommandError(Exception):
    """The model, its files or the budget are at fault: exit status 1."""


class UsageError(Exception):
    """The command line asks for something that does not exist or does not go together: exit status 2."""


def message_of(error: BaseException) -> str:
    """What to print of an error: its message in one line, or its type where it has none."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror and text.startswith("[Errno"):
        text = error.strerror if error.filename is None else f"{error.strerror}: '{error.filename}'"
    return " ".join(text.split()) or type(error).__name__
