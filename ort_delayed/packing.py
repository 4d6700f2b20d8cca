"""``pack_model``: a model optimised, packed and laid out on disk once, so that sessions do none of it again."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

import onnx

from ort_delayed.graphs import iter_graphs
from ort_delayed.loader.external_data import nameable
from ort_delayed.loader.resident_memory import PeakWindow, current_rss_bytes
from ort_delayed.model_outputs import Destination, check_destination, write_outputs
from ort_delayed.model_source import serialized
from ort_delayed.new_files import PendingDataFile
from ort_delayed.pack_manifest import PackManifest, current_environment, write_manifest
from ort_delayed.pack_report import PackedTensorReport, PackReport
from ort_delayed.pack_sessions import OPTIMIZATION_LEVELS, SavedModel, optimize_model
from ort_delayed.pack_source import SourceModel, read_source
from ort_delayed.packed_data import PackedData
from ort_delayed.scratch_directory import ScratchDirectory
from ort_delayed.skeletons import Skeleton

__all__ = ["pack_model"]

EXTERNAL_BYTES = 1024
"""Smaller initializers stay in the model: ONNX Runtime needs some while loading."""

_NCHWC_DOMAIN = "com.microsoft.nchwc"


def pack_model(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    optimize: str = "all",
    prepack: bool = True,
    overwrite: bool = False,
    progress: Callable[[int, int], Any] | None = None,
) -> PackReport:
    """Write a model that a session on this machine loads without optimising it, and whose weights stream well.

    ONNX Runtime optimises the model, then packs its weights piece by piece as its kernels want them. All weights go to
    one data file beside the destination, ``NAME.<digest>.weights``: small ones in front, then what kernels read while
    the model runs, in order of first use, and behind it the raw values of packed weights, which ONNX Runtime reads
    when a session is made. Outputs are those of plain onnxruntime at that optimization level, bit for bit. The packed
    model also loads in plain onnxruntime.

    The result is the same for the same source, ONNX Runtime and processor. Disk: about twice the model's weights, and
    while packing up to twice that. Memory: what ONNX Runtime's optimizers take, or four times the largest weight.

    Args:
        source: the model file: with inline or external weights, with delayed nodes or without.
        destination: the model file to write. Both files appear whole or not at all.
        optimize: ``"all"`` (as onnxruntime does by default; lays some graphs out for this processor), ``"extended"``,
            ``"basic"`` or ``"none"``.
        prepack: whether weights are packed; without it the file is half as large, and sessions pack them in memory.
        overwrite: replace a destination that exists, and its data file.
        progress: called with the bytes of weights that are packed and written, and those in all, as they grow.

    Returns:
        what was done with each weight; it prints as a table.

    Raises:
        ValueError: a bad argument, source and destination are the same file, or the source is no ONNX model.
        FileExistsError: the destination exists, and ``overwrite`` is false.
        DelayedInitializerError: a payload cannot be read: also FileNotFoundError, EOFError and so on.
        OSError: reading or writing failed, for instance because the disk is full.
        Exception: what onnxruntime says of a model that it cannot load.
    """
    if optimize not in OPTIMIZATION_LEVELS:
        raise ValueError(f"optimize must be one of {', '.join(map(repr, OPTIMIZATION_LEVELS))}, found {optimize!r}")
    place = check_destination(source, destination, overwrite=overwrite)
    nameable(place.path)  # ONNX Runtime writes beside it
    baseline, window = current_rss_bytes(), PeakWindow()
    try:
        # Two skeletons: the first says until the end what the source reads, the second becomes the model to optimise.
        with (
            Skeleton(source) as skeleton,
            Skeleton(source) as working,
            ScratchDirectory(place.directory, place.name) as scratch,
        ):
            made = read_source(working)
            optimized = _optimized(working, made, scratch, optimize)
            packed = PackedData(optimized, scratch, prepack=prepack)
            manifest: PackManifest | None = None

            def fill(data: PendingDataFile) -> None:
                packed.write(data, progress)

            def finish(data_name: str) -> None:
                nonlocal manifest
                packed.finish(data_name)
                _keep_metadata(packed.model, skeleton.model)
                manifest = _manifest(packed, made, optimize, prepack, data_name or None)
                write_manifest(packed.model, manifest)
                skeleton.model = packed.model

            data_name = write_outputs(skeleton, place, fill if packed.weights else None, finish)
            working.check_unchanged()
            assert manifest is not None
            peak = window.read()
            rise = None if peak is None or baseline is None else max(peak - baseline, 0)
            return _report(skeleton.path, place, packed, manifest, data_name, rise)
    finally:
        window.close()


def _optimized(working: Skeleton, made: SourceModel, scratch: ScratchDirectory, optimize: str) -> SavedModel:
    working.model = made.model
    return optimize_model(
        serialized(working), made.directory, scratch.path, optimize=optimize, least_bytes=EXTERNAL_BYTES
    )


def _keep_metadata(model: onnx.ModelProto, source: onnx.ModelProto) -> None:
    """Put back what ONNX Runtime does not write: who made the source, and what its metadata says."""
    for field in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        if source.HasField(field):
            setattr(model, field, getattr(source, field))
    del model.metadata_props[:]
    model.metadata_props.extend(source.metadata_props)


def _manifest(
    packed: PackedData, made: SourceModel, optimize: str, prepack: bool, data_name: str | None
) -> PackManifest:
    layout = packed.layout
    nodes = (node for graph in iter_graphs(packed.model.graph) for node in graph.node)
    return PackManifest(
        producer=f"ort-delayed {importlib.metadata.version('ort-delayed')}",
        source_digest=made.digest,
        environment=current_environment(),
        optimize=optimize,
        prepack=prepack,
        tied_to_processor=any(node.domain == _NCHWC_DOMAIN for node in nodes),
        data_file=data_name,
        data_bytes=layout.end,
        streamed_start=layout.streamed_start or 0,
        streamed_end=layout.streamed_end,
        groups=layout.groups,
    )


def _report(
    source: str, place: Destination, packed: PackedData, manifest: PackManifest, data_name: str | None, peak: int | None
) -> PackReport:
    rows = tuple(
        PackedTensorReport(
            name,
            w.stored.nbytes,
            sum(p.nbytes for p in w.packed),
            tuple(p.op_type for p in w.packed),
            w.note if w.first == name else f"the same bytes as '{w.first}'",
        )
        for name, w in packed.weights.items()
    )
    return PackReport(
        source,
        place.path,
        os.path.join(place.directory, data_name) if data_name is not None else None,
        packed.layout.end,
        packed.layout.streamed_end,
        manifest,
        rows,
        peak,
    )
