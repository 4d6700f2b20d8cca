"""``check_weights``: every file of a model or a checkpoint, without reading a weight; all faults, not the first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import onnx

from ort_delayed.loader.external_data import ExternalDataError, external_tensor, has_external_data
from ort_delayed.loader.files import OutsideDirectoryError, confining_directories, opened_weights
from ort_delayed.loader.safetensors_files import read_index, read_shard
from ort_delayed.loader.sources import discover_weights, local_source, select_source
from ort_delayed.loader.tensor_on_disk import TensorOnDisk, cut_off
from ort_delayed.ops.attributes import check_carried, is_delayed, read_attributes
from ort_delayed.ops.errors import DelayedInitializerError
from ort_delayed.skeletons import NotAModelError, Skeleton
from ort_delayed.tensor_values import MalformedTensorError, inline_bytes, tensor_on_disk
from ort_delayed.value_uses import iter_scopes

__all__ = ["CheckReport", "CheckedFile", "check_weights", "unusable_files"]

# What the loader and the readers of models raise; anything else is a fault of this project.
_REFUSALS = (OSError, ValueError)


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """One file: its path, its size in bytes (None where it cannot be opened), and how many tensors need it."""

    path: str
    nbytes: int | None
    tensors: int


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What :func:`check_weights` found; true where there are no faults.

    Attributes:
        source: the file, index or directory that was checked.
        tensors: how many tensors were checked.
        files: the files, in order of first mention.
        faults: why the source cannot be used as it is, a sentence each.
        notes: what is no fault, but may become one elsewhere.
    """

    source: str
    tensors: int
    files: tuple[CheckedFile, ...]
    faults: tuple[str, ...]
    notes: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.faults


def check_weights(source: str | os.PathLike[str], *, weights_dir: str | os.PathLike[str] | None = None) -> CheckReport:
    """Check that every file of a model or a checkpoint exists, is long enough, and stands where it may.

    Also: the headers of safetensors files, an index against its shards, the attributes of delayed nodes, the sizes of
    inline values, and whether a packed model was packed for this ONNX Runtime and processor.

    Args:
        source: as for :func:`~ort_delayed.inspecting.inspect_weights`.
        weights_dir: a file of a delayed node outside of this directory, links resolved, is a fault, as it is for
            ``InferenceSession(..., weights_dir=...)``.

    Raises:
        LocalWeightsRequired, FileNotFoundError, ShardFormatError: there is no such source, or it is no weight source.
    """
    local = local_source(source)
    selected = select_source(local)
    if selected.is_file() and not selected.name.lower().endswith((".safetensors", ".json")):
        return _check_model(str(selected), weights_dir)
    return _check_checkpoint(str(selected), local)


