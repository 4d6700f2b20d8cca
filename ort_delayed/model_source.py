"""What a session is made from: reading a model only if it has delayed nodes, and lending options a directory."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import onnxruntime
from google.protobuf.message import DecodeError

from ort_delayed.external_files import EXTERNAL_DIRECTORY_ENTRY
from ort_delayed.ops.attributes import OP_TYPE
from ort_delayed.ops.errors import DelayedInitializerValueError
from ort_delayed.ops.kernel import Binding
from ort_delayed.preparing import has_delayed_nodes, prepare

__all__ = ["external_directory", "prepare_source"]

_SCAN_BYTES = 16 << 20


def prepare_source(
    source: str | bytes | os.PathLike[str],
    options: onnxruntime.SessionOptions,
    binding: Binding,
    weights_dir: str | os.PathLike[str] | None,
) -> tuple[Any, str | None]:
    """The source itself where there is nothing to prepare, else the prepared model's bytes and its data's directory."""
    model = _load(source)
    if model is None:
        return source, None
    if options.optimized_model_filepath:
        raise DelayedInitializerValueError(
            f"optimized_model_filepath is set to '{options.optimized_model_filepath}': the optimized form of a model "
            f"with {OP_TYPE} nodes holds handles that mean something in this session only, so it is not written"
        )
    confined = None if weights_dir is None else os.fspath(weights_dir)
    if isinstance(source, bytes):
        directory = os.path.abspath(confined or "")
    else:
        directory = os.path.dirname(os.path.abspath(source))
    prepared = prepare(model, binding, model_directory=directory, weights_dir=confined)
    del model
    serialized = prepared.model.SerializeToString()
    return serialized, prepared.external_directory


def _load(source: str | bytes | os.PathLike[str]) -> onnx.ModelProto | None:
    """The model, its external data not loaded; None where it has no delayed nodes, or is no ONNX model at all.

    ONNX Runtime says what is wrong with what cannot be read or parsed.
    """
    if not isinstance(source, bytes) and not (isinstance(source, (str, os.PathLike)) and os.path.isfile(source)):
        return None
    try:
        data = source if isinstance(source, bytes) else _read_if_it_mentions(source, OP_TYPE.encode())
        if data is None or OP_TYPE.encode() not in data or data[4:8] == b"ORTM":
            return None
        model = onnx.ModelProto.FromString(data)
    except (OSError, DecodeError, ValueError):
        return None
    return model if has_delayed_nodes(model) else None


def _read_if_it_mentions(path: str | os.PathLike[str], text: bytes) -> bytes | None:
    """The file's bytes if ``text`` occurs in them. A model that does not have it is never held in memory."""
    with open(path, "rb") as file:
        tail = b""
        while piece := file.read(_SCAN_BYTES):
            if text in tail + piece:
                file.seek(0)
                return file.read()
            tail = piece[-len(text) :]
    return None


_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()


@contextmanager
def external_directory(options: onnxruntime.SessionOptions, directory: str | None) -> Iterator[None]:
    """While a session is built, the options' entry for the directory of external data is this one.

    The entry also redirects models that are loaded by path. It is put back, because the next model on the same options
    would silently get this one's weights.
    """
    with _locks_lock:
        lock = _locks.setdefault(options, threading.RLock())
    with lock:
        try:
            previous = options.get_session_config_entry(EXTERNAL_DIRECTORY_ENTRY)
        except RuntimeError:
            previous = ""
        if directory is None or directory == previous:
            yield
            return
        options.add_session_config_entry(EXTERNAL_DIRECTORY_ENTRY, directory)
        try:
            yield
        finally:
            options.add_session_config_entry(EXTERNAL_DIRECTORY_ENTRY, previous)
