"""Sizes: read as a user writes them, written as a table shows them."""

from __future__ import annotations

import argparse

__all__ = ["add_ram_argument", "counted", "parse_size", "size_text"]

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def parse_size(text: str) -> int:
    """The bytes that ``512MiB``, ``1.5GB`` or ``300000000`` names, for argparse."""
    from ort_delayed.loader.budget import RamBudget

    try:
        return RamBudget.parse(text).max_bytes
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a size is a positive amount such as 512MiB, 1.5GB or 300000000, found {text!r}"
        ) from None


def size_text(count: int) -> str:
    """A size as tables show it: ``17 B``, ``1.5 KiB``, ``86.2 MiB``."""
    for unit, name in _UNITS:
        if abs(count) >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def counted(number: int, noun: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def add_ram_argument(parser: argparse.ArgumentParser, *, required: bool, what: str) -> None:
    """Add ``--ram``."""
    parser.add_argument("--ram", metavar="SIZE", type=parse_size, required=required, help=what)
