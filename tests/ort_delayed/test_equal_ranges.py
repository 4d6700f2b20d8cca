"""ort_delayed/equal_ranges.py: ranges of a file with the same bytes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ort_delayed.equal_ranges import find_equal_ranges
from ort_delayed.loader.reading import ShortReadError


def find(path: Path, ranges: dict[str, tuple[int, int]]) -> dict[str, str]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return find_equal_ranges(fd, ranges)
    finally:
        os.close(fd)


def test_the_first_of_equal_ones_stands_for_all(tmp_path: Path) -> None:
    path = tmp_path / "data"
    block = np.random.default_rng(0).bytes(100_000)
    path.write_bytes(block + block + block[:-1] + b"!" + block)
    ranges = {"a": (0, 100_000), "b": (100_000, 100_000), "c": (200_000, 100_000), "d": (300_000, 100_000)}
    assert find(path, ranges) == {"a": "a", "b": "a", "c": "c", "d": "a"}


def test_one_byte_between_the_samples_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "data"
    block = bytearray(1_000_000)
    other = bytearray(block)
    other[700_001] = 1
    path.write_bytes(block + other)
    assert find(path, {"a": (0, 1_000_000), "b": (1_000_000, 1_000_000)}) == {"a": "a", "b": "b"}


@pytest.mark.parametrize("nbytes", [0, 1, 2, 255, 256, 257, 2048])
def test_every_size(tmp_path: Path, nbytes: int) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 64)
    assert find(path, {"a": (0, nbytes), "b": (256, nbytes)}) == {"a": "a", "b": "a"}
    assert find(path, {"a": (0, nbytes), "b": (1, nbytes)}) == {"a": "a", "b": "a" if nbytes == 0 else "b"}


def test_sizes_tell_ranges_apart(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(100))
    assert find(path, {"a": (0, 10), "b": (0, 11)}) == {"a": "a", "b": "b"}


def test_a_file_that_is_too_short(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(100))
    with pytest.raises(ShortReadError):
        find(path, {"a": (0, 101)})
