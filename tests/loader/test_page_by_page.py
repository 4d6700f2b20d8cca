"""Ranges of which a touch maps one page, and what memory is available."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from ort_delayed.loader import platform

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are given up on Linux only")


def test_a_touch_maps_one_page_and_the_bytes_are_right(tmp_path: Path) -> None:
    pages = 512
    path = tmp_path / "w"
    path.write_bytes(np.arange(pages * mmap.PAGESIZE // 8, dtype=np.int64).tobytes())
    by_page = platform.PageByPage()
    if not by_page.works:
        pytest.skip("userfaultfd in asynchronous write-protect mode is not to be had here")
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    shown = np.frombuffer(memory, np.int64)
    (mapping,) = platform.file_mappings({str(path)})
    by_page.add(mapping.address, mapping.nbytes)
    step = mmap.PAGESIZE // 8
    before = platform.resident_bytes()
    assert [int(shown[i * step * 64]) for i in range(8)] == [i * step * 64 for i in range(8)]
    after = platform.resident_bytes()
    assert before is not None
    assert after is not None
    assert after - before < 8 * 64 * 1024 // 2
    by_page.close()
    by_page.close()
    assert not by_page.works
    assert int(shown.sum()) == int(np.arange(len(shown)).sum())


def test_available_memory_is_no_more_than_there_is() -> None:
    available = platform.available_memory_bytes()
    assert available is not None
    assert 0 < available <= psutil.virtual_memory().total
