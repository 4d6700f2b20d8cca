"""ops/run_files.py: files that stay open while a run reads them, and no longer."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ort_delayed
from ort_delayed.ops import make_node
from ort_delayed.ops.run_files import files_stay_open, weights_file

linux = pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")


def descriptors(directory: Path) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(str(directory)):
            found.append(target)
    return found


def model_of(directory: Path, files: int, nodes: int) -> str:
    """The sum of scalars, one per node; the nodes take turns with ``files`` files, each of which holds its number."""
    for number in range(files):
        (directory / f"w{number}").write_bytes(np.float32(number).tobytes())
    names = [f"v{i}" for i in range(nodes)]
    delayed = [
        make_node(name, filename=f"w{i % files}", offset=0, dtype=TensorProto.FLOAT, shape=[], load_device="file")
        for i, name in enumerate(names)
    ]
    value = helper.make_tensor_value_info("y", TensorProto.FLOAT, [])
    graph = helper.make_graph([*delayed, helper.make_node("Sum", names, ["y"])], "g", [], [value])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.rt", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), directory / "m.onnx")
    return str(directory / "m.onnx")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are opened for reading weights."""
    from ort_delayed.ops import run_files

    paths: list[str] = []
    really: Callable[..., int] = run_files.open_weights

    def note(path: str, **kwargs: object) -> int:
        paths.append(os.path.basename(path))
        return really(path, **kwargs)

    monkeypatch.setattr(run_files, "open_weights", note)
    return paths


@linux
def test_a_run_opens_a_file_once_and_leaves_none_open(tmp_path: Path, opened: list[str]) -> None:
    session = ort_delayed.InferenceSession(model_of(tmp_path, 1, 50))
    for runs in (1, 2):
        session.run(None, {})
        assert opened == ["w0"] * runs
        assert descriptors(tmp_path) == []


@linux
@pytest.mark.parametrize("files", [3, 4, 9])
def test_no_more_than_four_files_are_open(tmp_path: Path, files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from ort_delayed.ops import payloads

    most = 0
    really = payloads.weights_file

    def count(path: str, within: tuple[str, ...] | None) -> tuple[int, bool]:
        nonlocal most
        found = really(path, within)
        most = max(most, len(descriptors(tmp_path)))
        return found

    monkeypatch.setattr(payloads, "weights_file", count)
    session = ort_delayed.InferenceSession(model_of(tmp_path, files, 36))
    assert session.run(None, {})[0] == sum(i % files for i in range(36))
    assert most == min(files, 4)
    assert descriptors(tmp_path) == []


@linux
def test_a_failing_run_leaves_no_file_open(tmp_path: Path) -> None:
    session = ort_delayed.InferenceSession(model_of(tmp_path, 3, 9))
    (tmp_path / "w2").write_bytes(b"12")
    for _ in range(3):
        with pytest.raises(ort_delayed.DelayedInitializerError, match="w2"):
            session.run(None, {})
        assert descriptors(tmp_path) == []
    (tmp_path / "w2").write_bytes(np.float32(2).tobytes())
    assert session.run(None, {})[0] == 9


def test_run_async_opens_a_file_once_too(tmp_path: Path, opened: list[str]) -> None:
    session = ort_delayed.InferenceSession(model_of(tmp_path, 1, 50))
    over, results = threading.Event(), []

    def callback(found: list[np.ndarray], user_data: object, message: str) -> None:
        results.append((found, message))
        over.set()

    session.run_async(None, {}, callback, None)
    assert over.wait(30)
    assert results[0][1] == ""
    assert opened == ["w0"]


def test_what_one_thread_keeps_open_is_not_anothers(tmp_path: Path) -> None:
    """A run that began after a file was replaced must not read the old one, whoever else is reading it still."""
    path = tmp_path / "w"
    path.write_bytes(b"old")
    read = []

    def other() -> None:
        with files_stay_open():
            fd, _ = weights_file(str(path), None)
            read.append(os.pread(fd, 3, 0))

    with files_stay_open():
        weights_file(str(path), None)
        (tmp_path / "new").write_bytes(b"new")
        os.replace(tmp_path / "new", path)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        fd, stays_open = weights_file(str(path), None)
        assert stays_open
        assert os.pread(fd, 3, 0) == b"old"
    assert read == [b"new"]


def test_a_confined_reader_does_not_get_what_another_has_open(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "w").write_bytes(b"out")
    with files_stay_open():
        weights_file(str(tmp_path / "w"), None)
        with pytest.raises(PermissionError):
            weights_file(str(tmp_path / "w"), (str(tmp_path / "inside"),))


def test_nested_runs_keep_their_files_apart(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"abc")
    with files_stay_open():
        outer, _ = weights_file(str(tmp_path / "w"), None)
        with files_stay_open():
            inner, _ = weights_file(str(tmp_path / "w"), None)
            assert inner != outer
        assert os.pread(outer, 3, 0) == b"abc"
        assert weights_file(str(tmp_path / "w"), None) == (outer, True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pread(outer, 3, 0)


def test_outside_a_run_the_caller_closes(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"abc")
    fd, stays_open = weights_file(str(tmp_path / "w"), None)
    os.close(fd)
    assert not stays_open
