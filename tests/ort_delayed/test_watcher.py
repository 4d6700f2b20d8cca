"""The watching thread: it looks while something is under way, and only then."""

from __future__ import annotations

import gc
import threading
import time

from ort_delayed.watcher import Watcher


class Looks:
    def __init__(self) -> None:
        self.count = 0
        self.looked = threading.Event()

    def __call__(self) -> float:
        self.count += 1
        self.looked.set()
        return 0.0005

    def wait(self) -> None:
        self.looked.clear()
        assert self.looked.wait(10)


def watching() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "ort_delayed memory watch"]


def test_it_looks_between_start_and_stop() -> None:
    looks = Looks()
    watcher = Watcher(looks)
    assert watching() == []
    watcher.start()
    looks.wait()
    watcher.stop()
    time.sleep(0.05)
    count = looks.count
    time.sleep(0.05)
    assert looks.count == count
    watcher.start()
    looks.wait()
    watcher.stop()
    watcher.close()
    assert watching() == []


def test_starts_nest() -> None:
    looks = Looks()
    watcher = Watcher(looks)
    watcher.start()
    watcher.start()
    watcher.stop()
    looks.wait()
    watcher.stop()
    watcher.close()


def test_closing_twice_and_before_a_start_is_harmless() -> None:
    watcher = Watcher(Looks())
    watcher.close()
    watcher.close()
    watcher.start()
    watcher.stop()
    assert watching() == []


def test_closing_ends_the_thread_of_a_dropped_owner() -> None:
    looks = Looks()
    watcher = Watcher(looks)
    watcher.start()
    looks.wait()
    watcher.close()
    del watcher
    gc.collect()
    assert watching() == []
