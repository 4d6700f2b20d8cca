"""Copying weights, a layer group at a time, from their files straight into the values that a session will use.

Read, not mapped: the bytes are copied once, by the kernel, into memory that stays. A file that is truncated
meanwhile is an error and not SIGBUS, and no mapped page counts beside its copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ort_delayed.installed_values import InstalledValues
from ort_delayed.loader.files import FileIdentity
from ort_delayed.loader.layers import LayerGroup, group_tensors
from ort_delayed.loader.probe import PeakRamProbe
from ort_delayed.loader.reading import read_into
from ort_delayed.loader.shards import opened_shard
from ort_delayed.loader.streaming import LoadProgress
from ort_delayed.loader.tensor_on_disk import TensorOnDisk

__all__ = ["CopiedWeights", "Place", "copy_weights", "place_of"]

Place = tuple[object, ...]


def place_of(tensor: TensorOnDisk) -> Place:
    """Tensors that agree in this hold the same bytes in the same form: tied weights."""
    return (tensor.path, tensor.offset, tensor.element_type, tensor.shape)


@dataclass(frozen=True, slots=True)
class CopiedWeights:
    """What has been copied: layer groups, and bytes (tied weights once)."""

    groups: int
    nbytes: int


def copy_weights(
    tensors: Sequence[TensorOnDisk],
    layers_per_group: int,
    values: InstalledValues,
    identities: Mapping[str, FileIdentity],
    probe: PeakRamProbe,
    progress: Callable[[LoadProgress], Any] | None,
) -> CopiedWeights:
    """Copy ``tensors``, whose names are the initializers', into ``values``.

    Args:
        tensors: where the bytes of each initializer stand.
        layers_per_group: how many consecutive layers are copied between two checks.
        values: gets a value per tensor; tied weights share one.
        identities: each weight file as it was when it was discovered.
        probe: each group is reserved before it is copied, and checked after.
        progress: called after each group.

    Raises:
        RamBudgetExceeded, RamProbeUnavailable: from the probe.
        ShardFormatError, FileNotFoundError, OSError, ShortReadError: a file is no longer what was discovered.
        Exception: whatever ``progress`` raises.
    """
    groups = group_tensors(tensors, layers_per_group)
    bytes_total = sum(g.spec.mapped_bytes for g in groups)
    held: dict[Place, str] = {}
    copied = bytes_done = 0
    for number, group in enumerate(groups, start=1):
        copied += _copy_group(group, values, held, identities, probe)
        bytes_done += group.spec.mapped_bytes
        current = probe.checkpoint(f"copying layer group '{group.spec.name}'")
        if progress is not None:
            peak = probe.report.peak_rss_bytes
            progress(LoadProgress(group.spec, number, len(groups), bytes_done, bytes_total, current, peak))
            probe.checkpoint(f"reporting layer group '{group.spec.name}'")
    return CopiedWeights(len(groups), copied)


def _copy_group(
    group: LayerGroup,
    values: InstalledValues,
    held: dict[Place, str],
    identities: Mapping[str, FileIdentity],
    probe: PeakRamProbe,
) -> int:
    """Read a group's tensors straight into their values; returns how many bytes that were."""
    new: list[TensorOnDisk] = []
    for tensor in group.tensors:
        if held.setdefault(place_of(tensor), tensor.name) == tensor.name:
            new.append(tensor)
    nbytes = sum(t.nbytes for t in new)
    probe.reserve(nbytes, f"copying layer group '{group.spec.name}'")
    for path in sorted({t.path for t in new}):
        with opened_shard(path, within=None, expected=identities[path]) as (fd, _):
            for tensor in new:
                if tensor.path == path:
                    read_into(fd, values.allocate(tensor), tensor.offset)
    for tensor in group.tensors:
        if held[place_of(tensor)] != tensor.name:
            values.share(tensor.name, held[place_of(tensor)])
    return nbytes
