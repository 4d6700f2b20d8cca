"""What packing did, as a frozen record that prints as a table."""

from __future__ import annotations

from dataclasses import dataclass

from ort_delayed.conversion_report import byte_count
from ort_delayed.pack_manifest import PackManifest

__all__ = ["PackReport", "PackedTensorReport"]


@dataclass(frozen=True, slots=True)
class PackedTensorReport:
    """One weight of a packed model. Sizes in bytes.

    Attributes:
        name: the initializer; one of a body is preceded by where the body stands.
        raw_bytes: its values as the model defines them.
        packed_bytes: what kernels read instead while the model runs; 0 where nothing packs it.
        packed_for: the operators that packed it.
        note: why it was not packed although a node that may pack reads it, or with which other weight it shares bytes.
    """

    name: str
    raw_bytes: int
    packed_bytes: int
    packed_for: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class PackReport:
    """What :func:`pack_model` did; ``str()`` of it is a table. Sizes in bytes.

    Attributes:
        source: the model that was read.
        destination: the model that was written.
        data_file: the data file written beside it, or None where the model needs none.
        data_bytes: its size.
        streamed_bytes: what of it kernels read while the model runs, small weights included.
        manifest: what the model says of itself.
        weights: every weight that has a place in the data file, in order of first use.
        peak_incremental_bytes: the most resident memory that packing took, above what the process had before; None
            where the system keeps no high-water mark.
    """

    source: str
    destination: str
    data_file: str | None
    data_bytes: int
    streamed_bytes: int
    manifest: PackManifest
    weights: tuple[PackedTensorReport, ...]
    peak_incremental_bytes: int | None

    def __str__(self) -> str:
        rows = [("weight", "raw", "packed", "for")]
        rows += [
            (w.name, byte_count(w.raw_bytes), _packed(w), "; ".join((*w.packed_for, w.note)[:])) for w in self.weights
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{self.source} -> {self.destination}", ""]
        for name, raw, packed, why in rows:
            lines.append(f"{name:<{widths[0]}}  {raw:>{widths[1]}}  {packed:>{widths[2]}}  {why}".rstrip("; "))
        count = sum(w.packed_bytes > 0 for w in self.weights)
        lines += ["", f"{count} of {len(self.weights)} weights packed; {len(self.manifest.groups)} groups"]
        if self.data_file is not None:
            read = f"of which a run reads {byte_count(self.streamed_bytes)}"
            lines.append(f"data file: {self.data_file}, {byte_count(self.data_bytes)}, {read}")
        if self.peak_incremental_bytes is not None:
            lines.append(f"packing took at most {byte_count(self.peak_incremental_bytes)} of memory")
        return "\n".join(lines)


def _packed(weight: PackedTensorReport) -> str:
    return byte_count(weight.packed_bytes) if weight.packed_bytes else "-"
