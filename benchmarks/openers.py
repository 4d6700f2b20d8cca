"""Ways to open a model in a sample's own process. Each returns something that prepares a run for inputs of a size.

What is imported only by some ways stands inside them, so that the others do without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["OPENERS", "Arrays", "Opened", "Opener"]

Arrays = Sequence[np.ndarray]

_SEQUENTIAL_BYTES = 16 << 20
_COPY_BYTES = 256 << 20
# Below every vocabulary that is measured.
_IDS = 1000


class Opened(Protocol):
    """A model that is ready to run, or weights that are ready to be loaded."""

    def prepare(self, size: int) -> Callable[[], Any]:
        """A function that runs once, on inputs of ``size`` rows, tokens, images or steps."""

    def outputs(self, returned: Any) -> Arrays:
        """What a run returned, as arrays that can be compared between ways."""


Opener = Callable[[str, int], Opened]
"""Opens a path under a RAM budget (0: none)."""


# --- Sessions ---------------------------------------------------------------------------------------------------------


class _Session:
    def __init__(self, session: Any) -> None:
        self._session = session

    def prepare(self, size: int) -> Callable[[], Any]:
        feeds = _feeds(self._session, size)
        return lambda: self._session.run(None, feeds)

    def outputs(self, returned: Any) -> Arrays:
        arrays: Arrays = returned
        return arrays


def _feeds(session: Any, size: int) -> dict[str, np.ndarray]:
    """Seeded inputs. Floats: the first free dimension is ``size``, others 1. Ids, masks and types: 1 x ``size``."""
    random = np.random.default_rng(1)
    feeds = {}
    for taken in session.get_inputs():
        if taken.type == "tensor(float)":
            free = [size, *[1] * len(taken.shape)]
            shape = [d if isinstance(d, int) else free.pop(0) for d in taken.shape]
            feeds[taken.name] = random.standard_normal(shape, np.float32)
        elif "mask" in taken.name:
            feeds[taken.name] = np.ones((1, size), np.int64)
        elif "type" in taken.name:
            feeds[taken.name] = np.zeros((1, size), np.int64)
        else:
            feeds[taken.name] = random.integers(0, _IDS, (1, size))
    return feeds


def _plain(path: str, budget: int) -> Opened:
    import onnxruntime

    return _Session(onnxruntime.InferenceSession(path))


def _unpacked(path: str, budget: int) -> Opened:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    return _Session(onnxruntime.InferenceSession(path, options))


def _ours(path: str, budget: int) -> Opened:
    import ort_delayed

    return _Session(ort_delayed.InferenceSession(path, ram_budget=budget or None))


def _install(path: str, budget: int) -> Opened:
    import onnxruntime

    import ort_delayed

    installed = ort_delayed.stream_install(path, onnxruntime.SessionOptions(), ram_budget=budget)
    return _Session(installed.create_session())


def _stock(path: str, budget: int) -> Opened:
    from stock_op import open_stock

    with open(f"{path}.json") as file:
        described = json.load(file)
    weights = [
        np.fromfile(source, np.float32, int(np.prod(shape)), offset=offset).reshape(shape)
        for source, offset, shape in described
    ]
    return _Session(open_stock(path, weights))


# --- Floors -----------------------------------------------------------------------------------------------------------


class _Floor:
    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run

    def prepare(self, size: int) -> Callable[[], Any]:
        return self._run

    def outputs(self, returned: Any) -> Arrays:
        return []


def _external_files(path: str) -> list[str]:
    from pathlib import Path

    from model_makers import external_files

    return [str(file) for file in external_files(Path(path))]


def _memcpy(path: str, budget: int) -> Opened:
    """As many bytes as the weights have, copied from memory to memory; in turns where that would take much memory."""
    import os

    total = sum(os.path.getsize(file) for file in _external_files(path))
    source = np.ones(min(total, _COPY_BYTES), np.uint8)
    target = np.zeros_like(source)
    whole, rest = divmod(total, source.nbytes)

    def copy() -> None:
        for _ in range(whole):
            np.copyto(target, source)
        np.copyto(target[:rest], source[:rest])

    return _Floor(copy)


def _read(path: str, budget: int) -> Opened:
    """The weights' files read from start to end into one buffer."""
    files = _external_files(path)
    buffer = bytearray(_SEQUENTIAL_BYTES)

    def read() -> None:
        for name in files:
            with open(name, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    return _Floor(read)


OPENERS: dict[str, Opener] = {"plain": _plain, "unpacked": _unpacked, "ours": _ours, "install": _install}
OPENERS |= {"stock": _stock, "memcpy": _memcpy, "read": _read}
