"""Ways to load a .safetensors file in a sample's own process.

A *copy* ends with an array of its own for every tensor, as a runtime needs it. A *touch* looks at every byte and keeps
nothing. ``readinto`` does either with no loader at all, which is the least that it can take.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from openers import OPENERS, Arrays, Opened, Opener

__all__ = ["ALL_OPENERS"]

_DTYPES = {"F32": np.float32, "F16": np.float16, "I8": np.int8}
_Layout = list[tuple[str, Any, list[int], int]]


class _Loader:
    """Something that loads all tensors whenever it is run: arrays by name, or one number by name."""

    def __init__(self, load: Callable[[], dict[str, Any]]) -> None:
        self._load = load

    def prepare(self, size: int) -> Callable[[], Any]:
        return self._load

    def outputs(self, returned: Any) -> Arrays:
        return [np.array([_number(returned[name]) for name in sorted(returned)])]


def _number(value: Any) -> float:
    if isinstance(value, np.ndarray):
        return float(zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data))
    return float(value)


def _largest_byte(values: np.ndarray) -> float:
    """Looks at every byte."""
    return float(values.reshape(-1).view(np.uint8).max())


def _layout(path: str) -> tuple[int, _Layout]:
    """Where a safetensors file's data begins, and its tensors in the file's order."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    by_offset = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    tensors = [(n, _DTYPES[t["dtype"]], t["shape"], t["data_offsets"][1] - t["data_offsets"][0]) for n, t in by_offset]
    return 8 + length, tensors


def _readinto(path: str, budget: int) -> Opened:
    start, tensors = _layout(path)

    def load() -> dict[str, Any]:
        loaded = {}
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            for name, dtype, shape, _ in tensors:
                loaded[name] = np.empty(shape, dtype)
                _fill(file, memoryview(loaded[name].reshape(-1).view(np.uint8)))
        return loaded

    return _Loader(load)


def _readinto_touched(path: str, budget: int) -> Opened:
    start, tensors = _layout(path)
    buffer = np.empty(max(nbytes for *_, nbytes in tensors), np.uint8)

    def load() -> dict[str, Any]:
        seen = {}
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            for name, _, _, nbytes in tensors:
                _fill(file, memoryview(buffer[:nbytes]))
                seen[name] = _largest_byte(buffer[:nbytes])
        return seen

    return _Loader(load)


def _fill(file: Any, target: memoryview) -> None:
    while target:  # one call reads at most 2 GiB
        target = target[file.readinto(target) :]


def _load_file(path: str, budget: int) -> Opened:
    from safetensors.numpy import load_file

    return _Loader(lambda: load_file(path))


def _streamed(loader: Any, path: str, budget: int, take: Callable[[np.ndarray], Any]) -> Opened:
    """What a StreamingWeightLoader delivers, ours or OpenMed's: they have the same interface."""

    def load() -> dict[str, Any]:
        taken: dict[str, Any] = {}

        def install(group: Any) -> None:
            for name, values in group.tensors.items():
                taken[name] = take(values)

        loader(path, ram_budget=budget).stream(install)
        return taken

    return _Loader(load)


def _copy(values: np.ndarray) -> np.ndarray:
    return np.array(values, copy=True)


def _ours(path: str, budget: int) -> Opened:
    from ort_delayed import StreamingWeightLoader

    return _streamed(StreamingWeightLoader, path, budget, _copy)


def _ours_touched(path: str, budget: int) -> Opened:
    from ort_delayed import StreamingWeightLoader

    return _streamed(StreamingWeightLoader, path, budget, _largest_byte)


def _openmed(path: str, budget: int) -> Opened:
    from openmed.onnx import RamBudget, StreamingWeightLoader

    return _streamed(StreamingWeightLoader, path, RamBudget(budget), _copy)


def _openmed_touched(path: str, budget: int) -> Opened:
    from openmed.onnx import RamBudget, StreamingWeightLoader

    return _streamed(StreamingWeightLoader, path, RamBudget(budget), _largest_byte)


ALL_OPENERS: dict[str, Opener] = {
    **OPENERS,
    "readinto": _readinto,
    "readinto-touched": _readinto_touched,
    "load_file": _load_file,
    "loader": _ours,
    "loader-touched": _ours_touched,
    "openmed": _openmed,
    "openmed-touched": _openmed_touched,
}
"""Every way to open, those of sessions and floors included."""
