"""Safetensors shards and indexes. The library decides what is valid; offsets and bytes are checked against it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    SAFETENSORS_NAMES,
    Array,
    bits,
    entry,
    library_knows,
    raw_safetensors,
    save_index,
    save_safetensors,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from ort_delayed.loader import safetensors_files
from ort_delayed.loader.budget import RamBudgetExceeded
from ort_delayed.loader.errors import LocalWeightsRequired, ShardFormatError
from ort_delayed.loader.files import FileIdentity
from ort_delayed.loader.probe import PeakRamProbe
from ort_delayed.loader.safetensors_files import (
    SafetensorsShard,
    read_index,
    read_shard,
    tensors_of_index,
    tensors_of_shards,
)
from ort_delayed.loader.tensor_on_disk import TensorOnDisk


def stored_bytes(tensor: TensorOnDisk) -> bytes:
    return Path(tensor.path).read_bytes()[tensor.offset : tensor.end]


def test_every_type_is_found_where_it_stands(tmp_path: Path) -> None:
    types = [name for name, dtype in SAFETENSORS_NAMES.items() if library_knows(dtype)]
    assert {"float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool"} <= set(types)
    arrays = {f"t{i}": bits(name, (3, 2), seed=i) for i, name in enumerate(types)}
    arrays |= {"empty": bits("float32", (0, 4)), "scalar": bits("bool", ()), "last": bits("int8", (1,))}
    path = save_safetensors(tmp_path / "m.safetensors", arrays)
    shard = read_shard(str(path))
    assert {t.name for t in shard.tensors} == set(arrays)
    for tensor in shard.tensors:
        array = arrays[tensor.name]
        assert (tensor.shape, tensor.element_type.name) == (array.shape, array.dtype.name)
        assert stored_bytes(tensor) == array.tobytes()
    assert shard.identity == FileIdentity.of(str(path))


@pytest.mark.parametrize(("dtype", "count", "nbytes"), [("F4", 4, 2), ("F6_E2M3", 4, 3), ("F6_E3M2", 8, 6)])
def test_types_that_are_packed_below_a_byte(tmp_path: Path, dtype: str, count: int, nbytes: int) -> None:
    header = {"p": entry(0, nbytes, [count], dtype), "q": entry(nbytes, nbytes + 4)}
    path = raw_safetensors(tmp_path / "m.safetensors", header, bytes(range(nbytes + 4)))
    packed, after = read_shard(str(path)).tensors
    assert (packed.nbytes, packed.shape, packed.element_type.safetensors) == (nbytes, (count,), dtype)
    assert stored_bytes(after) == bytes(range(nbytes, nbytes + 4))


VALID = {"a": entry(0, 8), "b": entry(8, 16)}


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "tensor 'b' overlaps tensor 'a' by 4 bytes"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, 20, "a hole of 4 bytes between tensor 'a' and tensor 'b'"),
        ({"a": entry(4, 12)}, 12, "a hole of 4 bytes between the start of the data and tensor 'a'"),
        (VALID, 19, "3 trailing bytes follow the last tensor"),
        (VALID, 15, "it is truncated: its tensors take 16 bytes, the file holds 15 of them"),
        ({"a": entry(0, 8, [2**40, 2**40])}, 8, "overflows"),
        ({"a": entry(0, 8, [2], "F31")}, 8, "the type F31, which this release of safetensors does not know"),
        ({"a": entry(0, 8, [3])}, 8, "its header is not valid .*invalid shape, data type, or offset"),
        ({"a": entry(8, 0, [2])}, 8, "tensor 'a' ends at byte 0 of the data, before it starts at 8"),
        ({"a": entry(0, 8, [-2])}, 8, "its header is not valid .*integer `-2`"),
        (b"{nonsense", 8, "its header is not valid .*invalid JSON"),
        (b"[1]", 0, "its header is not valid"),
        (b"\xff{}", 0, "its header is not valid .*UTF-8"),
    ],
)
def test_faulty_files_are_refused_each_with_its_own_message(
    tmp_path: Path, header: object, data: int, said: str
) -> None:
    path = raw_safetensors(tmp_path / "m.safetensors", header, bytes(data))
    with pytest.raises(SafetensorError), safe_open(path, framework="np"):
        pass
    with pytest.raises(ShardFormatError, match=said) as caught:
        read_shard(str(path))
    assert f"'{path}' is not a complete, valid safetensors file" in str(caught.value)
    assert isinstance(caught.value.__cause__, SafetensorError)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file has 0 bytes"),
        (b"1234567", "the file has 7 bytes"),
        ((200).to_bytes(8, "little") + b"{}", "the header should take 200 bytes, 2 follow"),
        ((2**63).to_bytes(8, "little") + b"{}", "truncated or no safetensors file"),
    ],
)
def test_files_that_end_too_soon(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(ShardFormatError, match=said):
        read_shard(str(tmp_path / "m.safetensors"))


def test_a_tensor_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardFormatError, match="has no name"):
        read_shard(str(raw_safetensors(tmp_path / "m.safetensors", {"": entry(0, 8)}, bytes(8))))


class _Opened:
    """What the library would return for a file that a later release of it accepts."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def offset_keys(self) -> list[str]:
        return ["a"]

    def metadata(self) -> None:
        return None

    def get_slice(self, name: str) -> _Opened:
        return self

    def get_shape(self) -> list[int]:
        return [2]

    def get_dtype(self) -> str:
        return self.dtype


