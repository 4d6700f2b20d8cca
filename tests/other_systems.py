"""Importing the library as it is on another system: for snippets, in processes of their own."""

from __future__ import annotations

import builtins
import importlib
import mmap
import os
import sys
from types import SimpleNamespace
from typing import Any

import psutil

__all__ = ["WITHOUT", "pretend"]

WITHOUT = {
    "darwin": ("O_PATH", "posix_fadvise", "POSIX_FADV_DONTNEED"),
    "win32": (
        "O_PATH",
        "O_CLOEXEC",
        "O_NONBLOCK",
        "posix_fadvise",
        "POSIX_FADV_DONTNEED",
        "preadv",
        "register_at_fork",
    ),
}
"""What ``os`` lacks there; nobody has ``/proc``, and Windows has no ``madvise`` and no ``fcntl`` either."""


def pretend(system: str) -> Any:
    """From here on ``sys.platform`` is ``system``; returns the newly imported ``ort_delayed.loader.platform``."""
    # Everything that the library needs is imported on the system that it really runs on.
    import numpy.testing  # noqa: F401
    import onnx.reference  # noqa: F401

    import ort_delayed.cli.main  # noqa: F401

    for name in [n for n in sys.modules if n.split(".")[0] in ("ort_delayed", "hostile_operations")]:
        del sys.modules[name]
    resident = psutil.Process().memory_info
    sys.platform = system
    for name in WITHOUT[system]:
        delattr(os, name)
    if system == "win32":
        del mmap.MADV_DONTNEED
        sys.modules["fcntl"] = None  # type: ignore[assignment]

    def without_proc(function: Any) -> Any:
        def call(path: Any, *arguments: Any, **settings: Any) -> Any:
            if isinstance(path, str | bytes) and os.fsdecode(path).startswith(("/proc", "/sys")):
                raise FileNotFoundError(2, "no such file on this system", path)
            return function(path, *arguments, **settings)

        return call

    real_open = builtins.open

    def memory_info() -> SimpleNamespace:
        with real_open("/proc/self/statm") as statm:
            return SimpleNamespace(rss=int(statm.read().split()[1]) * mmap.PAGESIZE)

    assert resident().rss > 0
    psutil.Process = lambda: SimpleNamespace(memory_info=memory_info)
    builtins.open = without_proc(builtins.open)
    for name in ("open", "stat", "listdir", "readlink"):
        setattr(os, name, without_proc(getattr(os, name)))
    return importlib.import_module("ort_delayed.loader.platform")
