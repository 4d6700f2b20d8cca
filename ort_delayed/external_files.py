"""External data of a model that ONNX Runtime gets as bytes: entries re-pointed below one common real directory.

ONNX Runtime wants an external file's location to be relative and to stay, links resolved, inside one directory,
which for a model given as bytes a session config entry names. A hub cache's snapshot directory holds links that lead
out of it, so there the entries have to name the real files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import onnx

from ort_delayed.graphs import iter_graphs, iter_nodes
from ort_delayed.loader.external_data import ExternalDataError, has_external_data, nameable, set_external_data
from ort_delayed.loader.files import confining_directories, is_inside
from ort_delayed.loader.tensor_on_disk import TensorOnDisk

__all__ = ["EXTERNAL_DIRECTORY_ENTRY", "external_tensors", "point_at_files", "repoint_external_data"]

EXTERNAL_DIRECTORY_ENTRY = "session.model_external_initializers_file_folder_path"
"""The session config entry (onnxruntime_session_options_config_keys.h) that names the directory of external files."""


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model whose bytes stand in another file: initializers and attributes, bodies and functions."""
    for graph in iter_graphs(model.graph):
        yield from filter(has_external_data, graph.initializer)
    lists = [model.graph.node, *(f.node for f in model.functions)]
    for node in (n for nodes in lists for n in iter_nodes(nodes)):
        for attribute in node.attribute:
            if attribute.HasField("t") and has_external_data(attribute.t):
                yield attribute.t


def repoint_external_data(model: onnx.ModelProto, model_directory: str, *, model_file: str | None = None) -> str | None:
    """Rewrite the locations of external data relative to the returned directory; None where there is no such data.

    Args:
        model: changed in place.
        model_directory: absolute directory that the locations are relative to now.
        model_file: the model's own file, where tensors refer to the values in it. The caller has opened it already, so
            it may be a link that leads anywhere.

    Raises:
        ExternalDataError: a location leads, links resolved, out of the model's directory (for a snapshot of a hub
            cache: and of its repository's blobs), which ONNX Runtime does not allow either; or it is not UTF-8 text.
    """
    inside = confining_directories(model_directory)
    own = None if model_file is None else os.path.realpath(model_file)
    entries: list[tuple[onnx.StringStringEntryProto, str]] = []
    for tensor in external_tensors(model):
        for entry in tensor.external_data:
            if entry.key == "location":
                if own is not None and os.path.realpath(os.path.join(model_directory, entry.value)) == own:
                    entries.append((entry, own))
                else:
                    entries.append((entry, real_location(tensor.name, entry.value, model_directory, inside)))
    if not entries:
        return None
    common = os.path.commonpath([inside[0], *(os.path.dirname(real) for _, real in entries)])
    for entry, real in entries:
        entry.value = _location(real, common)
    return nameable(common)


def point_at_files(
    model: onnx.ModelProto, directory: str | None, placed: Sequence[tuple[onnx.TensorProto, TensorOnDisk]]
) -> str | None:
    """Point tensors of a model at bytes anywhere; returns the directory that all locations are relative to then.

    Args:
        model: changed in place; its other external data stays where it is.
        directory: what :func:`repoint_external_data` returned for that other data.
        placed: tensors, not external yet, and where the bytes of each stand. Entries about prepacked forms are kept.

    Raises:
        ExternalDataError: the files have no directory in common (they stand on different drives), or a path is not
            UTF-8 text.
    """
    reals = {path: os.path.realpath(path) for path in {record.path for _, record in placed}}
    directories = [os.path.dirname(real) for real in reals.values()]
    if directory is not None:
        directories.append(directory)
    if not directories:
        return None
    try:
        common = os.path.commonpath(directories)
    except ValueError as error:
        raise ExternalDataError(
            f"the weight files have no directory in common, which ONNX Runtime needs: {', '.join(sorted(directories))}"
        ) from error
    if directory is not None and directory != common:
        for entry in (e for t in external_tensors(model) for e in t.external_data if e.key == "location"):
            entry.value = _location(os.path.join(directory, entry.value), common)
    for tensor, record in placed:
        location = _location(reals[record.path], common)
        set_external_data(tensor, location, record.offset, record.nbytes, keep=("prepacked_",))
    return nameable(common)


def _location(real: str, directory: str) -> str:
    return nameable(os.path.relpath(real, directory).replace(os.sep, "/"))


def real_location(name: str, location: str, model_directory: str, inside: tuple[str, ...]) -> str:
    """The real file that an external-data location leads to.

    Raises:
        ExternalDataError: it leads out of the directories ``inside``.
    """
    if not location or "\0" in location:
        raise ExternalDataError(f"initializer '{name}': external data has no usable 'location', found {location!r}")
    real = os.path.realpath(os.path.join(model_directory, location))
    if os.path.isabs(location) or not is_inside(real, inside):
        raise ExternalDataError(
            f"initializer '{name}': external data must stand below the model's directory '{model_directory}', "
            f"its location {location!r} leads to '{real}'"
        )
    return real
