"""What the tests of the command line work on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from stand_ins import write_stand_ins

from ort_delayed.cli import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def _stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stand_ins(tmp_path_factory.mktemp("stand-ins"))


@pytest.fixture
def files(_stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a fresh copy of the stand-ins."""
    directory = tmp_path / "files"
    shutil.copytree(_stand_ins, directory)
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture
def command(files: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line in this process; returns exit status, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main(arguments)
        except SystemExit as stopped:
            status = int(stopped.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return run
