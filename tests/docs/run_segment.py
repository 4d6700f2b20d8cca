"""Runs one segment of a page in this process, on the files of its set-up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setups import SETUPS
from snippets import segments

__all__ = ["run_segment"]

# `ort-delayed` as a command; what it does, it does in a fork of the warm process.
_COMMAND = """#!{python} -IS
import sys
sys.path.insert(0, {here!r})
from warm_request import ask
sys.exit(ask({socket!r}, {{"command": sys.argv[1:]}}, (0, 1, 2)))
"""


def run_segment(page: str, number: int, directory: Path, socket: str) -> None:
    """Set up, then run block after block, each as a reader would type it; the first that fails raises."""
    segment = segments(Path(page).read_text())[number]
    names = SETUPS[segment.setup](directory) | {"__name__": "__main__"}
    commands = directory / ".commands"
    commands.mkdir()
    here = str(Path(__file__).resolve().parent)
    (commands / "ort-delayed").write_text(_COMMAND.format(python=sys.executable, here=here, socket=socket))
    (commands / "ort-delayed").chmod(0o755)
    (commands / "python").symlink_to(sys.executable)
    os.environ["PATH"] = f"{commands}{os.pathsep}{os.environ['PATH']}"
    for snippet in segment.snippets:
        print(f"--- line {snippet.line}", flush=True)
        if snippet.language == "sh":
            subprocess.run(["bash", "-euo", "pipefail", "-c", snippet.text], check=True)
        else:
            # Blank lines in front, so that a traceback has the page's line numbers.
            exec(compile("\n" * snippet.line + snippet.text, page, "exec"), names)
