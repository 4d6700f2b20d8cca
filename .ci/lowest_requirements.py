"""Prints the lowest supported version of every base dependency as a pip requirement, from pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path


def lowest(requirements: list[str]) -> list[str]:
    """``["numpy>=2.1"]`` to ``["numpy==2.1"]``; a requirement without a lower bound is an error."""
    pinned = []
    for requirement in requirements:
        found = re.fullmatch(r"([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)(,.*)?", requirement)
        if found is None:
            raise SystemExit(f"{requirement!r} in pyproject.toml has no plain lower bound (name>=version)")
        pinned.append(f"{found[1]}=={found[2]}")
    return pinned


if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    print("\n".join(lowest(project["dependencies"])))
