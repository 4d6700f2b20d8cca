"""Finding which addresses show which tensor, and noticing files that change."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ort_delayed.loader import platform
from ort_delayed.loader.element_types import element_type_from_dtype
from ort_delayed.loader.errors import ShardFormatError
from ort_delayed.loader.mapped_ranges import (
    AmbiguousMappingsError,
    MappedFileChanged,
    MappedFiles,
    Piece,
    check_own,
    find_pieces,
)
from ort_delayed.loader.tensor_on_disk import TensorOnDisk

PAGE = mmap.PAGESIZE
U8 = element_type_from_dtype(np.dtype(np.uint8))


def tensor(name: str, offset: int, nbytes: int, path: str = "/w") -> TensorOnDisk:
    assert U8 is not None
    return TensorOnDisk(name, path, offset, nbytes, (nbytes,), U8)


def mapping(address: int, nbytes: int, offset: int, path: str = "/w") -> platform.FileMapping:
    return platform.FileMapping(address, nbytes, offset, path)


def test_a_tensor_is_found_in_the_mapping_that_shows_it() -> None:
    found = find_pieces([tensor("t", 5 * PAGE + 8, 100)], [mapping(0x10000, 4 * PAGE, 4 * PAGE)])
    assert found == {"t": (Piece(0x10000 + PAGE, PAGE, "/w", 5 * PAGE),)}


def test_a_tensor_across_pages_takes_all_of_them() -> None:
    found = find_pieces([tensor("t", PAGE - 1, PAGE + 2)], [mapping(0x10000, 4 * PAGE, 0)])
    assert found == {"t": (Piece(0x10000, 3 * PAGE, "/w", 0),)}


def test_large_tensors_are_cut_at_addresses() -> None:
    found = find_pieces([tensor("t", 0, 10 * PAGE)], [mapping(0x13000, 10 * PAGE, 0)], piece_bytes=4 * PAGE)
    assert [(p.address, p.nbytes // PAGE) for p in found["t"]] == [
        (0x13000, 1),
        (0x14000, 4),
        (0x18000, 4),
        (0x1C000, 1),
    ]
    assert all(p.address - p.offset == 0x13000 for p in found["t"])


def test_two_tensors_on_the_same_bytes_have_two_mappings() -> None:
    mappings = [mapping(0x10000, PAGE, 0), mapping(0x20000, PAGE, 0)]
    found = find_pieces([tensor("a", 0, 8), tensor("b", 0, 8)], mappings)
    assert {p.address for own in found.values() for p in own} == {0x10000, 0x20000}


def test_the_tightest_mapping_is_taken() -> None:
    mappings = [mapping(0x10000, 8 * PAGE, 0), mapping(0x40000, PAGE, PAGE)]
    assert find_pieces([tensor("t", PAGE, 8)], mappings)["t"][0].address == 0x40000


@pytest.mark.parametrize(
    "missing",
    [
        tensor("other file", 0, 8, "/v"),
        tensor("behind", 4 * PAGE, 8),
        tensor("half", PAGE, 2 * PAGE),
        tensor("empty", 0, 0),
    ],
    ids=lambda t: t.name,
)
def test_what_no_mapping_shows_is_left_out(missing: TensorOnDisk) -> None:
    assert find_pieces([missing], [mapping(0x10000, 2 * PAGE, 0)]) == {}


def test_mappings_of_somebody_else_are_refused() -> None:
    shown = [tensor("a", 0, 8), tensor("b", 0, PAGE), tensor("c", PAGE, 8)]
    own = [mapping(0x10000, PAGE, 0), mapping(0x20000, PAGE, 0), mapping(0x30000, PAGE, PAGE)]
    check_own(shown, own)
    check_own(shown, [*own, mapping(0x40000, 2 * PAGE, 0)])
    with pytest.raises(AmbiguousMappingsError, match="2 mappings of '/w' appeared where 1 was"):
        check_own(shown, [*own, mapping(0x40000, PAGE, PAGE)])


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "we ights\n.bin"
    path.write_bytes(bytes(range(256)) * (64 * PAGE // 256))
    return path


@pytest.fixture
def files(weights: Path) -> Iterator[MappedFiles]:
    opened = MappedFiles([str(weights)])
    yield opened
    opened.close()


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given up on Linux only")
def test_given_up_pages_come_back_with_the_same_bytes(weights: Path) -> None:
    path = str(weights)
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    shown = np.frombuffer(memory, np.uint8)
    before = int(shown.sum())
    pieces = find_pieces([tensor("t", 0, 64 * PAGE, path)], platform.file_mappings({path}))["t"]
    assert sum(piece.nbytes for piece in pieces) == 64 * PAGE
    for piece in pieces:
        platform.give_up_pages(piece.address, piece.nbytes)
    assert int(shown.sum()) == before
    del shown
    memory.close()
    assert platform.file_mappings({path}) == []


def test_an_unchanged_file_passes(files: MappedFiles) -> None:
    files.check_unchanged()
    files.check_unchanged()


def test_a_replaced_file_is_noticed(files: MappedFiles, weights: Path) -> None:
    other = weights.with_name("new")
    other.write_bytes(weights.read_bytes())
    other.replace(weights)
    with pytest.raises(MappedFileChanged, match="another file stands in its place"):
        files.check_unchanged()


def test_a_truncated_file_is_noticed(files: MappedFiles, weights: Path) -> None:
    os.truncate(weights, 10)
    with pytest.raises(MappedFileChanged, match="and has 10"):
        files.check_unchanged()


def test_a_rewritten_file_is_noticed(files: MappedFiles, weights: Path) -> None:
    os.utime(weights, ns=(1, 1))
    with pytest.raises(MappedFileChanged, match="written to"):
        files.check_unchanged()


def test_a_removed_file_is_noticed(files: MappedFiles, weights: Path) -> None:
    weights.unlink()
    with pytest.raises(MappedFileChanged, match="cannot be found any more"):
        files.check_unchanged()


def test_a_tensor_must_end_inside_its_file(files: MappedFiles, weights: Path) -> None:
    files.check_inside([tensor("fits", 0, 64 * PAGE, str(weights))])
    with pytest.raises(ShardFormatError, match=r"'long' needs 2 bytes [\s\S]* holds 1"):
        files.check_inside([tensor("long", 64 * PAGE - 1, 2, str(weights))])


def test_closing_twice_is_harmless_and_leaves_no_descriptor(weights: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    opened = MappedFiles([str(weights), str(weights)])
    opened.close()
    opened.close()
    opened.drop_cached(Piece(0, PAGE, str(weights), 0))
    assert sys.platform != "linux" or len(os.listdir("/proc/self/fd")) == before


def test_a_missing_file_leaves_nothing_open(weights: Path) -> None:
    with pytest.raises(FileNotFoundError):
        MappedFiles([str(weights), str(weights) + ".missing"])
