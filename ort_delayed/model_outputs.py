"""Putting a converted model and its data file into their places: both whole, or neither."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ort_delayed.new_files import CopyBuffer, PendingDataFile, PendingFile, flush_directory
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

    def data_files(self) -> list[str]:
        """Every data file beside the model that was written for a model of its name."""
        pattern = re.compile(re.escape(self.name) + r"\.[0-9a-f]{12}\.weights")
        return [os.path.join(self.directory, name) for name in os.listdir(self.directory) if pattern.fullmatch(name)]


def check_destination(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], *, overwrite: bool
) -> Destination:
    """Resolve the destination and refuse one that must not be written.

    Raises:
        ValueError: it is the source itself.
        FileExistsError: something is there, and ``overwrite`` is false.
        IsADirectoryError, FileNotFoundError: it is a directory, or its directory does not exist.
    """
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
    in_use: Iterable[str],
) -> str | None:
    """Write data file and model, flush both to disk, then give them their names: the data file's first.

    Args:
        skeleton: the model; it is serialized when ``finish_model`` has run.
        destination: where it goes.
        fill_data: writes the payloads, or None where there are none.
        finish_model: called with the data file's name (empty where there is none), which the model needs.
        in_use: files that the source or the new model read, which are not removed whatever their name.

    Returns:
        the data file's name in the destination's directory, or None.
    """
    with contextlib.ExitStack() as stack:
        data = data_name = None
        if fill_data is not None:
            data = PendingDataFile(destination.directory, destination.name)
            stack.enter_context(data)
            fill_data(data)
            data.flush_to_disk()
            data_name = destination.data_name(data.digest)
        finish_model(data_name or "")
        model = stack.enter_context(PendingFile(destination.directory, destination.name))
        _write_model(skeleton, model)
        model.flush_to_disk()
        skeleton.check_unchanged()
        _commit(destination, data, data_name, model)
    flush_directory(destination.directory)
    if destination.overwrite:
        _remove_obsolete(destination, data_name, in_use)
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
    if data is not None and data_path is not None:
        # Whatever has this name has this content: it is replaced by the same bytes.
        data.commit(data_path, replace=True)
    try:
        model.commit(destination.path, replace=destination.overwrite)
    except BaseException:
        if data_path is not None and not existed:
            with contextlib.suppress(OSError):
                os.unlink(data_path)
        raise


def _remove_obsolete(destination: Destination, data_name: str | None, in_use: Iterable[str]) -> None:
    """Remove the data files of the model that was replaced."""
    needed = {os.path.realpath(path) for path in in_use}
    for path in destination.data_files():
        if os.path.basename(path) != data_name and os.path.realpath(path) not in needed:
            with contextlib.suppress(OSError):
                os.unlink(path)
