"""Safetensors shards and indexes: from a file to the records of its tensors.

What a valid header is, the safetensors library itself decides: a shard is opened with it, and names, shapes, types
and their order by offset come from it. It accepts a file only if its tensors cover it without hole, overlap or rest,
so each offset is the sum of the sizes before it. No weights are read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from safetensors import SafetensorError, safe_open

from ort_delayed.loader.element_types import element_type_from_safetensors
from ort_delayed.loader.errors import ShardFormatError
from ort_delayed.loader.files import FileIdentity, is_path
from ort_delayed.loader.probe import PeakRamProbe
from ort_delayed.loader.reading import read_into
from ort_delayed.loader.safetensors_faults import explain_fault
from ort_delayed.loader.shards import opened_shard, shard_path
from ort_delayed.loader.tensor_on_disk import TensorOnDisk

__all__ = ["SafetensorsIndex", "SafetensorsShard", "read_index", "read_shard", "tensors_of_index", "tensors_of_shards"]


@dataclass(frozen=True, slots=True)
class SafetensorsShard:
    """One shard's contents.

    Attributes:
        path: the file.
        identity: what it was when it was read.
        tensors: its tensors in order of offset.
        aliases: names of tied tensors that are stored only under another name, and that name.
    """

    path: str
    identity: FileIdentity
    tensors: tuple[TensorOnDisk, ...]
    aliases: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SafetensorsIndex:
    """An index: which shard each tensor is in (absolute paths), and the bytes of all tensors where it says so."""

    path: str
    shard_of: Mapping[str, str]
    total_size: int | float | None


def read_shard(
    path: str, *, within: Sequence[str] | None = None, probe: PeakRamProbe | None = None, named_by: str = ""
) -> SafetensorsShard:
    """Read the header of one .safetensors file.

    Args:
        path: absolute path of the file.
        within: see :func:`~ort_delayed.loader.shards.opened_shard`.
        probe: a started probe, whose budget the header has to fit.
        named_by: who names the shard, for messages.

    Raises:
        ShardFormatError: the library refuses the file, a tensor has no name or a type that is unknown here, or the
            file changed while it was read.
        RamBudgetExceeded, RamProbeUnavailable: from the probe.
        FileNotFoundError, LocalWeightsRequired, OSError: as opening a shard raises them.
    """
    reading = f"reading the header of '{path}'"
    with opened_shard(path, within=within, named_by=named_by) as (fd, identity):
        prefix = bytearray(8)
        header_bytes = 0
        if identity.size >= 8:
            read_into(fd, memoryview(prefix), 0)
            header_bytes = int.from_bytes(prefix, "little")
        if probe is not None and header_bytes <= identity.size:
            probe.reserve(8 + header_bytes, reading)
        try:
            rows, metadata = _library_rows(path)
        except SafetensorError as error:
            raise ShardFormatError(
                f"'{path}' is not a complete, valid safetensors file: {explain_fault(fd, identity.size, str(error))}"
            ) from error
        if FileIdentity.of(path) != identity:
            raise ShardFormatError(f"the shard '{path}' changed while its header was read")
        tensors = _records(path, rows, 8 + header_bytes, identity.size)
    if probe is not None:
        probe.checkpoint(reading)
    stored = {t.name for t in tensors}
    aliases = {alias: kept for alias, kept in metadata.items() if kept in stored and alias not in stored and alias}
    return SafetensorsShard(path, identity, tensors, aliases)


_Row = tuple[str, tuple[int, ...], str]


def _library_rows(path: str) -> tuple[list[_Row], Mapping[str, str]]:
    """Name, shape and type of each tensor in order of offset, and the metadata, as the library read them."""
    try:
        # By positioned reads: a mapped header dies of SIGBUS if the file is truncated at that moment.
        opened = safe_open(path, framework="np", backend="pread")
    except TypeError:  # the keyword came with safetensors 0.8
        opened = safe_open(path, framework="np")
    with opened as shard:
        rows = []
        for name in shard.offset_keys():
            part = shard.get_slice(name)
            rows.append((name, tuple(part.get_shape()), str(part.get_dtype())))
        return rows, shard.metadata() or {}


def _records(path: str, rows: Sequence[_Row], data_start: int, file_size: int) -> tuple[TensorOnDisk, ...]:
    offset = data_start
    tensors = []
    for name, shape, dtype in rows:
        element_type = element_type_from_safetensors(dtype)
        if element_type is None:
            raise ShardFormatError(f"tensor '{name}' in '{path}' has the type {dtype}, which is not known here")
        if not name:
            raise ShardFormatError(f"a tensor in '{path}' has no name")
        nbytes = element_type.nbytes(shape)
        tensors.append(TensorOnDisk(name, path, offset, nbytes, shape, element_type))
        offset += nbytes
    if offset != file_size:
        raise ShardFormatError(
            f"the tensors of '{path}' end at byte {offset} and the file at byte {file_size}, although the safetensors "
            "library accepts it: this release of the library allows gaps, and offsets cannot be derived"
        )
    return tuple(tensors)


def read_index(
    path: str, directory: str, *, within: Sequence[str] | None = None, probe: PeakRamProbe | None = None
) -> SafetensorsIndex:
    """Read a ``model.safetensors.index.json``; shards are relative to ``directory``.

    Raises:
        ShardFormatError: not JSON, no ``weight_map`` from names to files, or a name that stands there twice.
        LocalWeightsRequired: a shard is given by a URL or an absolute path.
        RamBudgetExceeded, RamProbeUnavailable: from the probe.
    """
    reading = f"reading the index '{path}'"
    with opened_shard(path, within=within) as (fd, identity):
        if probe is not None:
            probe.reserve(identity.size, reading)
        text = bytearray(identity.size)
        read_into(fd, memoryview(text), 0)
    try:
        content = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ShardFormatError(f"the index '{path}' is not valid JSON: {error}") from error
    if probe is not None:
        probe.checkpoint(reading)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ShardFormatError(f"the index '{path}' has no 'weight_map' from tensor names to shards")
    shards: dict[str, str] = {}
    shard_of: dict[str, str] = {}
    for name, location in weight_map.items():
        if not name or not isinstance(location, str) or not is_path(location):
            raise ShardFormatError(f"the index '{path}' gives tensor {name!r} the shard {location!r}, no file name")
        if location not in shards:
            shards[location] = shard_path(location, directory, f"the index '{path}'")
        shard_of[name] = shards[location]
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some writers leave a float. What is no number of bytes at all says nothing about the shards.
    usable = isinstance(total, int | float) and not isinstance(total, bool) and total > 0
    return SafetensorsIndex(path, shard_of, total if usable else None)


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} stands there twice")
    return found


def tensors_of_index(index: SafetensorsIndex, shards: Mapping[str, SafetensorsShard]) -> tuple[TensorOnDisk, ...]:
    """The tensors that the index names, each from the shard that it gives; what else the shards hold is ignored.

    Args:
        index: the index.
        shards: every shard that it names, by path.

    Raises:
        ShardFormatError: a shard lacks a tensor that the index gives it, or the index was written for other shards.
    """
    stored = {path: {t.name: t for t in shard.tensors} for path, shard in shards.items()}
    tensors = []
    for name, path in index.shard_of.items():
        kept = shards[path].aliases.get(name, name)
        record = stored[path].get(kept)
        if record is None:
            elsewhere = next((other for other, names in stored.items() if name in names), None)
            found = f"the index is stale, '{elsewhere}' holds it" if elsewhere else "no shard of the index holds it"
            raise ShardFormatError(
                f"the index '{index.path}' gives tensor '{name}' to '{path}', which lacks it: {found}"
            )
        tensors.append(record if kept == name else replace(record, name=name))
    _check_total(index, tensors, shards)
    return tuple(tensors)


def _check_total(
    index: SafetensorsIndex, tensors: Sequence[TensorOnDisk], shards: Mapping[str, SafetensorsShard]
) -> None:
    # Writers count tied tensors once or twice, and tensors that they leave out of the map or not.
    named = sum(t.nbytes for t in tensors)
    once = sum(nbytes for _, _, nbytes in {(t.path, t.offset, t.nbytes) for t in tensors})
    everything = sum(t.nbytes for shard in shards.values() for t in shard.tensors)
    if index.total_size is not None and index.total_size not in (named, once, everything):
        raise ShardFormatError(
            f"the index '{index.path}' is stale: it was written for {index.total_size} bytes of tensors "
            f"(metadata.total_size), those that it names take {named} bytes. Write it anew for these shards, or "
            "delete total_size from it if only that number is wrong"
        )


def tensors_of_shards(shards: Sequence[SafetensorsShard]) -> tuple[TensorOnDisk, ...]:
    """All tensors of shards without an index, tied names included.

    Raises:
        ShardFormatError: a name stands in two shards.
    """
    by_name: dict[str, TensorOnDisk] = {}
    for shard in shards:
        for record in shard.tensors:
            _add(by_name, record)
    stored = set(by_name)
    for shard in shards:
        own = {t.name: t for t in shard.tensors}
        for alias, kept in shard.aliases.items():
            if alias not in stored:
                _add(by_name, replace(own[kept], name=alias))
    return tuple(by_name.values())


def _add(by_name: dict[str, TensorOnDisk], record: TensorOnDisk) -> None:
    if record.name in by_name:
        raise ShardFormatError(
            f"tensor '{record.name}' stands in '{by_name[record.name].path}' and in '{record.path}', and no index says "
            "which is meant: add an index, or give the one file that is meant"
        )
    by_name[record.name] = record
