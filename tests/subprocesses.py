"""Running a snippet of Python in a fresh process, for tests in which the process itself could die or hang."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

__all__ = ["run_snippet"]

_ROOT = Path(__file__).resolve().parent.parent
_PREAMBLE = f"""
import faulthandler, sys
faulthandler.enable()
sys.path += [{str(_ROOT)!r}, {str(_ROOT / "tests")!r}]
"""


def run_snippet(
    code: str,
    *arguments: str | Path,
    directory: Path | None = None,
    python_options: tuple[str, ...] = (),
    timeout: float = 60,
) -> str:
    """Run ``code`` in a new interpreter and return what it printed; anything but exit status 0 fails the test.

    ``arguments`` are its ``sys.argv[1:]``, ``directory`` its working directory.
    """
    command = [sys.executable, *python_options, "-c", _PREAMBLE + textwrap.dedent(code), *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=directory)
    except subprocess.TimeoutExpired as hung:
        raise AssertionError(
            f"the process hung ({timeout:.0f} s); it printed:\n{_text(hung.stdout)}\n{_text(hung.stderr)}"
        ) from None
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else (output or "")
