"""ort_delayed/construction_relief.py: which pages are given up how, while a session is built."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import numpy as np
import pytest

from ort_delayed import construction_relief
from ort_delayed.construction_relief import ConstructionRelief
from ort_delayed.loader import platform
from ort_delayed.loader.element_types import element_type_from_onnx
from ort_delayed.loader.mapped_ranges import MappedFiles
from ort_delayed.loader.tensor_on_disk import TensorOnDisk

MIB = 1 << 20
UINT8 = element_type_from_onnx(2)
pytestmark = pytest.mark.skipif(not platform.can_give_up_pages(), reason="no pages can be given up here")


class Recorder:
    """Stands for the platform: mappings are given, and what is done to them is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mappings: list[platform.FileMapping]) -> None:
        self.given_up: list[int] = []
        self.reclaimed: list[int] = []
        self.by_page: list[int] = []
        fake = construction_relief.platform
        monkeypatch.setattr(fake, "file_mappings", lambda paths: mappings)
        monkeypatch.setattr(fake, "give_up_pages", lambda address, nbytes: self.given_up.append(address))
        monkeypatch.setattr(fake, "reclaim_pages", lambda address, nbytes: self.reclaimed.append(address))

    def add(self, address: int, nbytes: int) -> None:
        self.by_page.append(address)


def tensor(path: Path, name: str, offset: int, nbytes: int) -> TensorOnDisk:
    assert UINT8 is not None
    return TensorOnDisk(name, str(path), offset, nbytes, (nbytes,), UINT8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(bytes(4096))
    return tmp_path / "data"


def relief(
    path: Path,
    recorder: Recorder,
    used: list[int],
    *,
    packed: bool = True,
    before: tuple[platform.FileMapping, ...] = (),
) -> ConstructionRelief:
    tensors = [tensor(path, "w packed", 0, 10_000), tensor(path, "raw", 16384, 4096)]
    return ConstructionRelief(
        tensors,
        {"w packed"} if packed else (),
        MappedFiles([str(path)]),
        budget_bytes=64 * MIB,
        mark_bytes=48 * MIB,
        used_bytes=lambda: used.pop(0) if len(used) > 1 else used[0],
        by_page=recorder,  # type: ignore[arg-type]
        before=before,
    )


def test_packed_ranges_are_given_up_and_nothing_else_while_there_is_room(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mappings = [
        platform.FileMapping(1 << 20, 12288, 0, str(path)),
        platform.FileMapping(2 << 20, 4096, 16384, str(path)),
    ]
    recorder = Recorder(monkeypatch, mappings)
    relief(path, recorder, [40 * MIB]).relieve()
    assert (recorder.given_up, recorder.reclaimed) == ([1 << 20], [])


def test_raw_weights_are_reclaimed_until_there_is_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mappings = [platform.FileMapping(n << 20, 4096, 16384 + n * 4096, str(path)) for n in range(1, 5)]
    recorder = Recorder(monkeypatch, mappings)
    relief(path, recorder, [60 * MIB, 50 * MIB, 48 * MIB]).relieve()
    assert (recorder.given_up, recorder.reclaimed) == ([], [1 << 20, 2 << 20])


def test_what_the_kernel_joined_with_a_raw_weight_is_not_taken_for_packed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch, [platform.FileMapping(1 << 20, 20480, 0, str(path))])
    relief(path, recorder, [60 * MIB]).relieve()
    assert (recorder.given_up, recorder.reclaimed) == ([], [1 << 20])


def test_nothing_of_an_unpacked_model_is_given_up_blindly(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch, [platform.FileMapping(1 << 20, 12288, 0, str(path))])
    unpacked = relief(path, recorder, [60 * MIB], packed=False)
    unpacked.relieve()
    assert unpacked.mark_bytes == 48 * MIB
    assert (recorder.given_up, recorder.reclaimed, recorder.by_page) == ([], [1 << 20], [])


def test_large_raw_weights_of_a_packed_model_are_mapped_page_by_page_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mappings = [
        platform.FileMapping(1 << 30, 8 * MIB, 16384, str(path)),
        platform.FileMapping(2 << 30, MIB, 0, str(path)),
    ]
    recorder = Recorder(monkeypatch, mappings)
    made = relief(path, recorder, [1])
    made.relieve()
    made.relieve()
    assert recorder.by_page == [1 << 30]


def test_room_for_the_largest_packed_weight_is_kept_free(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch, [])
    files = MappedFiles([str(path)])

    def mark(nbytes: int) -> int:
        made = ConstructionRelief(
            [tensor(path, "p", 0, nbytes)],
            {"p"},
            files,
            budget_bytes=64 * MIB,
            mark_bytes=48 * MIB,
            used_bytes=lambda: 0,
            by_page=recorder,  # type: ignore[arg-type]
        )
        return made.mark_bytes

    assert mark(10 * MIB) == 38 * MIB
    assert mark(45 * MIB) == 8 * MIB


def test_mappings_of_other_sessions_are_left_alone_until_their_addresses_are_free(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = [platform.FileMapping(1 << 20, 12288, 0, str(path)), platform.FileMapping(2 << 20, 4096, 16384, str(path))]
    mappings = list(theirs)
    recorder = Recorder(monkeypatch, mappings)
    made = relief(path, recorder, [60 * MIB], before=tuple(theirs))
    made.relieve()
    assert (recorder.given_up, recorder.reclaimed, recorder.by_page) == ([], [], [])
    mappings.clear()
    made.relieve()
    mappings += theirs
    made.relieve()
    assert (recorder.given_up, recorder.reclaimed) == ([1 << 20], [2 << 20])


def test_a_range_that_has_gone_is_nothing_to_give_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = mmap.mmap(-1, 12288)
    address = np.frombuffer(gone, np.uint8).ctypes.data
    gone.close()
    give_up = platform.give_up_pages
    recorder = Recorder(monkeypatch, [platform.FileMapping(address, 12288, 0, str(path))])
    monkeypatch.setattr(construction_relief.platform, "give_up_pages", give_up)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        give_up(address, 12288)
    relief(path, recorder, [40 * MIB]).relieve()


def test_another_error_of_giving_up_is_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch, [platform.FileMapping(1 << 20, 12288, 0, str(path))])

    def fail(address: int, nbytes: int) -> None:
        raise OSError(errno.EPERM, "forbidden")

    monkeypatch.setattr(construction_relief.platform, "give_up_pages", fail)
    with pytest.raises(OSError, match="forbidden"):
        relief(path, recorder, [40 * MIB]).relieve()