@pytest.mark.parametrize(("dtype", "said"), [("F128", "has the type F128"), ("F32", "allows gaps")])
def test_what_a_later_library_might_accept_is_not_guessed_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, said: str
) -> None:
    path = raw_safetensors(tmp_path / "m.safetensors", {"a": entry(4, 12)}, bytes(12))
    monkeypatch.setattr(safetensors_files, "safe_open", lambda *_, **__: _Opened(dtype))
    with pytest.raises(ShardFormatError, match=said):
        read_shard(str(path))


def test_an_older_library_without_backends_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(path: str, framework: str) -> object:
        return safe_open(path, framework=framework)

    path = save_safetensors(tmp_path / "m.safetensors", {"a": bits("int8", (3,))})
    monkeypatch.setattr(safetensors_files, "safe_open", older)
    assert [t.name for t in read_shard(str(path)).tensors] == ["a"]


def test_headers_are_read_and_not_mapped_where_the_library_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def recording(*args: object, backend: object, **kwargs: object) -> object:
        asked.append(backend)
        return safe_open(*args, **kwargs)

    path = save_safetensors(tmp_path / "m.safetensors", {"a": bits("int8", (3,))})
    monkeypatch.setattr(safetensors_files, "safe_open", recording)
    read_shard(str(path))
    assert asked == ["pread"]


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_safetensors(tmp_path / "m.safetensors", {"a": bits("int8", (3,))})

    def replacing(*args: object, **kwargs: object) -> object:
        path.unlink()
        save_safetensors(path, {"a": bits("int8", (5,))})
        return safe_open(*args, **kwargs)

    monkeypatch.setattr(safetensors_files, "safe_open", replacing)
    with pytest.raises(ShardFormatError, match="changed while its header was read"):
        read_shard(str(path))


def test_a_header_is_reserved_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_safetensors(tmp_path / "m.safetensors", {"a": bits("int8", (3,))})
    header = int.from_bytes(path.read_bytes()[:8], "little")
    monkeypatch.setattr(safetensors_files, "safe_open", None)
    probe = PeakRamProbe(header + 7, rss_sampler=lambda: 0)
    with probe, pytest.raises(RamBudgetExceeded, match="reading the header") as caught:
        read_shard(str(path), probe=probe)
    assert caught.value.requested_bytes == header + 8


def test_memory_that_reading_a_header_took_is_checked(tmp_path: Path) -> None:
    path = save_safetensors(tmp_path / "m.safetensors", {"a": bits("int8", (3,))})
    samples: Iterator[int] = iter([0, 0, 5000])
    probe = PeakRamProbe(4000, rss_sampler=lambda: next(samples), poll_interval_seconds=None)
    probe.start()
    with pytest.raises(RamBudgetExceeded) as caught:
        read_shard(str(path), probe=probe)
    assert caught.value.observed_bytes == 5000


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(names, st.sampled_from(["float32", "bfloat16", "bool"]), st.lists(st.integers(0, 3), max_size=3)),
        unique_by=lambda t: t[0],
    ),
    st.data(),
)
def test_what_the_library_accepts_is_read_as_it_reads_it(
    tmp_path: Path, rows: list[tuple[str, str, list[int]]], data: st.DataObject
) -> None:
    arrays = {name: bits(dtype, tuple(shape), i) for i, (name, dtype, shape) in enumerate(rows)}
    path = save_safetensors(tmp_path / "m.safetensors", arrays)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 1))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        with safe_open(path, framework="np") as opened:
            expected = {k: (opened.get_slice(k).get_shape(), opened.get_slice(k).get_dtype()) for k in opened.keys()}  # noqa: SIM118
    except SafetensorError:
        with pytest.raises(ShardFormatError):
            read_shard(str(path))
        return
    if "" in expected:
        return
    found = read_shard(str(path)).tensors
    assert {t.name: (list(t.shape), t.element_type.safetensors) for t in found} == expected
    assert sorted(t.offset for t in found) == [t.offset for t in found]
    assert sum(t.nbytes for t in found) == len(content) - (found[0].offset if found else len(content))


