"""ONNX models whose initializers are external data: from the model to the records of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx

from ort_delayed.loader.budget import format_bytes
from ort_delayed.loader.element_types import element_type_from_onnx
from ort_delayed.loader.errors import ShardFormatError
from ort_delayed.loader.external_data import ExternalDataError, external_tensor, has_external_data
from ort_delayed.loader.files import FileIdentity
from ort_delayed.loader.model_texts import fault_in_texts
from ort_delayed.loader.node_bodies import node_bodies
from ort_delayed.loader.probe import PeakRamProbe
from ort_delayed.loader.quoting import quoted
from ort_delayed.loader.reading import read_into
from ort_delayed.loader.shards import opened_shard, shard_path
from ort_delayed.loader.tensor_on_disk import TensorOnDisk

__all__ = ["INLINE_LIMIT_BYTES", "check_ranges", "external_initializers", "iter_initializers", "read_onnx_model"]

INLINE_LIMIT_BYTES = 1024
"""Inline initializers below this size (shapes, axes, scalars) are left to the graph, larger ones are refused."""

# A graph rarely takes more; weights do.
_LARGE_MODEL_FILE_BYTES = 4 << 20


def read_onnx_model(
    path: str, *, within: Sequence[str] | None = None, probe: PeakRamProbe | None = None
) -> onnx.ModelProto:
    """The model's proto, external data left where it is.

    Raises:
        ShardFormatError: the file is no ONNX model, or has names that are not UTF-8.
        RamBudgetExceeded, RamProbeUnavailable: from the probe.
        FileNotFoundError, LocalWeightsRequired, OSError: as opening a shard raises them.
    """
    reading = f"reading the ONNX model '{path}'"
    with opened_shard(path, within=within) as (fd, identity):
        if probe is not None:
            remedy = ""
            if identity.size >= _LARGE_MODEL_FILE_BYTES:
                remedy = (
                    f", a file of {format_bytes(identity.size)} (inline weights cannot be streamed: save them as "
                    "external data first, onnx.save_model(model, path, save_as_external_data=True))"
                )
            probe.reserve(identity.size, reading + remedy)
        content = bytearray(identity.size)
        read_into(fd, memoryview(content), 0)
    try:
        model = onnx.load_model_from_string(bytes(content))
    except MemoryError:
        raise
    except Exception as error:  # protobuf's DecodeError, whose type differs between its implementations
        raise ShardFormatError(f"'{path}' is not an ONNX model: {error}") from error
    del content
    fault = fault_in_texts(model)
    if fault is not None:
        raise ShardFormatError(f"'{path}' is not an ONNX model: {fault}")
    if probe is not None:
        probe.checkpoint(reading)
    return model


def iter_initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every dense initializer of a graph and of all bodies below it (If branches, Loop and Scan bodies)."""
    pending = [graph]
    while pending:
        current = pending.pop()
        yield from current.initializer
        for node in current.node:
            pending.extend(node_bodies(node))


def external_initializers(model: onnx.ModelProto, path: str, directory: str) -> tuple[TensorOnDisk, ...]:
    """The records of all external initializers of the model at ``path``; locations are relative to ``directory``.

    Nothing is opened.

    Raises:
        ShardFormatError: an inline initializer of 1 KiB or more, external data that cannot be made out, an
            initializer without a name, or two of one name with different data.
        LocalWeightsRequired: a location is a URL or absolute.
    """
    inline: list[tuple[str, int]] = []
    by_name: dict[str, TensorOnDisk] = {}
    for tensor in iter_initializers(model.graph):
        if not has_external_data(tensor):
            size = _inline_bytes(tensor)
            if size >= INLINE_LIMIT_BYTES:
                inline.append((tensor.name, size))
            continue
        if not tensor.name:
            raise ShardFormatError(f"an external initializer of '{path}' has no name")
        try:
            record = external_tensor(tensor, directory)
        except ExternalDataError as error:
            raise ShardFormatError(f"'{path}': {error}") from error
        location = next(e.value for e in reversed(tensor.external_data) if e.key == "location")
        shard_path(location, directory, f"initializer {quoted(tensor.name)} of '{path}'")
        if by_name.setdefault(tensor.name, record) != record:
            raise ShardFormatError(
                f"'{path}' has two initializers called {quoted(tensor.name)} in different graphs, with different data: "
                "streamed weights are told apart by name, so one of them must be renamed"
            )
    if inline:
        raise ShardFormatError(_inline_message(path, inline))
    return tuple(by_name.values())


def _inline_bytes(tensor: onnx.TensorProto) -> int:
    element_type = element_type_from_onnx(tensor.data_type)
    return tensor.ByteSize() if element_type is None else element_type.nbytes(tuple(tensor.dims))


def _inline_message(path: str, inline: Sequence[tuple[str, int]]) -> str:
    named = ", ".join(f"{quoted(name)} ({format_bytes(size)})" for name, size in inline[:3])
    more = f" and {len(inline) - 3} more" if len(inline) > 3 else ""
    return (
        f"'{path}' holds {len(inline)} weights inline, which cannot be streamed, because reading the model reads them "
        f"all: {named}{more}. Move them to external data first: onnx.save_model(onnx.load({path!r}), 'new.onnx', "
        f"save_as_external_data=True, size_threshold={INLINE_LIMIT_BYTES})"
    )


def check_ranges(
    tensors: Sequence[TensorOnDisk], *, within: Sequence[str] | None = None, named_by: str = ""
) -> Mapping[str, FileIdentity]:
    """Check that every tensor's bytes lie inside its file; returns the identity of each file.

    Raises:
        ShardFormatError: a range ends behind the file's end.
        FileNotFoundError, LocalWeightsRequired, OSError: as opening a shard raises them.
    """
    identities: dict[str, FileIdentity] = {}
    for tensor in tensors:
        if tensor.path not in identities:
            with opened_shard(tensor.path, within=within, named_by=named_by) as (_, identity):
                identities[tensor.path] = identity
        size = identities[tensor.path].size
        if tensor.end > size:
            raise ShardFormatError(
                f"initializer {quoted(tensor.name)} needs {tensor.nbytes} bytes at offset {tensor.offset} of "
                f"'{tensor.path}', which has {size} bytes"
            )
    return identities
