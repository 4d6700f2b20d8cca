"""Parsers of files under a coverage-guided fuzzer, two minutes each: in ``make soak``, where there is a wheel of it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from coverage_guided import TARGETS

PROGRAM = Path(__file__).resolve().parent.parent / "coverage_guided.py"
SECONDS = 120


@pytest.mark.soak
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris is not installed: it has no wheel for this Python or processor (pip install ort-delayed[soak])",
)
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_nothing_undocumented_is_raised(target: str, tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), target, str(SECONDS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, timeout=SECONDS * 3 + 120)
    said = done.stderr.decode(errors="replace")
    found = re.search(r"number_of_executed_units: *([0-9]+)", said)
    print(f"{target}: {found[1] if found else 'no'} executions")
    assert done.returncode == 0, f"exit status {done.returncode}; the case is in {tmp_path}\n{said[-6000:]}"
