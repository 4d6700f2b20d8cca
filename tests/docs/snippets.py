"""The snippets of a page: which blocks are run, in which order, on which files.

All ``python`` and ``sh`` blocks of a page are run from top to bottom, in one directory and, the Python ones, in one
namespace, as a reader would type them. What a page needs beyond the usual files it says in a comment that a reader of
the rendered page does not see, on a line of its own above the block:

    <!-- snippet: setup=NAME -->      a fresh directory and namespace from this function of tests/docs/setups.py
    <!-- snippet: skip=REASON -->     the next block is not run, and why

A page without the first begins with ``setup=standard``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Segment", "Snippet", "segments"]

_LANGUAGES = ("python", "sh")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[a-z]*)\s*$")
_COMMENT = re.compile(r"^\s*<!-- snippet: (?P<key>\w+)=(?P<value>.*?) -->\s*$")


@dataclass(frozen=True)
class Snippet:
    """A block: its language, the line of the page that it begins on, and its text."""

    language: str
    line: int
    text: str


@dataclass(frozen=True)
class Segment:
    """Blocks that share a directory and a namespace, and the name of what sets them up."""

    setup: str
    snippets: tuple[Snippet, ...]


def segments(page: str) -> tuple[Segment, ...]:
    """The segments of a page, those without blocks left out.

    Raises:
        ValueError: a comment that is not understood, or a fence that is not closed.
    """
    found: list[tuple[str, list[Snippet]]] = [("standard", [])]
    is_skipped = False
    for item in _items(page):
        if isinstance(item, Snippet):
            if item.language in _LANGUAGES and not is_skipped:
                found[-1][1].append(item)
            is_skipped = False
        elif item[0] == "setup":
            found.append((item[1], []))
        elif item[0] == "skip":
            is_skipped = True
        else:
            raise ValueError(f"'{item[0]}' is no word for a snippet's comment: setup or skip")
    return tuple(Segment(setup, tuple(own)) for setup, own in found if own)


def _items(page: str) -> Iterator[Snippet | tuple[str, str]]:
    lines = iter(enumerate(page.splitlines(), 1))
    for number, line in lines:
        comment, fence = _COMMENT.match(line), _FENCE.match(line)
        if comment is not None:
            yield comment["key"], comment["value"]
        elif "<!-- snippet" in line:
            raise ValueError(f"line {number}: not understood: {line.strip()}")
        elif fence is not None:
            text = []
            for _, inner in lines:
                if inner.strip() == "```":
                    break
                text.append(inner.removeprefix(fence["indent"]))
            else:
                raise ValueError(f"line {number}: this block has no end")
            yield Snippet(fence["language"], number, "\n".join(text) + "\n")
