"""What differs between platforms: what the loader needs of it. The pages of others' mappings are the pager's."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import psutil
import pytest
from subprocesses import run_snippet

from ort_delayed.loader import platform

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc/self")


def test_resident_memory_is_what_the_system_says() -> None:
    ours, theirs = platform.resident_bytes(), psutil.Process().memory_info().rss
    assert ours is not None
    assert abs(ours - theirs) < 4 << 20


@linux
def test_the_high_water_mark_is_at_least_what_is_resident_and_can_be_set_back() -> None:
    if not platform.reset_peak_resident_bytes():
        pytest.skip("the kernel's mark cannot be reset here")
    before = platform.peak_resident_bytes()
    bytearray(b"x") * (64 << 20)
    high = platform.peak_resident_bytes()
    assert platform.reset_peak_resident_bytes()
    after = platform.peak_resident_bytes()
    assert before is not None
    assert high is not None
    assert after is not None
    assert high - before > 60 << 20
    assert high - after > 60 << 20


def test_pages_given_back_come_back_right(tmp_path: Path) -> None:
    content = os.urandom(10 * mmap.PAGESIZE + 5)
    (tmp_path / "w").write_bytes(content)
    with (tmp_path / "w").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        assert mapping[:] == content
        platform.give_back_pages(mapping)
        assert mapping[:] == content


@pytest.mark.parametrize("resolve", [False, True])
def test_what_is_refused_is_not_opened(tmp_path: Path, resolve: bool) -> None:
    (tmp_path / "d").mkdir()

    def refuse(found: os.stat_result, real: str | None) -> None:
        assert (real is not None) == resolve
        raise PermissionError("refused")

    descriptors = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with pytest.raises(PermissionError, match="refused"):
        platform.open_checked(str(tmp_path / "d"), refuse, resolve=resolve)
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == descriptors


def test_the_object_that_was_checked_is_the_one_that_is_opened(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"checked")
    (tmp_path / "b").write_bytes(b"swapped in")
    link = tmp_path / "link"
    link.symlink_to("a")

    def swap(found: os.stat_result, real: str | None) -> None:
        assert real is not None
        if real == str((tmp_path / "b").resolve()):
            raise PermissionError("refused")
        link.unlink()
        link.symlink_to("b")

    try:
        fd = platform.open_checked(str(link), swap, resolve=True)
    except PermissionError:  # where nothing can be held open unread, what was swapped in is checked again
        return
    try:
        assert os.read(fd, 20) == b"checked"
    finally:
        os.close(fd)


def test_reading_at_a_place(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"0123456789")
    fd = os.open(tmp_path / "w", os.O_RDONLY)
    try:
        buffer = bytearray(4)
        assert platform.read_at(fd, memoryview(buffer), 5) == 4
        assert bytes(buffer) == b"5678"
        assert platform.read_at(fd, memoryview(buffer), 8) == 2
        assert platform.read_at(fd, memoryview(buffer), 99) == 0
    finally:
        os.close(fd)


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc's")
def test_large_blocks_go_back_when_they_are_freed() -> None:
    """Blocks of 4 MiB, each with a small one behind it that stays in use, as kernels that pack weights leave them."""
    code = """
    import ctypes
    from contextlib import nullcontext
    from ort_delayed.loader import platform
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    def kept(meanwhile):
        with meanwhile:
            before = platform.resident_bytes()
            for i in range(12):
                large = []
                for _ in range(2):
                    large.append(libc.malloc(4 << 20))
                    ctypes.memset(large[-1], 1, 4 << 20)
                    ctypes.memset(libc.malloc(100_000), 1, 100_000)  # never freed
                for block in large:
                    libc.free(block)
            return platform.resident_bytes() - before >> 20
    libc.free(libc.malloc(30 << 20))  # from here on glibc keeps blocks of up to 30 MiB
    print(kept(nullcontext()), kept(platform.large_blocks_go_back()))
    """
    without, kept = map(int, run_snippet(code).split())
    if without < 8:
        pytest.skip("this C library keeps no large blocks")
    assert kept <= 4
