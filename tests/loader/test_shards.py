"""Opening shards: local, inside, there, and unchanged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ort_delayed.loader.errors import LocalWeightsRequired, ShardFormatError
from ort_delayed.loader.files import FileIdentity, confining_directories
from ort_delayed.loader.shards import is_url, opened_shard, shard_path


@pytest.mark.parametrize(
    "text", ["https://h/x", "http:/h/x", "hf://a/b", "hf:a/b", "s3://b/k", "file:///x", "git+ssh://x"]
)
def test_urls(text: str) -> None:
    assert is_url(text)


@pytest.mark.parametrize("text", ["/a/b", "a/b", "C:/a", "C:\\a", "a:b", "model.onnx", "./https:/x", ""])
def test_paths(text: str) -> None:
    assert not is_url(text)


def test_a_shard_is_relative_to_the_artifact_directory() -> None:
    assert shard_path("a/b.bin", "/m", "the index 'x'") == "/m/a/b.bin"


def test_a_shard_given_by_url_is_refused() -> None:
    with pytest.raises(LocalWeightsRequired, match=r"the index 'x' names the shard 'https://h/s': .* not URLs"):
        shard_path("https://h/s", "/m", "the index 'x'")


def test_an_absolute_shard_is_refused() -> None:
    with pytest.raises(LocalWeightsRequired, match=r"'/m/s'.* must be relative"):
        shard_path("/m/s", "/m", "the index 'x'")


def test_an_opened_shard_comes_with_its_identity_and_is_closed(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"abc")
    with opened_shard(str(tmp_path / "s"), within=None) as (fd, identity):
        assert identity == FileIdentity.of(str(tmp_path / "s"))
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_a_missing_shard(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match=r"weight shard, which the index 'x' names, is not there: '.*/s'"),
        opened_shard(str(tmp_path / "s"), within=None, named_by="the index 'x'"),
    ):
        pass


def test_a_shard_outside(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "s").write_bytes(b"abc")
    (tmp_path / "in" / "s").symlink_to("../s")
    with (
        pytest.raises(LocalWeightsRequired, match="outside the artifact directory"),
        opened_shard(str(tmp_path / "in" / "s"), within=confining_directories(str(tmp_path / "in"))),
    ):
        pass


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p.write_bytes(b"abcd"), "it had 3 bytes and has 4"),
        (lambda p: os.utime(p, ns=(0, 0)), "its time of last change is another"),
        (
            lambda p: (p.with_name("t").write_bytes(b"abc"), os.replace(p.with_name("t"), p)),
            "another file has its name",
        ),
    ],
)
def test_a_shard_that_changed(tmp_path: Path, change: object, said: str) -> None:
    path = tmp_path / "s"
    path.write_bytes(b"abc")
    expected = FileIdentity.of(str(path))
    with opened_shard(str(path), within=None, expected=expected):
        pass
    change(path)  # type: ignore[operator]
    with (
        pytest.raises(ShardFormatError, match=rf"changed after it was discovered \({said}"),
        opened_shard(str(path), within=None, expected=expected),
    ):
        pass


def test_a_shard_that_was_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(b"abc")
    expected = FileIdentity.of(str(path))
    path.unlink()
    with (
        pytest.raises(FileNotFoundError, match="is not there any more"),
        opened_shard(str(path), within=None, expected=expected),
    ):
        pass
