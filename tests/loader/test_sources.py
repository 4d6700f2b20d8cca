"""Which files a source means, where they may lie, and what is refused before anything is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoints import (
    Array,
    bits,
    entry,
    external_initializer,
    library_knows,
    raw_safetensors,
    save_graph,
    save_index,
    save_onnx,
    save_safetensors,
)
from safetensors import safe_open

from ort_delayed.loader.errors import LocalWeightsRequired, ShardFormatError
from ort_delayed.loader.files import FileIdentity
from ort_delayed.loader.probe import PeakRamProbe
from ort_delayed.loader.sources import DiscoveredWeights, discover_weights, local_source, select_source

A: dict[str, Array] = {"a": bits("float32", (2,), 1)}
B: dict[str, Array] = {"b": bits("int8", (3,), 2)}


def discover(source: Path | str) -> DiscoveredWeights:
    return discover_weights(local_source(source))


def names(found: DiscoveredWeights) -> list[str]:
    return sorted(t.name for t in found.tensors)


@pytest.mark.parametrize(
    "source", ["https://huggingface.co/a/b", "hf://a/b", "hf:a/b", "s3://bucket/key", "file:///tmp/model.safetensors"]
)
def test_urls_are_refused(source: str) -> None:
    with pytest.raises(LocalWeightsRequired, match="must come from a local path"):
        local_source(source)


def test_a_url_in_a_path_object_is_refused() -> None:
    with pytest.raises(LocalWeightsRequired, match="must come from a local path"):
        local_source(Path("https://huggingface.co/a/b"))


def test_a_repository_id_is_refused_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LocalWeightsRequired, match=r"hub repository id.* download the repository first"):
        local_source("sentence-transformers/all-MiniLM-L6-v2")
    with pytest.raises(FileNotFoundError):
        local_source("sentence-transformers/all-MiniLM-L6-v2")


@pytest.mark.parametrize("source", ["nothing.safetensors", "a/b.safetensors", "a/b/c", "./a/b", "here/b"])
def test_a_missing_path_is_a_missing_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(FileNotFoundError, match="no such file or directory") as caught:
        local_source(source)
    assert not isinstance(caught.value, LocalWeightsRequired)


def test_an_existing_directory_that_looks_like_a_repository_id_is_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    save_safetensors(tmp_path / "owner" / "name" / "m.safetensors", A)
    assert names(discover("owner/name")) == ["a"]


def test_sources_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = save_safetensors(tmp_path / "real" / "m.safetensors", A)
    (tmp_path / "link").symlink_to("real", target_is_directory=True)
    (tmp_path / "file").symlink_to("real/m.safetensors")
    for source in (real, str(real), tmp_path / "link" / "m.safetensors", tmp_path / "file"):
        assert local_source(source) == real.resolve()
    assert local_source(tmp_path / "link") == real.parent.resolve()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_source("~/real/m.safetensors") == real.resolve()


def test_one_file(tmp_path: Path) -> None:
    path = save_safetensors(tmp_path / "m.safetensors", A)
    found = discover(path)
    assert (found.source, found.source_format, names(found)) == (path.resolve(), "safetensors", ["a"])
    assert found.identities == {str(path.resolve()): FileIdentity.of(str(path))}


def test_an_index_and_its_shards(tmp_path: Path) -> None:
    path = save_index(tmp_path / "x.safetensors.index.json", {"1.safetensors": A, "2.safetensors": B})
    save_safetensors(tmp_path / "unnamed.safetensors", {"c": bits("int8", (1,))})
    for source in (path, tmp_path):
        found = discover(source)
        assert (found.source, found.source_format, names(found)) == (path.resolve(), "safetensors", ["a", "b"])
    assert {Path(p).name for p in found.identities} == {"1.safetensors", "2.safetensors"}


def test_a_directory_of_shards(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "m-00001-of-00002.safetensors", A)
    save_safetensors(tmp_path / "m-00002-of-00002.SAFETENSORS", B)
    with pytest.raises(FileNotFoundError, match=r"belongs to 'm-00001-of-00002.safetensors' is not there"):
        discover(tmp_path)
    os.rename(tmp_path / "m-00002-of-00002.SAFETENSORS", tmp_path / "m-00002-of-00002.safetensors")
    save_safetensors(tmp_path / "extra.SafeTensors", {"c": bits("int8", (1,))})
    found = discover(tmp_path)
    assert (found.source, names(found)) == (tmp_path.resolve(), ["a", "b", "c"])


def test_an_onnx_model(tmp_path: Path) -> None:
    path = save_onnx(tmp_path / "any.onnx", {**A, **B}, location="data/weights.bin")
    for source in (path, tmp_path):
        found = discover(source)
        assert (found.source, found.source_format) == (path.resolve(), "onnx-external-data")
        assert names(found) == ["a", "b"]
        assert [Path(p).name for p in found.identities] == ["weights.bin"]


def test_an_onnx_model_whose_data_is_a_safetensors_file(tmp_path: Path) -> None:
    shard = save_safetensors(tmp_path / "m.safetensors", A)
    start = shard.stat().st_size - 8
    path = save_graph(tmp_path / "m.onnx", [external_initializer("w", A["a"], "m.safetensors", start)])
    (tensor,) = discover(path).tensors
    assert Path(tensor.path).read_bytes()[tensor.offset : tensor.end] == A["a"].tobytes()


def test_what_a_directory_means(tmp_path: Path) -> None:
    with pytest.raises(ShardFormatError, match="neither safetensors files nor an ONNX model"):
        select_source(tmp_path)
    save_onnx(tmp_path / "other.onnx", A)
    assert select_source(tmp_path).name == "other.onnx"
    save_onnx(tmp_path / "second.onnx", A)
    with pytest.raises(ShardFormatError, match=r"several ONNX models \(other.onnx, second.onnx\)"):
        select_source(tmp_path)
    save_safetensors(tmp_path / "m.safetensors", A)
    assert select_source(tmp_path) == tmp_path
    save_onnx(tmp_path / "model.onnx", A)
    assert select_source(tmp_path).name == "model.onnx"
    save_index(tmp_path / "x.safetensors.index.json", {"m.safetensors": A})
    assert select_source(tmp_path).name == "x.safetensors.index.json"
    save_index(tmp_path / "y.safetensors.index.json", {"m.safetensors": A})
    with pytest.raises(ShardFormatError, match="several indexes"):
        select_source(tmp_path)
    save_index(tmp_path / "model.safetensors.index.json", {"m.safetensors": A})
    assert select_source(tmp_path).name == "model.safetensors.index.json"


@pytest.mark.parametrize("name", ["weights.bin", "config.json", "model.ort"])
def test_other_files_are_no_source(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ShardFormatError, match="is not a weight source"):
        discover(tmp_path / name)


def test_a_source_that_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.safetensors")
    with pytest.raises(OSError, match="a FIFO"):
        discover(tmp_path / "m.safetensors")


def test_sources_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ShardFormatError, match="there are no weights in"):
        discover(save_safetensors(tmp_path / "m.safetensors", {}))
    with pytest.raises(ShardFormatError, match="none of the model's initializers is external data"):
        discover(save_graph(tmp_path / "m.onnx", []))


# Where shards may lie


def test_a_missing_shard_of_an_index(tmp_path: Path) -> None:
    path = save_index(tmp_path / "m.safetensors.index.json", {"1.safetensors": A, "2.safetensors": B})
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"which the index '.*' names, is not there: '.*2.safetensors'"):
        discover(path)


@pytest.mark.parametrize("link", [True, False])
def test_a_shard_outside_the_artifact_directory(tmp_path: Path, link: bool) -> None:
    save_safetensors(tmp_path / "outside.safetensors", A)
    directory = tmp_path / "m"
    directory.mkdir()
    shard = "in.safetensors" if link else "../outside.safetensors"
    if link:
        (directory / shard).symlink_to("../outside.safetensors")
    (directory / "m.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{shard}"}}}}')
    with pytest.raises(LocalWeightsRequired, match="outside the artifact directory"):
        discover(directory)


def test_a_shard_of_a_directory_that_leads_outside(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "outside.safetensors", A)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "in.safetensors").symlink_to("../outside.safetensors")
    with pytest.raises(LocalWeightsRequired, match="outside the artifact directory"):
        discover(tmp_path / "m")


@pytest.mark.parametrize("location", ["../outside.bin", "in.bin"])
def test_external_data_outside_the_models_directory(tmp_path: Path, location: str) -> None:
    (tmp_path / "outside.bin").write_bytes(bytes(8))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "in.bin").symlink_to("../outside.bin")
    path = save_graph(tmp_path / "m" / "m.onnx", [external_initializer("w", A["a"], location, 0)])
    with pytest.raises(LocalWeightsRequired, match="outside the artifact directory"):
        discover(path)


def snapshot(tmp_path: Path, source: Path) -> Path:
    """The files of ``source`` as a hub cache keeps them: links in a snapshot to blobs without names."""
    repository = tmp_path / "models--owner--name"
    revision = repository / "snapshots" / "0123abc"
    (repository / "blobs").mkdir(parents=True)
    for i, path in enumerate(p for p in sorted(source.rglob("*")) if p.is_file()):
        link = revision / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = repository / "blobs" / f"{i:064x}"
        blob.write_bytes(path.read_bytes())
        link.symlink_to(os.path.relpath(blob, link.parent))
    return revision


def test_a_hub_caches_snapshot(tmp_path: Path) -> None:
    source = tmp_path / "plain"
    source.mkdir()
    save_index(source / "model.safetensors.index.json", {"1.safetensors": A, "2.safetensors": B})
    (source / "onnx").mkdir()
    save_onnx(source / "onnx" / "model.onnx", A)
    revision = snapshot(tmp_path, source)
    assert names(discover(revision)) == ["a", "b"]
    assert names(discover(revision / "model.safetensors.index.json")) == ["a", "b"]
    assert names(discover(revision / "1.safetensors")) == ["a"]
    assert names(discover(revision / "onnx")) == ["a"]
    assert names(discover(revision / "onnx" / "model.onnx")) == ["a"]


def test_another_repositorys_blobs_are_outside(tmp_path: Path) -> None:
    source = tmp_path / "plain"
    source.mkdir()
    save_index(source / "model.safetensors.index.json", {"1.safetensors": A})
    revision = snapshot(tmp_path, source)
    save_safetensors(tmp_path / "models--other--x" / "blobs" / "f", A)
    (revision / "1.safetensors").unlink()
    (revision / "1.safetensors").symlink_to("../../../models--other--x/blobs/f")
    with pytest.raises(LocalWeightsRequired, match="outside the artifact directory"):
        discover(revision)


def test_nothing_of_the_weights_is_read(tmp_path: Path) -> None:
    # 64 GiB that take no space: whoever read or copied them would not come back within this budget.
    count = 64 << 30
    path = raw_safetensors(tmp_path / "m.safetensors", {"a": entry(0, count)}, b"")
    start = path.stat().st_size
    os.truncate(path, start + count)
    with PeakRamProbe(32 << 20) as probe:
        (tensor,) = discover_weights(local_source(path), probe=probe).tensors
    assert (tensor.offset, tensor.nbytes) == (start, count)


@pytest.mark.parametrize(
    "shape",
    [(1,) * 65, (0,) * 70, (0, 2**62), (2**31, 2**33 - 1, 0), (2**64 - 1, 0)],
    ids=lambda s: f"{len(s)}-{s[-1]}",
)
def test_a_shape_that_no_array_can_have_is_refused_before_anything_is_read(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """The formats allow it: the safetensors library opens each of these."""
    nbytes = 0 if 0 in shape else 4
    source = raw_safetensors(tmp_path / "m.safetensors", {"odd": entry(0, nbytes, shape)}, bytes(nbytes))
    with safe_open(source, framework="np") as opened:
        assert list(opened.keys()) == ["odd"]
    with pytest.raises(ShardFormatError, match=f"'odd' in '{source}' at offset .* no array can have"):
        discover(source)


def test_empty_and_many_axes_are_no_offence(tmp_path: Path) -> None:
    header = {"none": entry(0, 0, (0, 2**20)), "many": entry(0, 4, (1,) * 64), "packed": entry(4, 4, (0,) * 70, "F4")}
    if not library_knows("F4"):
        del header["packed"]
    assert names(discover(raw_safetensors(tmp_path / "m.safetensors", header, bytes(4)))) == sorted(header)
