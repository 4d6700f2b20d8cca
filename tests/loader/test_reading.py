"""Positioned reads: exact, in pieces, and honest about files that end too soon."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ort_delayed.loader import platform, reading
from ort_delayed.loader.files import opened_weights
from ort_delayed.loader.reading import ShortReadError, read_into


def read(path: Path, offset: int, count: int) -> bytes:
    buffer = bytearray(count)
    with opened_weights(str(path)) as fd:
        read_into(fd, memoryview(buffer), offset)
    return bytes(buffer)


@pytest.mark.parametrize("piece", [1, 7, 1000, 1001, 5000])
def test_the_bytes_asked_for_arrive_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    content = os.urandom(1003)
    (tmp_path / "w").write_bytes(content)
    monkeypatch.setattr(reading, "PIECE_BYTES", piece)
    assert read(tmp_path / "w", 2, 1001) == content[2:]
    assert read(tmp_path / "w", 5, 0) == b""


def test_no_read_is_longer_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w").write_bytes(bytes(100))
    asked: list[tuple[int, int]] = []
    real = platform.read_at

    def recording(fd: int, buffer: memoryview, offset: int) -> int:
        asked.append((offset, len(buffer)))
        return real(fd, buffer, offset)

    monkeypatch.setattr(platform, "read_at", recording)
    monkeypatch.setattr(reading, "PIECE_BYTES", 40)
    read(tmp_path / "w", 10, 90)
    assert asked == [(10, 40), (50, 40), (90, 10)]


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(100)
    (tmp_path / "w").write_bytes(content)
    real = platform.read_at
    monkeypatch.setattr(platform, "read_at", lambda fd, buffer, offset: real(fd, buffer[:3], offset))
    assert read(tmp_path / "w", 0, 100) == content


def test_a_file_that_ends_too_soon(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(bytes(10))
    with pytest.raises(
        ShortReadError, match="8 bytes are needed at offset 4, the file holds 6 bytes from there on"
    ) as caught:
        read(tmp_path / "w", 4, 8)
    assert (caught.value.offset, caught.value.expected_bytes, caught.value.found_bytes) == (4, 8, 6)
    with pytest.raises(ShortReadError, match="the file holds 0 bytes"):
        read(tmp_path / "w", 400, 1)


def test_a_buffer_of_other_items_is_filled_by_bytes(tmp_path: Path) -> None:
    from array import array

    (tmp_path / "w").write_bytes(bytes(range(16)))
    items = array("I", [0, 0])
    with opened_weights(str(tmp_path / "w")) as fd:
        read_into(fd, memoryview(items), 3)
    assert items.tobytes() == bytes(range(3, 11))
