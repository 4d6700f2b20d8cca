"""The model that goes with installed weights: small values inline, all other entries pointed at what is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnxruntime

from ort_delayed.external_files import point_at_files, repoint_external_data
from ort_delayed.graphs import iter_graphs
from ort_delayed.install_plan import Assignment
from ort_delayed.loader.files import FileIdentity
from ort_delayed.loader.reading import read_into
from ort_delayed.loader.shards import opened_shard
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.model_source import refuse_optimized_model
from ort_delayed.ops.kernel import Binding
from ort_delayed.preparing import has_delayed_nodes, prepare

__all__ = ["InstallableModel", "prepare_for_installing", "put_inline"]


@dataclass(frozen=True, slots=True)
class InstallableModel:
    """What ONNX Runtime gets.

    Attributes:
        serialized: the model's bytes.
        external_directory: what its external-data locations are relative to; None where it has no external data.
        has_delayed_nodes: whether it carries handles of the binding that it was prepared with.
    """

    serialized: bytes
    external_directory: str | None
    has_delayed_nodes: bool


def put_inline(assignments: Sequence[Assignment], identities: Mapping[str, FileIdentity]) -> None:
    """Read the tensors of ``assignments`` into their protos.

    Raises:
        ShardFormatError, FileNotFoundError, OSError: as opening a shard raises them.
    """
    for assignment in assignments:
        tensor, source = assignment.tensor, assignment.source
        content = bytearray(source.nbytes)
        with opened_shard(source.path, within=None, expected=identities[source.path]) as (fd, _):
            read_into(fd, memoryview(content), source.offset)
        kept = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        kept.doc_string = tensor.doc_string
        kept.metadata_props.extend(tensor.metadata_props)
        kept.raw_data = bytes(content)
        tensor.CopyFrom(kept)


def prepare_for_installing(
    model: onnx.ModelProto,
    directory: str,
    assignments: Sequence[Assignment],
    options: onnxruntime.SessionOptions,
    binding: Binding,
) -> InstallableModel:
    """Prepare the model, and point every entry at the bytes that are installed: ONNX Runtime's optimizers read those.

    Args:
        model: changed in place.
        directory: absolute directory that its file names and locations are relative to.
        assignments: what is installed; inline ones have been put in place already.
        options: for a model with delayed nodes they must not ask for the optimized model.
        binding: gets the payloads of the delayed nodes.

    Raises:
        DelayedInitializerError: a delayed node cannot be used.
        ExternalDataError: an entry that is not installed leads out of the model's directory, or the files have no
            directory in common.
    """
    places: dict[str, TensorOnDisk] = {}
    for assignment in assignments:
        if not assignment.inline:
            places[assignment.source.name] = assignment.source
            _detach(assignment)
    has_delayed = has_delayed_nodes(model)
    if has_delayed:
        refuse_optimized_model(options)
        made = prepare(model, binding, model_directory=directory)
        model, others = made.model, made.external_directory
    else:
        others = repoint_external_data(model, directory)
    # Preparing may have made a new model of it: the initializers are found by their names, which are unique.
    placed = [(t, places[t.name]) for g in iter_graphs(model.graph) for t in g.initializer if t.name in places]
    common = point_at_files(model, others, placed)
    return InstallableModel(model.SerializeToString(), common, has_delayed)


def _detach(assignment: Assignment) -> None:
    """Take a tensor's values and entries away, until it is known in what directory all files stand."""
    tensor = assignment.tensor
    tensor.data_location = onnx.TensorProto.DEFAULT
    for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
        tensor.ClearField(field)
    if not assignment.is_own:
        del tensor.external_data[:]  # prepacked forms too: they are of other bytes
