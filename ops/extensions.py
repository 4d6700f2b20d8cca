"""onnxruntime-extensions, imported without what that does to the process.

Importing it (0.15.2, its cvt.py) puts ``PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python`` into the environment, where it
does nothing here, but makes every process that is started from this one read models with protobuf's implementation in
Python, which is a hundred times slower.
"""

from __future__ import annotations

import os

__all__ = ["onnxruntime_extensions"]

_VARIABLE = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
_before = os.environ.get(_VARIABLE)

import onnxruntime_extensions  # noqa: E402

if _before is None:
    os.environ.pop(_VARIABLE, None)
else:
    os.environ[_VARIABLE] = _before