# Indexes


def index_tensors(path: Path) -> tuple[TensorOnDisk, ...]:
    index = read_index(str(path), str(path.parent))
    return tensors_of_index(index, {shard: read_shard(shard) for shard in set(index.shard_of.values())})


SHARDS: dict[str, dict[str, Array]] = {
    "s1.safetensors": {"a": bits("float32", (2,)), "b": bits("float32", (3,), 1)},
    "s2.safetensors": {"c": bits("int8", (5,), 2)},
}


def test_an_index_says_which_shard_a_tensor_comes_from(tmp_path: Path) -> None:
    path = save_index(tmp_path / "m.safetensors.index.json", SHARDS)
    found = {t.name: t for t in index_tensors(path)}
    assert {n: Path(t.path).name for n, t in found.items()} == {
        "a": "s1.safetensors",
        "b": "s1.safetensors",
        "c": "s2.safetensors",
    }
    assert stored_bytes(found["c"]) == SHARDS["s2.safetensors"]["c"].tobytes()


def rewrite(path: Path, **changes: object) -> Path:
    """Changes top-level entries of an index."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def test_the_index_decides_and_extra_tensors_are_ignored(tmp_path: Path) -> None:
    shards = {
        "s1.safetensors": {"a": bits("int8", (2,))},
        "s2.safetensors": {"a": bits("int8", (2,), 1), "x": bits("int8", (9,))},
    }
    path = save_index(tmp_path / "m.safetensors.index.json", shards)
    (only,) = index_tensors(rewrite(path, weight_map={"a": "s2.safetensors"}, metadata={}))
    assert stored_bytes(only) == shards["s2.safetensors"]["a"].tobytes()


def test_a_shard_without_a_tensor_that_the_index_gives_it(tmp_path: Path) -> None:
    path = save_index(tmp_path / "m.safetensors.index.json", SHARDS)
    with pytest.raises(ShardFormatError, match=r"gives tensor 'd' to '.*s2.safetensors', which lacks it: no shard"):
        index_tensors(rewrite(path, weight_map={"c": "s2.safetensors", "d": "s2.safetensors"}))


def test_a_stale_index_that_gives_a_tensor_another_shard(tmp_path: Path) -> None:
    path = save_index(tmp_path / "m.safetensors.index.json", SHARDS)
    with pytest.raises(ShardFormatError, match=r"which lacks it: the index is stale, '.*s1.safetensors' holds it"):
        index_tensors(rewrite(path, weight_map={"a": "s2.safetensors", "b": "s1.safetensors"}))


def test_a_stale_index_that_was_written_for_other_tensors(tmp_path: Path) -> None:
    path = save_index(tmp_path / "m.safetensors.index.json", SHARDS)
    with pytest.raises(ShardFormatError, match=r"is stale: it was written for 999 bytes .* names take 25 bytes"):
        index_tensors(rewrite(path, metadata={"total_size": 999}))


@pytest.mark.parametrize(
    "total",
    [25, 21, 13, 13.0, None, 0, "25", True],
    ids=["of the shards", "of the names", "of the bytes", "a float", "none", "zero", "text", "bool"],
)
def test_totals_that_writers_write(tmp_path: Path, total: object) -> None:
    # "a" and "tied" are the same 8 bytes, "c" has 5, "b" (12) is not in the map.
    path = save_index(tmp_path / "m.safetensors.index.json", SHARDS)
    save_safetensors(tmp_path / "s1.safetensors", SHARDS["s1.safetensors"], {"tied": "a"})
    weight_map = {"a": "s1.safetensors", "tied": "s1.safetensors", "c": "s2.safetensors"}
    found = index_tensors(rewrite(path, weight_map=weight_map, metadata={"total_size": total}))
    assert {t.name for t in found} == {"a", "tied", "c"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not valid JSON"),
        ("[]", "no 'weight_map'"),
        ("{}", "no 'weight_map'"),
        ('{"weight_map": {}}', "no 'weight_map'"),
        ('{"weight_map": ["a"]}', "no 'weight_map'"),
        ('{"weight_map": {"a": 3}}', "gives tensor 'a' the shard 3"),
        ('{"weight_map": {"a": ""}}', "gives tensor 'a' the shard ''"),
        ('{"weight_map": {"a": "x\\u0000"}}', "no file name"),
        ('{"weight_map": {"a": "\\ud800"}}', "no file name"),
        ('{"weight_map": {"": "s"}}', "gives tensor '' the shard 's'"),
        ('{"weight_map": {"a": "s", "a": "t"}}', "the key 'a' stands there twice"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_faulty_indexes(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "i").write_text(text)
    with pytest.raises(ShardFormatError, match=said):
        read_index(str(tmp_path / "i"), str(tmp_path))


def test_an_index_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "i").write_bytes(b'{"weight_map": {"\xff": "s"}}')
    with pytest.raises(ShardFormatError, match="is not valid JSON"):
        read_index(str(tmp_path / "i"), str(tmp_path))


@pytest.mark.parametrize("location", ["https://h/s.safetensors", "/etc/s.safetensors"])
def test_an_index_names_local_relative_shards(tmp_path: Path, location: str) -> None:
    (tmp_path / "i").write_text(json.dumps({"weight_map": {"a": location}}))
    with pytest.raises(LocalWeightsRequired, match=r"the index '.*/i' names the shard"):
        read_index(str(tmp_path / "i"), str(tmp_path))


def test_an_index_is_reserved_before_it_is_read_and_checked_after(tmp_path: Path) -> None:
    (tmp_path / "i").write_text(json.dumps({"weight_map": {"a": "s"}}))
    probe = PeakRamProbe(5, rss_sampler=lambda: 0)
    with probe, pytest.raises(RamBudgetExceeded, match="reading the index") as caught:
        read_index(str(tmp_path / "i"), str(tmp_path), probe=probe)
    assert caught.value.requested_bytes == (tmp_path / "i").stat().st_size
    samples = iter([0, 0, 5000])
    probe = PeakRamProbe(4000, rss_sampler=lambda: next(samples), poll_interval_seconds=None)
    probe.start()
    with pytest.raises(RamBudgetExceeded) as caught:
        read_index(str(tmp_path / "i"), str(tmp_path), probe=probe)
    assert caught.value.observed_bytes == 5000


# Tied names, and shards without an index


def test_a_tied_name_in_the_metadata_resolves(tmp_path: Path) -> None:
    metadata = {"lm_head.weight": "embed.weight", "format": "pt", "other": "no tensor", "embed.weight": "embed.weight"}
    path = save_safetensors(tmp_path / "m.safetensors", {"embed.weight": bits("float16", (2, 3))}, metadata)
    kept, tied = tensors_of_shards([read_shard(str(path))])
    assert (kept.name, tied.name) == ("embed.weight", "lm_head.weight")
    assert (tied.path, tied.offset, tied.nbytes, tied.shape) == (kept.path, kept.offset, kept.nbytes, kept.shape)


def test_a_stored_tensor_wins_over_a_tied_name(tmp_path: Path) -> None:
    one = save_safetensors(tmp_path / "1.safetensors", {"a": bits("int8", (2,))}, {"b": "a"})
    two = save_safetensors(tmp_path / "2.safetensors", {"b": bits("int8", (3,), 1)})
    found = {t.name: t for t in tensors_of_shards([read_shard(str(one)), read_shard(str(two))])}
    assert found["b"].path == str(two)


def test_a_name_in_two_shards_needs_an_index(tmp_path: Path) -> None:
    shards: list[SafetensorsShard] = []
    for name in ("1", "2"):
        shards.append(read_shard(str(save_safetensors(tmp_path / name, {"a": np.zeros(2, np.float32)}))))
    with pytest.raises(ShardFormatError, match=r"tensor 'a' stands in '.*/1' and in '.*/2', and no index"):
        tensors_of_shards(shards)


def test_two_tied_names_in_two_shards_need_an_index(tmp_path: Path) -> None:
    shards = [read_shard(str(save_safetensors(tmp_path / n, {n: bits("int8", (2,))}, {"tied": n}))) for n in ("1", "2")]
    with pytest.raises(ShardFormatError, match="tensor 'tied' stands in"):
        tensors_of_shards(shards)