def unusable_files(source: str | os.PathLike[str], *, weights_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """The faults of a model that :func:`check_weights` finds in its tensors and in files that they need.

    Raises:
        NotAModelError, OSError: the model cannot be read.
    """
    return list(_check_model(os.fspath(source), weights_dir, with_manifest=False).faults)


@dataclass(slots=True)
class _Need:
    """What a model needs of one file: the tensors, and who must find it inside of which directories."""

    tensors: list[TensorOnDisk] = field(default_factory=list)
    within: Sequence[str] | None = None
    by: str = ""


def _check_model(path: str, weights_dir: str | os.PathLike[str] | None, *, with_manifest: bool = True) -> CheckReport:
    faults: list[str] = []
    try:
        skeleton = Skeleton(path)
    except NotAModelError as error:
        if not with_manifest:
            raise
        return CheckReport(path, 0, (), (str(error),), ())
    with skeleton:
        needs: dict[str, _Need] = {}
        count = 0
        notes: list[str] = []
        for need, stored in _needed(skeleton, weights_dir, faults):
            count += 1
            if stored is not None and stored.path != skeleton.path:
                needs.setdefault(stored.path, need).tensors.append(stored)
        files = [CheckedFile(skeleton.path, os.fstat(skeleton.fd).st_size, count)]
        files += [_check_file(file, need, faults) for file, need in needs.items()]
        for file, need in needs.items():
            if os.path.isabs(need.by):
                notes.append(
                    f"'{file}' is named by its absolute path: the model finds it only there, and not where a session "
                    "is confined to another directory (weights_dir)"
                )
        if with_manifest:
            faults += _manifest_faults(skeleton)
        return CheckReport(path, count, tuple(files), tuple(faults), tuple(notes))


def _needed(
    skeleton: Skeleton, weights_dir: str | os.PathLike[str] | None, faults: list[str]
) -> Iterator[tuple[_Need, TensorOnDisk | None]]:
    """Every tensor: what its file has to fulfil, and where its bytes are; None where the proto holds them."""
    own = confining_directories(skeleton.directory)
    confined = None if weights_dir is None else confining_directories(os.fspath(weights_dir))
    for scope in iter_scopes(skeleton.model):
        tensors = list(scope.graph.initializer) if scope.graph is not None else []
        for node in scope.nodes:
            tensors += [a.t for a in node.attribute if a.name == "value" and node.op_type == "Constant"]
        for tensor in tensors:
            stored = _noted(faults, lambda t=tensor: _stored(t, skeleton))  # type: ignore[misc]  # mypy infers no default
            yield _Need(within=own, by="external data"), stored
        for node in filter(is_delayed, scope.nodes):
            if any(a.ref_attr_name for a in node.attribute):
                continue  # each call of the function gives its attributes
            payload = _noted(faults, lambda n=node: _payload(n, skeleton.directory))  # type: ignore[misc]  # likewise
            by = "" if payload is None else read_attributes(node).filename
            yield _Need(within=confined, by=by), payload


def _stored(tensor: onnx.TensorProto, skeleton: Skeleton) -> TensorOnDisk | None:
    if has_external_data(tensor):
        location = next((e.value for e in tensor.external_data if e.key == "location"), "")
        if os.path.isabs(location):
            raise ExternalDataError(
                f"initializer '{tensor.name}': external data is named by the absolute path '{location}', which ONNX "
                "Runtime refuses"
            )
        return external_tensor(tensor, skeleton.directory)
    if skeleton.lifted(tensor) is None and tensor.data_type not in (0, onnx.TensorProto.STRING):
        inline_bytes(tensor)
    return tensor_on_disk(tensor, skeleton)


def _payload(node: onnx.NodeProto, directory: str) -> TensorOnDisk:
    a = read_attributes(node)
    check_carried(a, f"delayed initializer '{node.output[0]}'")
    path = os.path.join(directory, a.filename)
    return TensorOnDisk(node.output[0], path, a.offset, a.nbytes, a.shape, a.element_type)


def _noted(faults: list[str], step: Callable[[], TensorOnDisk | None]) -> TensorOnDisk | None:
    """What ``step`` returns; None where it refuses, and its reason among the faults."""
    try:
        return step()
    except (ExternalDataError, MalformedTensorError, DelayedInitializerError) as error:
        faults.append(str(error))
        return None


def _check_file(path: str, need: _Need, faults: list[str]) -> CheckedFile:
    count = len(need.tensors)
    needed_by = f"{count} tensor{'s' * (count > 1)} ('{need.tensors[0].name}'{', ...' * (count > 1)})"
    try:
        with opened_weights(path, within=need.within) as fd:
            size = os.fstat(fd).st_size
    except OutsideDirectoryError as error:
        faults.append(f"'{path}', which {needed_by} need, leads out of the directory: {error.strerror}")
        return CheckedFile(path, None, count)
    except OSError as error:
        faults.append(f"'{path}', which {needed_by} need, cannot be opened: {error.strerror or error}")
        return CheckedFile(path, None, count)
    cut = cut_off(path, size, need.tensors)
    if cut is not None:
        faults.append(cut)
    if path.lower().endswith(".safetensors"):
        try:
            read_shard(path)
        except _REFUSALS as error:
            faults.append(str(error))
    return CheckedFile(path, size, count)


def _manifest_faults(skeleton: Skeleton) -> Iterable[str]:
    # A key that is not UTF-8 comes as bytes.
    if not any(str(p.key).startswith("ort_delayed.packed") for p in skeleton.model.metadata_props):
        return ()
    # Only here, since it asks ONNX Runtime for its version.
    from ort_delayed.pack_manifest import PackManifestError, check_manifest, read_manifest

    try:
        manifest = read_manifest(skeleton.model)
    except PackManifestError as error:
        return (str(error),)
    if manifest is None:
        return ()
    found = check_manifest(manifest, skeleton.directory)
    rest = [f"{text}: it runs here as if it were unpacked" for text in found.differences]
    return (*found.faults, *rest)


def _check_checkpoint(path: str, local: os.PathLike[str]) -> CheckReport:
    faults: list[str] = []
    within: tuple[str, ...] | None = None
    if path.lower().endswith(".json"):
        directory = os.path.dirname(path)
        within = confining_directories(directory)
        try:
            shards = list(dict.fromkeys(read_index(path, directory, within=within).shard_of.values()))
        except _REFUSALS as error:
            return CheckReport(path, 0, (), (_text(error),), ())
    elif os.path.isdir(path):
        within = confining_directories(path)
        shards = [os.path.join(path, n) for n in sorted(os.listdir(path)) if n.lower().endswith(".safetensors")]
    else:
        shards = [path]
    files, count = [], 0
    for shard in shards:
        try:
            read = read_shard(shard, within=within)
        except _REFUSALS as error:
            faults.append(_text(error))
            files.append(CheckedFile(shard, None, 0))
        else:
            count += len(read.tensors)
            files.append(CheckedFile(shard, read.identity.size, len(read.tensors)))
    if not faults:
        # What only all shards together show: names that are missing or stand there twice, a stale index.
        try:
            count = len(discover_weights(local_source(local)).tensors)
        except _REFUSALS as error:
            faults.append(_text(error))
    return CheckReport(path, count, tuple(files), tuple(faults), ())


def _text(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.strerror and str(error).startswith("[Errno"):
        return f"{error.strerror}: '{error.filename}'"
    return str(error)
