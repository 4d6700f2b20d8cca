"""Each example runs as its first lines say and prints what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOT_RUN_HERE = {"demo.py": "`make demo` needs a model package", "small_model.py": "what the others use"}


def run(name: str, *arguments: str) -> str:
    # As a user starts it: its own directory comes first on the path.
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_run_delayed():
    out = run("run_delayed.py")
    assert "32 weights are read from weights.bin now" in out
    assert float(out.split()[-1]) < 1e-4


def test_stream_install():
    assert "the session runs without the files" in run("stream_install.py")


@pytest.mark.skipif(sys.platform != "linux", reason="budgets of sessions need Linux")
def test_serve_under_a_budget():
    out = run("serve_under_a_budget.py")
    assert "40 requests answered" in out
    found = re.search(r"peak ([0-9.]+) MiB above the baseline, budget ([0-9.]+) MiB", out)
    assert found is not None
    assert float(found[1]) <= float(found[2])


def test_swap_weights():
    before, after = re.findall(r"[+-][0-9.]+", run("swap_weights.py"))
    assert before != after


def test_every_example_is_tested():
    tested = {"run_delayed.py", "stream_install.py", "serve_under_a_budget.py", "swap_weights.py"}
    assert {n for n in os.listdir(EXAMPLES) if n.endswith(".py")} == tested | set(NOT_RUN_HERE)
