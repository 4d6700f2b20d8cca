"""Sessions on packed models: is the model one, does it suit this machine, which ranges does a run read.

ONNX Runtime itself sees to it that packed bytes are the right ones: when a session is made, each kernel packs its
weight once more, one at a time, and ONNX Runtime takes the saved bytes instead where their hash is the same (release
1.32 also compares the bytes). So a packed model that was made elsewhere is slower, never wrong, as long as its graph
suits the processor.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import onnx
import onnxruntime

from ort_delayed.loader.element_types import element_type_from_onnx
from ort_delayed.loader.external_data import external_tensor
from ort_delayed.loader.quoting import quoted
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.pack_manifest import MANIFEST_KEY, check_manifest, read_manifest
from ort_delayed.prepacked_entries import PackedWeight, packed_weights
from ort_delayed.use_order import WeightUse, scoped_initializers

__all__ = [
    "PACKED_MENTION",
    "PackedModelError",
    "PackedModelWarning",
    "ReadRanges",
    "accept_packed",
    "all_packed_ranges",
    "optimized_already",
    "read_ranges",
]

PACKED_MENTION = MANIFEST_KEY.encode()
"""Occurs in every packed model file; a model without it need not be parsed to know that it is none."""


class PackedModelError(ValueError):
    """A packed model cannot be used here: it is not whole, or its graph was made for another processor."""


class PackedModelWarning(UserWarning):
    """A packed model was packed with another ONNX Runtime or for another processor: it runs as if it were unpacked."""


def accept_packed(model: onnx.ModelProto, directory: str) -> bool | None:
    """Whether kernels can read a model's packed weights here; None where the model is not a packed one.

    Where they cannot, because of another ONNX Runtime or processor, a :class:`PackedModelWarning` says why.

    Args:
        model: the model.
        directory: where its data file stands.

    Raises:
        PackManifestError: the manifest cannot be read.
        PackedModelError: the model cannot be used here.
    """
    manifest = read_manifest(model)
    if manifest is None:
        return None
    found = check_manifest(manifest, directory)
    if found.faults:
        raise PackedModelError(f"the packed model in '{directory}' cannot be used here: {'; '.join(found.faults)}")
    if manifest.prepack and found.differences:
        warnings.warn(
            f"the packed model in '{directory}' runs as if it were unpacked: {'; '.join(found.differences)}. "
            "Pack it again here (ort_delayed.pack_model) to have its weights packed",
            PackedModelWarning,
            stacklevel=_level_of_caller(),
        )
    return manifest.prepack and not found.differences


def _level_of_caller() -> int:
    """The stack level, for :func:`warnings.warn`, of the first frame outside this package: who made the session."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (
        "ort_delayed",
        "contextlib",
    ):
        frame, level = frame.f_back, level + 1
    return level


@contextmanager
def optimized_already(options: onnxruntime.SessionOptions) -> Iterator[None]:
    """While a session on a packed model is built, the options ask for no optimisation: it has been done."""
    level = options.graph_optimization_level
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        yield
    finally:
        options.graph_optimization_level = level


@dataclass(frozen=True, slots=True)
class ReadRanges:
    """What a run of a packed model reads.

    Attributes:
        uses: the uses of weights, as uses of ranges.
        ranges: the ranges, by name.
        weights: by the name of a range, the initializer that it is of.
    """

    uses: tuple[WeightUse, ...]
    ranges: Mapping[str, TensorOnDisk]
    weights: Mapping[str, str]


def read_ranges(
    uses: Sequence[WeightUse], tensors: Mapping[str, TensorOnDisk], initializers: Mapping[str, onnx.TensorProto]
) -> ReadRanges:
    """What a run of a packed model reads, from what it uses.

    A node whose operator packed a weight reads the packed buffers; any other reads the raw values. Both are called
    after the weight, with the buffer's key behind it (``"fc.weight MatMul+3768020039991512728 0"``).

    Args:
        uses: the order of use.
        tensors: the external weights, by the names that the uses have.
        initializers: their protos.
    """
    ranges: dict[str, TensorOnDisk] = {}
    weights: dict[str, str] = {}
    packed: dict[tuple[str, str], list[str]] = {}
    for name, stored in tensors.items():
        for op_type, stored_range in _ranges_of(packed_weights(initializers[name]), stored):
            ranges[stored_range.name] = stored_range
            weights[stored_range.name] = name
            packed.setdefault((name, op_type), []).append(stored_range.name)
    read: list[WeightUse] = []
    for use in uses:
        names = packed.get((use.weight, use.op_type))
        if names is None:
            names = [use.weight]
            if use.weight in tensors:
                ranges[use.weight] = tensors[use.weight]
                weights[use.weight] = use.weight
        read.extend(replace(use, weight=name) for name in names)
    return ReadRanges(tuple(read), ranges, weights)


def all_packed_ranges(model: onnx.ModelProto, directory: str) -> tuple[TensorOnDisk, ...]:
    """Every packed range that ONNX Runtime maps when it loads a model, whether or not a kernel reads it.

    It maps these before it packs anything, and keeps them mapped as long as the session lives; raw values it unmaps
    while it builds the session.

    Args:
        model: the model.
        directory: what its external data is relative to.

    Raises:
        PrepackedEntryError, ExternalDataError: an entry of external data cannot be read.
        PackedModelError: a packed form has fewer bytes than the float32 weight that it is made of. Kernels read what
            the weight's shape says; ONNX Runtime compares the sizes from release 1.32 on.
    """
    found: dict[str, TensorOnDisk] = {}
    for name, proto in scoped_initializers(model.graph):
        forms = packed_weights(proto)
        if not forms:
            continue
        stored = external_tensor(proto, directory)
        stored = replace(stored, name=name, path=os.path.realpath(stored.path))
        if stored.element_type.name == "float32":
            _check_sizes(forms, stored)
        found |= {t.name: t for _, t in _ranges_of(forms, stored)}
    return tuple(found.values())


def _check_sizes(forms: Sequence[PackedWeight], stored: TensorOnDisk) -> None:
    for form in forms:
        if form.nbytes < stored.nbytes:
            raise PackedModelError(
                f"what {quoted(form.op_type)} made of the weight {quoted(stored.name)} must have at least its "
                f"{stored.nbytes} bytes, it has {form.nbytes} at offset {form.buffers[0].offset} of '{stored.path}': "
                "pack the model again"
            )


def _ranges_of(forms: Sequence[PackedWeight], stored: TensorOnDisk) -> Iterator[tuple[str, TensorOnDisk]]:
    """Operator and range of each packed buffer of a weight."""
    uint8 = element_type_from_onnx(onnx.TensorProto.UINT8)
    assert uint8 is not None
    for form in forms:
        for number, buffer in enumerate(form.buffers):
            name = f"{stored.name} {form.key} {number}"
            yield form.op_type, TensorOnDisk(name, stored.path, buffer.offset, buffer.nbytes, (buffer.nbytes,), uint8)
