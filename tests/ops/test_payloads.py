"""Payloads: the bytes of a file, read when they are asked for, and no memory taken for bytes that are not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ort_delayed.loader.element_types import element_type_from_dtype
from ort_delayed.loader.reading import ShortReadError
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.ops.buffers import BufferPool
from ort_delayed.ops.payloads import FilePayload, HeldPayload, read_payload


def tensor(path: Path, shape: tuple[int, ...], dtype: str = "float32", offset: int = 0) -> TensorOnDisk:
    element_type = element_type_from_dtype(np.dtype(dtype))
    assert element_type is not None
    return TensorOnDisk("w", str(path), offset, element_type.nbytes(shape), shape, element_type)


def test_a_file_payload_reads_at_every_request(tmp_path: Path) -> None:
    path, pool = tmp_path / "w.bin", BufferPool()
    payload = FilePayload(tensor(path, (2,)), None)
    for numbers in ([1, 2], [3, 4]):
        path.write_bytes(np.array(numbers, np.float32).tobytes())
        assert payload.elements(pool).tolist() == numbers


def test_a_held_payload_is_what_it_was_given() -> None:
    held = np.arange(3, dtype=np.int8)
    element_type = element_type_from_dtype(held.dtype)
    assert element_type is not None
    assert HeldPayload(element_type, (3,), held).elements(BufferPool()) is held


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 7])
def test_unaligned_offsets(offset: int, tmp_path: Path) -> None:
    numbers = np.array([1.5, -2.5], np.float64)
    (tmp_path / "w.bin").write_bytes(b"\xff" * offset + numbers.tobytes())
    read = read_payload(tensor(tmp_path / "w.bin", (2,), "float64", offset), None, BufferPool().lend)
    assert read.tolist() == numbers.tolist()


@pytest.mark.parametrize(("size", "offset", "found"), [(7, 0, 7), (10, 4, 6), (4, 4, 0), (4, 100, 0), (0, 0, 0)])
def test_a_file_that_is_too_short_costs_no_memory(size: int, offset: int, found: int, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(size))

    def lend(nbytes: int) -> np.ndarray:
        raise AssertionError(f"{nbytes} bytes were asked for")

    with pytest.raises(ShortReadError) as caught:
        read_payload(tensor(tmp_path / "w.bin", (20_000,), "float32", offset), None, lend)
    assert (caught.value.offset, caught.value.expected_bytes, caught.value.found_bytes) == (offset, 80_000, found)


@pytest.mark.parametrize(("size", "offset", "found"), [(7, 0, 7), (10, 4, 6), (4, 4, 0), (4, 100, 0), (0, 0, 0)])
def test_a_file_that_is_too_short_for_a_small_payload(size: int, offset: int, found: int, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(size))
    with pytest.raises(ShortReadError) as caught:
        read_payload(tensor(tmp_path / "w.bin", (2,), "float32", offset), None, BufferPool().lend)
    assert (caught.value.offset, caught.value.expected_bytes, caught.value.found_bytes) == (offset, 8, found)


@pytest.mark.parametrize("offset", [0, 2, 1000])
def test_zero_elements_need_a_file_and_nothing_in_it(offset: int, tmp_path: Path) -> None:
    absent = tensor(tmp_path / "w.bin", (0, 3), "float32", offset)
    with pytest.raises(FileNotFoundError):
        read_payload(absent, None, BufferPool().lend)
    (tmp_path / "w.bin").write_bytes(b"ab")
    assert read_payload(absent, None, BufferPool().lend).shape == (0,)


def test_confinement(tmp_path: Path) -> None:
    outside = tmp_path / "outside.bin"
    outside.write_bytes(bytes(8))
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "w.bin").symlink_to(outside)
    with pytest.raises(PermissionError, match="outside the directory"):
        read_payload(tensor(inside / "w.bin", (2,)), [str(inside)], BufferPool().lend)
    assert read_payload(tensor(inside / "w.bin", (2,)), None, BufferPool().lend).tolist() == [0, 0]
