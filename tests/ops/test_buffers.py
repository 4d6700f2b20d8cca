"""The pool of buffers: what is lent is nobody else's, what comes back is used again, nothing heaps up."""

from __future__ import annotations

import gc
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from ort_delayed.loader import platform
from ort_delayed.ops.buffers import BufferPool

MIB = 1 << 20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("nbytes", [0, 1, 64 << 10, (64 << 10) + 1, MIB + 3])
def test_a_buffer_is_writable_and_has_the_size(nbytes: int) -> None:
    array = BufferPool().lend(nbytes)
    array[:] = 7
    assert (array.nbytes, array.dtype, int(array.sum(dtype=np.int64))) == (nbytes, np.uint8, 7 * nbytes)


def test_a_buffer_that_came_back_is_lent_again() -> None:
    pool = BufferPool()
    first = pool.lend(2 * MIB)
    where = address(first)
    del first
    assert address(pool.lend(MIB)) == where


def test_a_view_keeps_the_buffer_lent() -> None:
    pool = BufferPool()
    view = pool.lend(2 * MIB).view(np.float32)
    assert address(pool.lend(2 * MIB)) != address(view)


def test_buffers_in_use_are_distinct() -> None:
    pool = BufferPool()
    arrays = [pool.lend(MIB) for _ in range(8)]
    for number, array in enumerate(arrays):
        array[:] = number
    assert [int(a[0]) for a in arrays] == list(range(8))
    assert [int(a[-1]) for a in arrays] == list(range(8))


def test_one_idle_buffer_is_kept_the_largest() -> None:
    pool = BufferPool()
    arrays = [pool.lend(n * MIB) for n in (1, 3, 2)]
    arrays.clear()
    assert [len(b) for b in pool._idle] == [3 * MIB]
    assert not pool._lent


def test_a_huge_buffer_is_not_used_for_a_small_payload() -> None:
    pool = BufferPool()
    huge = pool.lend(80 * MIB)
    del huge
    pool.lend(MIB)
    assert all(len(b) < 80 * MIB for b in pool._idle)


def test_trimming_gives_up_large_idle_buffers() -> None:
    pool = BufferPool()
    large = pool.lend(17 * MIB)
    del large
    pool.trim()
    assert not pool._idle
    small = pool.lend(MIB)
    del small
    pool.trim()
    assert [len(b) for b in pool._idle] == [MIB]


def test_a_buffer_may_come_back_while_its_own_thread_holds_the_lock() -> None:
    # A garbage collection can happen anywhere, and collect an array that an exception's frames held.
    pool = BufferPool()
    held = [pool.lend(MIB)]

    def give_back() -> None:
        with pool._lock:
            held.clear()
            gc.collect()

    thread = threading.Thread(target=give_back, daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert [len(b) for b in pool._idle] == [MIB]


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="no transparent huge pages here")
@pytest.mark.parametrize(("nbytes", "is_huge"), [(MIB, False), (2 * MIB, True), (48 * MIB + 5, True)])
def test_large_buffers_may_consist_of_huge_pages(nbytes: int, is_huge: bool) -> None:
    array = BufferPool().lend(nbytes)
    flags = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if re.fullmatch("[0-9a-f]+-[0-9a-f]+", first):
            start, _, end = first.partition("-")
            is_ours = int(start, 16) <= address(array) < int(end, 16)
        elif first == "VmFlags:" and is_ours:
            flags = line.split()[1:]
    assert flags is not None
    assert ("hg" in flags) is is_huge


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_forked_child_does_not_write_into_the_parents_buffer() -> None:
    array = BufferPool().lend(MIB)
    array[:] = 1
    child = os.fork()
    if child == 0:
        array[:] = 2
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert set(array.tolist()) == {1}


def test_no_memory_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(platform, "map_memory", refuse)
    with pytest.raises(MemoryError, match=str(MIB)):
        BufferPool().lend(MIB)


def test_threads_share_a_pool() -> None:
    pool, wrong = BufferPool(), []

    def use(number: int) -> None:
        for _ in range(200):
            array = pool.lend(128 << 10)
            array[:] = number
            if not (array == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not pool._lent
