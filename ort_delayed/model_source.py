"""What a session is made from: reading a model only if it has delayed nodes, and lending options a directory."""

from __future__ import annotations

import io
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
from ort_delayed.loader.model_texts import fault_in_texts, parse_model
from ort_delayed.loader.process_lock import ProcessLock
from ort_delayed.loader.reading import read_into
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.ops.attributes import OP_TYPE
from ort_delayed.ops.errors import DelayedInitializerValueError
from ort_delayed.ops.kernel import Binding
from ort_delayed.packed_source import PACKED_MENTION, PackedModelError, accept_packed, all_packed_ranges
from ort_delayed.preparing import PreparedModel, has_delayed_nodes, prepare
from ort_delayed.skeletons import NotAModelError, Skeleton

__all__ = ["external_directory", "leave_external_directory", "prepare_source"]
__all__ += ["refuse_optimized_model", "serialized"]

_PIECE_BYTES = 4 << 20
_MENTIONS = (OP_TYPE.encode(), PACKED_MENTION)


def prepare_source(
    source: str | bytes | os.PathLike[str],
    options: onnxruntime.SessionOptions,
    binding: Binding,
    weights_dir: str | os.PathLike[str] | None,
) -> tuple[Any, str | None, tuple[TensorOnDisk, ...] | None]:
    """The source itself where there is nothing to prepare, else the prepared model's bytes and its data's directory.

    The third are the packed ranges of a packed model, which has been optimised already; None for any other.

    Raises:
        PackedModelError, PackManifestError, PrepackedEntryError, ExternalDataError: it is one, and cannot be used
            here.
    """
    confined = None if weights_dir is None else os.fspath(weights_dir)

    def prepared(model: onnx.ModelProto, directory: str) -> PreparedModel:
        refuse_optimized_model(options)
        return prepare(model, binding, model_directory=directory, weights_dir=confined)

    # What cannot be read or parsed goes to ONNX Runtime as it is, which says what is wrong with it.
    if isinstance(source, bytes):
        model = _parse(source) if any(m in source for m in _MENTIONS) else None
        if model is None:
            return source, None, None
        packed = _packed(model, os.path.abspath(confined or ""))
        if not has_delayed_nodes(model):
            return source, None, packed
        made = prepared(model, os.path.abspath(confined or ""))
        del model
        return made.model.SerializeToString(), made.external_directory, packed
    if not isinstance(source, (str, os.PathLike)) or not _is_worth_parsing(source):
        return source, None, None
    try:
        skeleton = Skeleton(source, any_texts=True)  # preparing refuses them
    except (OSError, NotAModelError):
        return source, None, None
    with skeleton:
        packed = _packed(skeleton.model, skeleton.directory)
        if not has_delayed_nodes(skeleton.model):
            return source, None, packed
        made = prepared(skeleton.model, os.path.dirname(os.path.abspath(source)))
        skeleton.model = made.model
        return serialized(skeleton), made.external_directory, packed


def _packed(model: onnx.ModelProto, directory: str) -> tuple[TensorOnDisk, ...] | None:
    if accept_packed(model, directory) is None:
        return None
    fault = fault_in_texts(model)
    if fault is not None:
        raise PackedModelError(f"the packed model in '{directory}' is damaged: {fault}")
    return all_packed_ranges(model, directory)


def refuse_optimized_model(options: onnxruntime.SessionOptions) -> None:
    """Refuse options that tell ONNX Runtime to write the optimized model; for a model with delayed nodes.

    Raises:
        DelayedInitializerValueError: they do.
    """
    if options.optimized_model_filepath:
        raise DelayedInitializerValueError(
            f"optimized_model_filepath is set to '{options.optimized_model_filepath}': the optimized form of a "
            f"model with {OP_TYPE} nodes holds handles that mean nothing outside this session, so it is not written"
        )


def _parse(data: bytes) -> onnx.ModelProto | None:
    try:
        return parse_model(data)
    except DecodeError:
        return None


def _is_worth_parsing(path: str | os.PathLike[str]) -> bool:
    """Whether the file mentions the op or a packed model's manifest; others are neither parsed nor held in memory."""
    if not os.path.isfile(path):
        return False
    longest = max(map(len, _MENTIONS))
    try:
        with open(path, "rb", buffering=0) as file:
            tail = b""
            while piece := file.read(_PIECE_BYTES):
                seam = tail + piece[:longest]
                if any(m in piece or m in seam for m in _MENTIONS):
                    return True
                tail = (tail + piece[-longest:])[-longest:]
    except OSError:
        return False
    return False


def serialized(skeleton: Skeleton) -> bytes:
    """The prepared model's bytes. Its inline weights go from file to result, and are in memory once."""
    out = io.BytesIO()
    view = memoryview(bytearray(_PIECE_BYTES))
    for piece in skeleton.pieces():
        if isinstance(piece, bytes):
            out.write(piece)
            continue
        for start in range(0, piece.nbytes, _PIECE_BYTES):
            part = view[: min(_PIECE_BYTES, piece.nbytes - start)]
            read_into(skeleton.fd, part, piece.offset + start)
            out.write(part)
    skeleton.check_unchanged()
    return out.getvalue()


_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_locks_lock = ProcessLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)  # some may be held by threads that a child does not have


@contextmanager
def external_directory(
    options: onnxruntime.SessionOptions, directory: str | None, *, are_private: bool = False
) -> Iterator[None]:
    """While a session is built, the options' entry for the directory of external data is this one.

    The entry also redirects models that are loaded by path. It is put back, because the next model on the same options
    would silently get this one's weights. Private options, which no other model will use, keep it: ONNX Runtime logs a
    warning each time an entry is set that was there already.
    """
    with _locks_lock:
        lock = _locks.setdefault(options, threading.RLock())
    with lock:
        try:
            previous = options.get_session_config_entry(EXTERNAL_DIRECTORY_ENTRY)
        except RuntimeError:
            previous = ""
        if directory is None and _directories_of_prepared_models.get(options) == previous:
            directory = ""  # what prepare_model left for another model; an empty entry is as good as none
        if directory is None or directory == previous:
            yield
            return
        options.add_session_config_entry(EXTERNAL_DIRECTORY_ENTRY, directory)
        try:
            yield
        finally:
            if not are_private:
                options.add_session_config_entry(EXTERNAL_DIRECTORY_ENTRY, previous)


_directories_of_prepared_models: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def leave_external_directory(options: onnxruntime.SessionOptions, directory: str) -> None:
    """Set the entry for good, for a plain session that will be made later."""
    options.add_session_config_entry(EXTERNAL_DIRECTORY_ENTRY, directory)
    _directories_of_prepared_models[options] = directory
