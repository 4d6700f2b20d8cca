"""Runs one segment of a page in this fresh process: python run_segment.py PAGE NUMBER DIRECTORY."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The root too: tests/ort_delayed would pass for the package, which has precedence wherever it stands.
sys.path += [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from setups import SETUPS  # noqa: E402
from snippets import segments  # noqa: E402

_COMMAND = "#!{python}\nimport sys\nsys.argv[0] = 'ort-delayed'\nfrom ort_delayed.cli import main\nsys.exit(main())\n"


def main(page: str, number: str, directory: str) -> None:
    """Set up, then run block after block; the first that fails ends the process with its traceback."""
    segment = segments(Path(page).read_text())[int(number)]
    names = SETUPS[segment.setup](Path(directory)) | {"__name__": "__main__"}
    os.chdir(directory)
    # The command as pip would install it, whether or not this environment has it.
    commands = Path(directory, ".commands")
    commands.mkdir()
    (commands / "ort-delayed").write_text(_COMMAND.format(python=sys.executable))
    (commands / "ort-delayed").chmod(0o755)
    (commands / "python").symlink_to(sys.executable)
    os.environ["PATH"] = f"{commands}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = str(HERE.parents[1])
    for snippet in segment.snippets:
        print(f"--- line {snippet.line}", flush=True)
        if snippet.language == "sh":
            subprocess.run(["bash", "-euo", "pipefail", "-c", snippet.text], check=True)
        else:
            # Blank lines in front, so that a traceback has the page's line numbers.
            exec(compile("\n" * snippet.line + snippet.text, page, "exec"), names)


if __name__ == "__main__":
    main(*sys.argv[1:])
