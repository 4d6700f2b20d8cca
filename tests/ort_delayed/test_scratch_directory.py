"""ort_delayed/scratch_directory.py: intermediate files leave nothing behind, not even after a kill."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from subprocesses import run_snippet

from ort_delayed.scratch_directory import ScratchDirectory


def test_it_is_there_inside_the_block_only(tmp_path: Path) -> None:
    with ScratchDirectory(str(tmp_path), "model.onnx") as scratch:
        Path(scratch.file("data")).write_bytes(b"x")
        assert [p.name for p in tmp_path.iterdir()] == [Path(scratch.path).name]
    assert list(tmp_path.iterdir()) == []


def test_it_goes_with_an_exception(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), ScratchDirectory(str(tmp_path), "model.onnx"):
        1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    with (
        ScratchDirectory(str(tmp_path), "model.onnx") as first,
        ScratchDirectory(str(tmp_path), "model.onnx") as second,
    ):
        assert Path(first.path).is_dir()
        assert Path(second.path).is_dir()
        assert first.path != second.path


@pytest.mark.skipif(sys.platform == "win32", reason="no locks that end with the process")
def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    code = """
    import os, signal, sys
    from ort_delayed.scratch_directory import ScratchDirectory
    ScratchDirectory(sys.argv[1], "model.onnx").__enter__()
    ScratchDirectory(sys.argv[1], "other.onnx").__enter__()
    print("made", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    with pytest.raises(AssertionError, match="made"):
        run_snippet(code, tmp_path)
    bystander = tmp_path / ".model.onnx.0123456789ab.packing.txt"
    bystander.touch()
    assert len(list(tmp_path.iterdir())) == 3
    with ScratchDirectory(str(tmp_path), "model.onnx"):
        assert len(list(tmp_path.glob(".model.onnx.*.packing"))) == 1
    names = sorted(p.name.split(".")[1] for p in tmp_path.iterdir())
    assert names == ["model", "other"]
