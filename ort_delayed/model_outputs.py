"""Putting a converted model and its data file into their places: both whole, or neither."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import onnx

from ort_delayed.external_files import external_tensors
from ort_delayed.graphs import iter_nodes
from ort_delayed.new_files import CopyBuffer, PendingDataFile, PendingFile, flush_directory
from ort_delayed.ops.attributes import is_delayed
from ort_delayed.skeletons import Skeleton

__all__ = ["Destination", "check_destination", "write_outputs"]


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a model goes.

    Attributes:
        path: the model file; links in its directory are resolved.
        directory: that directory.
        name: the file's name in it.
        overwrite: whether a model that is there is replaced, its data file with it.
    """

    path: str
    directory: str
    name: str
    overwrite: bool

    def data_name(self, digest: str) -> str:
        """The name of a data file with that digest.

        It follows from the content, so that a new data file never takes the place of one that the old model, or a
        session that runs it, still reads.
        """
        return f"{self.name}.{digest}.weights"

    def data_files_of_present_model(self) -> set[str]:
        """Data files that were written for the model that stands there now, and that it reads."""
        try:
            with Skeleton(self.path) as present:
                read = named_files(present.model, present.directory)
        except (OSError, ValueError):
            return set()
        pattern = re.compile(re.escape(os.path.join(self.directory, self.name)) + r"\.[0-9a-f]{12}\.weights")
        return {path for path in read if pattern.fullmatch(path)}


def named_files(model: onnx.ModelProto, directory: str) -> set[str]:
    """The files, links resolved, that delayed nodes and external data of a model in ``directory`` name."""
    names = {e.value for tensor in external_tensors(model) for e in tensor.external_data if e.key == "location"}
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in filter(is_delayed, iter_nodes(nodes)):
            names.update(a.s.decode(errors="replace") for a in node.attribute if a.name == "filename")
    return {os.path.realpath(os.path.join(directory, name)) for name in names if name and "\0" not in name}


def check_destination(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], *, overwrite: bool
) -> Destination:
    """Resolve the destination and refuse one that must not be written.

    Raises:
        TypeError: source or destination is no path.
        ValueError: it is the source itself.
        FileExistsError: something is there, and ``overwrite`` is false.
        IsADirectoryError, FileNotFoundError: it is a directory, or its directory does not exist.
    """
    for what, path in (("source", source), ("destination", destination)):
        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"the {what} must be the path of a model file, found {type(path).__name__}; "
                "write a model that is in memory to a file first (onnx.save_model)"
            )
    given = os.path.abspath(os.fspath(destination))
    directory = os.path.realpath(os.path.dirname(given))
    path = os.path.join(directory, os.path.basename(given))
    if not os.path.isdir(directory):
        raise FileNotFoundError(f"the destination's directory '{directory}' does not exist; make it first")
    if os.path.isdir(path):
        raise IsADirectoryError(f"the destination '{path}' is a directory; name the model file to write in it")
    if os.path.lexists(path):
        if os.path.exists(path) and os.path.exists(source) and os.path.samefile(source, path):
            raise ValueError(f"source and destination are the same file, '{path}'; the source is never changed")
        if not overwrite:
            raise FileExistsError(f"the destination '{path}' exists; pass overwrite=True to replace it")
    return Destination(path, directory, os.path.basename(path), overwrite)


def write_outputs(
    skeleton: Skeleton,
    destination: Destination,
    fill_data: Callable[[PendingDataFile], None] | None,
    finish_model: Callable[[str], None],
) -> str | None:
    """Write data file and model, flush both to disk, then give them their names: the data file's first.

    Args:
        skeleton: the model; it is serialized when ``finish_model`` has run.
        destination: where it goes.
        fill_data: writes the payloads, or None where there are none.
        finish_model: called with the data file's name (empty where there is none), which the model needs.

    Returns:
        the data file's name in the destination's directory, or None.

    Raises:
        ValueError: the destination is a data file of the source, or the model would pass 2 GiB.
        FileExistsError: something took the destination's name meanwhile.
        RuntimeError: the source was changed in place meanwhile.
        OSError: writing failed.
    """
    in_use = named_files(skeleton.model, skeleton.directory)
    if os.path.realpath(destination.path) in in_use:
        raise ValueError(f"the destination '{destination.path}' is a file that the source reads its weights from")
    obsolete = destination.data_files_of_present_model() if destination.overwrite else set()
    pending = None if fill_data is None else PendingDataFile(destination.directory, destination.name)
    # A plain `with`, no ExitStack: nothing can come between making the file and knowing that it has to go.
    with pending or contextlib.nullcontext():
        data_name = None
        if pending is not None and fill_data is not None:
            fill_data(pending)
            pending.flush_to_disk()
            data_name = destination.data_name(pending.digest)
        finish_model(data_name or "")
        with PendingFile(destination.directory, destination.name) as model:
            _write_model(skeleton, model)
            model.flush_to_disk()
            skeleton.check_unchanged()
            _commit(destination, pending, data_name, model)
    flush_directory(destination.directory)
    in_use |= named_files(skeleton.model, destination.directory)
    for path in obsolete - in_use:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return data_name


def _write_model(skeleton: Skeleton, out: PendingFile) -> None:
    buffer = CopyBuffer()
    for piece in skeleton.pieces():
        if isinstance(piece, bytes):
            out.write(piece)
        else:
            buffer.copy(skeleton.fd, piece.offset, piece.nbytes, out)


def _commit(destination: Destination, data: PendingFile | None, data_name: str | None, model: PendingFile) -> None:
    data_path = os.path.join(destination.directory, data_name) if data_name is not None else None
    existed = data_path is not None and os.path.lexists(data_path)
    try:
        if data is not None and data_path is not None:
            # Whatever has this name has this content: it is replaced by the same bytes.
            data.commit(data_path, replace=True)
        model.commit(destination.path, replace=destination.overwrite)
    except BaseException:
        if data_path is not None and not existed and not model.placed:
            with contextlib.suppress(OSError):
                os.unlink(data_path)
        raise
