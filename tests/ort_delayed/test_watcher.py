"""The watching thread: it looks while something is under way, and only then."""

from __future__ import annotations

import gc
import threading
import time

import pytest

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


def unexpected(error: BaseException) -> None:
    raise AssertionError("looking failed") from error


def watching() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "ort_delayed memory watch"]


def test_it_looks_between_start_and_stop() -> None:
    looks = Looks()
    watcher = Watcher(looks, unexpected)
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
    watcher = Watcher(looks, unexpected)
    watcher.start()
    watcher.start()
    watcher.stop()
    looks.wait()
    watcher.stop()
    watcher.close()


def test_closing_twice_and_before_a_start_is_harmless() -> None:
    watcher = Watcher(Looks(), unexpected)
    watcher.close()
    watcher.close()
    watcher.start()
    watcher.stop()
    assert watching() == []


def test_closing_ends_the_thread_of_a_dropped_owner() -> None:
    looks = Looks()
    watcher = Watcher(looks, unexpected)
    watcher.start()
    looks.wait()
    watcher.close()
    del watcher
    gc.collect()
    assert watching() == []


def test_what_looking_raises_goes_to_the_owner_quietly_and_the_next_start_looks_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    failures: list[BaseException] = []
    told, looks = threading.Event(), Looks()

    def look() -> float:
        if not failures:
            raise OSError(5, "no measure")
        return looks()

    def failed(error: BaseException) -> None:
        failures.append(error)
        told.set()

    watcher = Watcher(look, failed)
    watcher.start()
    assert told.wait(10)
    watcher.stop()
    assert [str(f) for f in failures] == ["[Errno 5] no measure"]
    watcher.start()
    looks.wait()
    watcher.stop()
    watcher.close()
    assert watching() == []
    assert capfd.readouterr().err == ""


def test_a_thread_that_cannot_be_started_leaves_nothing_started(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks()
    watcher = Watcher(looks, unexpected)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            watcher.start()
    watcher.start()
    looks.wait()
    watcher.stop()
    watcher.close()
    assert watching() == []
