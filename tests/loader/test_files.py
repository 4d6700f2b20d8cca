"""Opening weight files: regular ones, and inside the directories that a caller allows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ort_delayed.loader.files import (
    FileIdentity,
    NotARegularFileError,
    OutsideDirectoryError,
    confining_directories,
    is_inside,
    open_weights,
    opened_weights,
)


def hub_cache(tmp_path: Path) -> Path:
    """A hub cache's snapshot directory; the repository folder holds one blob."""
    repository = tmp_path / "models--a--b"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "abc").write_bytes(b"weights")
    snapshot = repository / "snapshots" / "rev"
    (snapshot / "onnx").mkdir(parents=True)
    return snapshot


def test_a_directory_confines_to_itself(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    assert confining_directories(str(tmp_path / "link")) == (os.path.realpath(tmp_path),)


@pytest.mark.parametrize("below", [".", "onnx"])
def test_a_snapshot_includes_the_blobs_of_its_repository(tmp_path: Path, below: str) -> None:
    snapshot = hub_cache(tmp_path) / below
    real, blobs = confining_directories(str(snapshot))
    assert real == os.path.realpath(snapshot)
    assert blobs == os.path.realpath(tmp_path / "models--a--b" / "blobs")


def test_a_directory_called_snapshots_alone_includes_nothing(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "rev").mkdir(parents=True)
    assert len(confining_directories(str(tmp_path / "snapshots" / "rev"))) == 1


def test_inside_is_by_whole_components() -> None:
    assert is_inside("/a/b/c", ["/a/b"])
    assert is_inside("/a/b", ["/a/b"])
    assert is_inside("/x", ["/"])
    assert not is_inside("/a/bc", ["/a/b"])


def test_a_regular_file_is_opened_for_reading(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"abc")
    with opened_weights(str(tmp_path / "w")) as fd:
        assert os.read(fd, 9) == b"abc"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_links_lead_only_inside(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"no")
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "file").write_bytes(b"yes")
    (inside / "good").symlink_to("file")
    (inside / "bad").symlink_to("../outside")
    within = confining_directories(str(inside))
    with opened_weights(str(inside / "good"), within=within) as fd:
        assert os.read(fd, 9) == b"yes"
    for path in (inside / "bad", inside / ".." / "outside"):
        with pytest.raises(OutsideDirectoryError, match="outside the directory"):
            open_weights(str(path), within=within)


def test_a_blob_of_the_same_repository_is_inside(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    (snapshot / "onnx" / "w").symlink_to("../../../blobs/abc")
    with opened_weights(str(snapshot / "onnx" / "w"), within=confining_directories(str(snapshot / "onnx"))) as fd:
        assert os.read(fd, 9) == b"weights"


@pytest.mark.parametrize("confined", [False, True])
def test_only_regular_files_are_read(tmp_path: Path, confined: bool) -> None:
    within = confining_directories(str(tmp_path)) if confined else None
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(NotARegularFileError, match="a FIFO"):
        open_weights(str(tmp_path / "fifo"), within=within)
    (tmp_path / "d").mkdir()
    with pytest.raises(IsADirectoryError):
        open_weights(str(tmp_path / "d"), within=within)
    with pytest.raises(FileNotFoundError):
        open_weights(str(tmp_path / "none"), within=within)


def test_devices_are_not_read() -> None:
    with pytest.raises(NotARegularFileError, match="a character device"):
        open_weights("/dev/zero")


def test_identity_tells_a_file_from_another_and_from_itself_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"abc")
    first = FileIdentity.of(str(path))
    with opened_weights(str(path)) as fd:
        assert FileIdentity.of(fd) == first
    os.utime(path, ns=(0, first.mtime_ns + 1))
    assert FileIdentity.of(str(path)) != first
    (tmp_path / "other").write_bytes(b"abc")
    os.replace(tmp_path / "other", path)
    os.utime(path, ns=(0, first.mtime_ns))
    assert FileIdentity.of(str(path)) != first
