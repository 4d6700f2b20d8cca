"""By which location, if any, every runtime finds an external-data file from a model's directory."""

from __future__ import annotations

import os
import stat

__all__ = ["plain_location"]


def plain_location(path: str, directory: str) -> str | None:
    """The location of the file ``path`` for a model in ``directory`` (real), or None where it has none.

    ONNX Runtime wants a relative location that stays inside the directory, links resolved. ``onnx.load`` is stricter
    and also refuses ``..``, links on the way, and files with several hard links; what it takes, all take.
    """
    folder, name = os.path.split(path)
    resolved = os.path.join(os.path.realpath(folder), name)
    if not resolved.startswith(directory.rstrip(os.sep) + os.sep):
        return None
    try:
        found = os.lstat(resolved)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        return None
    return os.path.relpath(resolved, directory).replace(os.sep, "/")
