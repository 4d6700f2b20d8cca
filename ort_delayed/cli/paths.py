"""Paths on the command line that must be there before anything starts."""

from __future__ import annotations

import argparse
import os

__all__ = ["directory"]


def directory(text: str) -> str:
    """An argument's type: a directory that exists. A mistyped one would confine a model to nothing."""
    if not os.path.isdir(text):
        what = "is not a directory" if os.path.exists(text) else "does not exist"
        raise argparse.ArgumentTypeError(f"'{text}' {what}")
    return text
