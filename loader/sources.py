"""Which files a weight source means, and what is in them. Everything stays local; nothing of the weights is read."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ort_delayed.loader.errors import LocalWeightsNotFoundError, LocalWeightsRequired, ShardFormatError
from ort_delayed.loader.files import FileIdentity, confining_directories
from ort_delayed.loader.layers import natural_key
from ort_delayed.loader.onnx_files import check_ranges, external_initializers, read_onnx_model
from ort_delayed.loader.probe import PeakRamProbe
from ort_delayed.loader.safetensors_files import read_index, read_shard, tensors_of_index, tensors_of_shards
from ort_delayed.loader.shards import is_url
from ort_delayed.loader.tensor_on_disk import TensorOnDisk

__all__ = ["DiscoveredWeights", "SourceFormat", "discover_weights", "local_source", "select_source"]

SourceFormat = Literal["safetensors", "onnx-external-data"]

_INDEX_SUFFIX = ".safetensors.index.json"
_STANDARD_INDEX = "model" + _INDEX_SUFFIX
_SURELY_AXES = 8
_REPOSITORY_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_NUMBERED_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class DiscoveredWeights:
    """What a source holds.

    Attributes:
        source: the file that was selected, or the directory where the shards of a directory are meant.
        source_format: ``"safetensors"`` or ``"onnx-external-data"``.
        tensors: every tensor, in the order of the source; the layer groups sort them.
        identities: each weight file as it was when it was discovered, by the path that the tensors name.
        within: real directories that the files must stand in, None for a single file that was named itself.
    """

    source: Path
    source_format: SourceFormat
    tensors: tuple[TensorOnDisk, ...]
    identities: Mapping[str, FileIdentity]
    within: tuple[str, ...] | None


def local_source(source: str | os.PathLike[str]) -> Path:
    """The absolute path of a source, links resolved, except the last one in a hub cache's snapshot.

    There the link's name says what the file is, and the shards stand beside the link.

    Raises:
        LocalWeightsRequired: a URL, or what looks like a hub repository id.
        FileNotFoundError: there is no such path (also when it looks like a repository id).
    """
    text = os.fsdecode(source)
    if is_url(text):
        raise LocalWeightsRequired(f"weights must come from a local path, found {text!r}: download them first")
    path = os.path.abspath(os.path.expanduser(text))
    if not os.path.exists(path):
        if _REPOSITORY_ID.fullmatch(text) and not _names_weights(text) and not os.path.exists(os.path.dirname(path)):
            raise LocalWeightsNotFoundError(
                f"there is no path {text!r}. If that is a hub repository id: weights must be local, download the "
                "repository first and give its directory"
            )
        raise FileNotFoundError(errno.ENOENT, "no such file or directory", text)
    directory = os.path.realpath(os.path.dirname(path))
    if os.path.isfile(path) and len(confining_directories(directory)) > 1:
        return Path(directory, os.path.basename(path))
    return Path(os.path.realpath(path))


def _names_weights(text: str) -> bool:
    return text.lower().endswith((".safetensors", ".onnx", ".json"))


def select_source(source: Path) -> Path:
    """The file that a source means: itself, or of a directory its index, else ``model.onnx``, else the directory
    (its shards), else its one .onnx file.

    Raises:
        ShardFormatError: a directory without weights, or with several indexes or models of which none is the
            standard one.
    """
    if not source.is_dir():
        return source
    names = sorted(os.listdir(source), key=natural_key)
    indexes = [n for n in names if n.endswith(_INDEX_SUFFIX)]
    if _STANDARD_INDEX in indexes or len(indexes) == 1:
        return source / (_STANDARD_INDEX if _STANDARD_INDEX in indexes else indexes[0])
    if indexes:
        raise ShardFormatError(f"'{source}' has several indexes ({', '.join(indexes)}): give the one that is meant")
    if "model.onnx" in names:
        return source / "model.onnx"
    if any(n.lower().endswith(".safetensors") for n in names):
        return source
    models = [n for n in names if n.lower().endswith(".onnx")]
    if len(models) == 1:
        return source / models[0]
    if models:
        raise ShardFormatError(f"'{source}' has several ONNX models ({', '.join(models)}): give the one that is meant")
    raise ShardFormatError(f"'{source}' has neither safetensors files nor an ONNX model")


def discover_weights(source: Path, *, probe: PeakRamProbe | None = None) -> DiscoveredWeights:
    """Find every tensor of a source.

    Args:
        source: what :func:`local_source` returned.
        probe: a started probe, whose budget headers, indexes and models have to fit.

    Raises:
        ShardFormatError, LocalWeightsRequired, FileNotFoundError, OSError: the source is refused.
        RamBudgetExceeded, RamProbeUnavailable: from the probe.
    """
    selected = select_source(source)
    name = selected.name.lower()
    if selected.is_dir():
        found = _discover_directory(selected, probe)
    elif name.endswith(_INDEX_SUFFIX):
        found = _discover_index(selected, probe)
    elif name.endswith(".safetensors"):
        shard = read_shard(str(selected), probe=probe)
        tensors = tensors_of_shards([shard])
        found = DiscoveredWeights(selected, "safetensors", tensors, {shard.path: shard.identity}, None)
    elif name.endswith(".onnx"):
        found = _discover_onnx(selected, probe)
    else:
        raise ShardFormatError(
            f"'{selected}' is not a weight source: expected a .safetensors file, a {_INDEX_SUFFIX} file, an .onnx "
            "model, or a directory with one of them"
        )
    if not found.tensors:
        raise ShardFormatError(f"there are no weights in '{selected}'{_constants_hint(found)}")
    for tensor in found.tensors:
        _check_shape(tensor)
    return found


def _check_shape(tensor: TensorOnDisk) -> None:
    """Refuse a shape that no array can have although its bytes are all there: too many axes, or absurd ones of which
    one is zero. Both formats allow them.
    """
    dtype, shape = tensor.element_type.dtype, tensor.shape
    if dtype is None or (len(shape) <= _SURELY_AXES and 0 not in shape):
        return
    try:
        np.empty(0, dtype).reshape(shape) if 0 in shape else np.broadcast_to(np.zeros((), dtype), shape)
    except ValueError as error:
        raise ShardFormatError(
            f"tensor '{tensor.name}' in '{tensor.path}' at offset {tensor.offset} has a shape of {len(shape)} axes, "
            f"{_some(shape)}, that no array can have: {error}"
        ) from error


def _some(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape[:_SURELY_AXES]))}{', ...' if len(shape) > _SURELY_AXES else ''}]"


def _constants_hint(found: DiscoveredWeights) -> str:
    if found.source_format != "onnx-external-data":
        return ""
    return ": none of the model's initializers is external data (Constant nodes belong to the graph)"


def _discover_index(path: Path, probe: PeakRamProbe | None) -> DiscoveredWeights:
    directory = str(path.parent)
    within = confining_directories(directory)
    index = read_index(str(path), directory, within=within, probe=probe)
    by = f"the index '{path}'"
    shards = {
        shard: read_shard(shard, within=within, probe=probe, named_by=by)
        for shard in sorted(set(index.shard_of.values()), key=natural_key)
    }
    tensors = tensors_of_index(index, shards)
    identities = {shard.path: shard.identity for shard in shards.values()}
    return DiscoveredWeights(path, "safetensors", tensors, identities, within)


def _discover_directory(directory: Path, probe: PeakRamProbe | None) -> DiscoveredWeights:
    within = confining_directories(str(directory))
    names = sorted((n for n in os.listdir(directory) if n.lower().endswith(".safetensors")), key=natural_key)
    _check_numbering(directory, names)
    shards = [read_shard(str(directory / name), within=within, probe=probe) for name in names]
    identities = {shard.path: shard.identity for shard in shards}
    return DiscoveredWeights(directory, "safetensors", tensors_of_shards(shards), identities, within)


def _check_numbering(directory: Path, names: list[str]) -> None:
    # Without an index, only the shards' own numbering can say that one is missing.
    there = set(names)
    for name in names:
        found = _NUMBERED_SHARD.fullmatch(name)
        if found is None:
            continue
        for number in range(1, int(found["count"]) + 1):
            needed = f"{found['stem']}-{number:05d}-of-{found['count']}.safetensors"
            if needed not in there:
                raise FileNotFoundError(
                    errno.ENOENT, f"the weight shard that belongs to '{name}' is not there", str(directory / needed)
                )


def _discover_onnx(path: Path, probe: PeakRamProbe | None) -> DiscoveredWeights:
    directory = str(path.parent)
    within = confining_directories(directory)
    model = read_onnx_model(str(path), probe=probe)
    tensors = external_initializers(model, str(path), directory)
    del model
    identities = check_ranges(tensors, within=within, named_by=f"'{path}'")
    return DiscoveredWeights(path, "onnx-external-data", tensors, identities, within)
