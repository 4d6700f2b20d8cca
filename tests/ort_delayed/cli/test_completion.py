"""--print-completion: a script that a shell takes, which completes commands, options and files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., tuple[int, str, str]]


def complete(script: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    code = (
        f'source "{script}"; COMP_WORDS=({" ".join(repr(w) for w in words)}); COMP_CWORD={len(words) - 1}; '
        'COMP_LINE="${COMP_WORDS[*]}"; COMP_POINT=${#COMP_LINE}; _shtab_ort_delayed; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return [line.strip() for line in done.stdout.splitlines()]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_files(command: Command, files: Path, tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    status, out, _ = command("--print-completion", "bash")
    assert status == 0
    script = tmp_path / "completion.bash"
    script.write_text(out)
    assert complete(script, "ort-delayed", "in") == ["inspect"]
    assert complete(script, "ort-delayed", "plan", "--r") == ["--ram"]
    assert "model.onnx" in complete(script, "ort-delayed", "inspect", "mod")


def test_an_unknown_shell_is_a_usage_error(command: Command) -> None:
    status, _, err = command("--print-completion", "fish")
    assert status == 2
    assert "fish" in err


def test_without_the_extra_it_says_what_to_install(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    status, out, err = command("--print-completion", "zsh")
    assert status == 2
    assert out == ""
    assert "pip install 'ort-delayed[cli]'" in err
