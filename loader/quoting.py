"""How messages quote what a file says: escaped, and no longer than somebody reads."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["listed", "quoted", "quoted_path"]

_LONGEST_TEXT = 200
_LONGEST_PATH = 4096  # no file of a longer one can be opened
_LONGEST_LIST = 16


def quoted(text: str | bytes) -> str:
    """A name as Python writes it, so that newlines and escapes do nothing; of a long one the beginning and its length.

    Also for bytes, which a name that is not UTF-8 text is.
    """
    if len(text) <= _LONGEST_TEXT:
        return repr(text)
    return f"{text[:_LONGEST_TEXT]!r}... ({len(text)} {'bytes' if isinstance(text, bytes) else 'characters'})"


def quoted_path(path: str) -> str:
    """A path as it stands, so that it can be copied, unless it cannot be printed or can be none."""
    return f"'{path}'" if len(path) <= _LONGEST_PATH and path.isprintable() else quoted(path)


def listed(items: Sequence[object]) -> str:
    """Dims or names in brackets; of many the first ones and how many there are."""
    shown = [quoted(i) if isinstance(i, str | bytes) else str(i) for i in items[:_LONGEST_LIST]]
    more = [f"... ({len(items)} in all)"] if len(items) > _LONGEST_LIST else []
    return f"[{', '.join([*shown, *more])}]"
