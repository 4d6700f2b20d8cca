"""The manifest of a packed model: who packed it, from what, for which ONNX Runtime and processor, and its data file.

It stands in the model's ``metadata_props`` as JSON under one key, so that plain onnxruntime shows it too.
"""

from __future__ import annotations

import json
import os
import platform as python_platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import onnx
import onnxruntime

from ort_delayed.loader import platform
from ort_delayed.loader.files import is_path, open_weights
from ort_delayed.loader.quoting import quoted
from ort_delayed.pack_layout import RangeGroup
from ort_delayed.skeletons import Skeleton

__all__ = ["MANIFEST_KEY", "PackCheck", "PackManifest", "PackManifestError", "check_manifest", "current_environment"]
__all__ += ["read_manifest", "verify_packed_model", "write_manifest"]

MANIFEST_KEY = "ort_delayed.packed_model"
"""The key of the manifest in ``metadata_props``."""

_FORMAT = 1


class PackManifestError(ValueError):
    """A model has no manifest, or one that this release cannot read."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What packed bytes, and graphs that were optimised for a machine, depend on.

    Attributes:
        onnxruntime: its version, ``"1.32.0"``.
        machine: the processor's architecture, ``"x86_64"``.
        features: those of its instruction sets that ONNX Runtime chooses kernels and packed layouts by, sorted;
            ``("unknown",)`` where the system does not say.
    """

    onnxruntime: str
    machine: str
    features: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PackManifest:
    """What is known of a packed model. Offsets and sizes in bytes.

    Attributes:
        producer: who packed it.
        source_digest: BLAKE2b of the source's model file and of all payloads that it refers to, hexadecimal.
        environment: what it was packed with.
        optimize: the optimization level.
        prepack: whether weights were packed.
        tied_to_processor: whether the graph itself, not only its packed weights, was made for the processor.
        data_file: the data file beside the model, or None where the model needs none.
        data_bytes: its size.
        streamed_start: where the ranges begin that kernels read while the model runs.
        streamed_end: first byte behind them.
        groups: the streamed ranges in order of first use, about 16 MiB each.
    """

    producer: str
    source_digest: str
    environment: Environment
    optimize: str
    prepack: bool
    tied_to_processor: bool
    data_file: str | None
    data_bytes: int
    streamed_start: int
    streamed_end: int
    groups: tuple[RangeGroup, ...]


@dataclass(frozen=True, slots=True)
class PackCheck:
    """What :func:`verify_packed_model` found; falsy if there is any difference.

    Attributes:
        manifest: the model's manifest.
        faults: why the model cannot be used here, or should not: its data file is not there or has another size,
            its graph was made for another processor. Sentences.
        differences: why its packed weights are of no use here, while the model runs all the same: another version of
            ONNX Runtime, another processor. Sentences.
    """

    manifest: PackManifest
    faults: tuple[str, ...]
    differences: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.faults and not self.differences


def current_environment() -> Environment:
    """What a model that is packed by this process depends on."""
    return Environment(onnxruntime.__version__, python_platform.machine(), platform.processor_features())


def write_manifest(model: onnx.ModelProto, manifest: PackManifest) -> None:
    """Put the manifest into the model's metadata, in the place of one that is there."""
    text = json.dumps({"format": _FORMAT, **asdict(manifest)}, sort_keys=True)
    for index in reversed([i for i, p in enumerate(model.metadata_props) if p.key == MANIFEST_KEY]):
        del model.metadata_props[index]
    model.metadata_props.add(key=MANIFEST_KEY, value=text)


def read_manifest(model: onnx.ModelProto) -> PackManifest | None:
    """The model's manifest, or None where it has none.

    Raises:
        PackManifestError: it cannot be read: another format, something missing, something of another type.
    """
    texts = [p.value for p in model.metadata_props if p.key == MANIFEST_KEY]
    if not texts:
        return None
    try:
        values = json.loads(texts[0])
        found = values.pop("format")
        if found != _FORMAT:
            raise PackManifestError(
                f"the model's manifest ('{MANIFEST_KEY}' in its metadata) has format {found!s:.200}, this release of "
                f"ort_delayed reads format {_FORMAT}: pack the model again with this release"
            )
        environment = values.pop("environment")
        values["environment"] = Environment(
            str(environment["onnxruntime"]), str(environment["machine"]), tuple(map(str, environment["features"]))
        )
        values["groups"] = tuple(RangeGroup(int(g["offset"]), int(g["nbytes"])) for g in values["groups"])
        _check_types(values)
        return PackManifest(**values)
    except PackManifestError:
        raise
    # JSON has lists of any depth (RecursionError) and numbers that are infinite (OverflowError).
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise PackManifestError(
            f"the model's manifest ('{MANIFEST_KEY}' in its metadata) is damaged ({type(error).__name__}: "
            f"{error}): pack the model again"
        ) from error


def check_manifest(manifest: PackManifest, directory: str) -> PackCheck:
    """Compare a manifest with this process and with the data file in ``directory``. No weight is read."""
    faults, differences = _data_faults(manifest, directory), []
    packed, here = manifest.environment, current_environment()
    if packed.onnxruntime != here.onnxruntime:
        differences.append(f"it was packed with onnxruntime {packed.onnxruntime}, this is {here.onnxruntime}")
    if (packed.machine, packed.features) != (here.machine, here.features):
        text = f"it was packed for {_processor(packed)}, this is {_processor(here)}"
        differences.append(text)
        if manifest.tied_to_processor:
            faults.append(
                f"{text}, and optimize='{manifest.optimize}' has laid its graph out for that one: pack the model again "
                "here, or with optimize='extended', which any processor runs"
            )
    return PackCheck(manifest, tuple(faults), tuple(differences))


def verify_packed_model(path: str | os.PathLike[str]) -> PackCheck:
    """Whether a packed model is whole and made for this ONNX Runtime and processor. No weight is read.

    Args:
        path: a model that ``pack_model`` wrote.

    Raises:
        PackManifestError: the model was not packed, or its manifest cannot be read.
        NotAModelError: the file is no ONNX model.
        OSError: the file cannot be opened.
    """
    with Skeleton(path) as skeleton:
        manifest = read_manifest(skeleton.model)
        if manifest is None:
            raise PackManifestError(f"'{skeleton.path}' has no manifest: it was not written by ort_delayed.pack_model")
        return check_manifest(manifest, skeleton.directory)


def _data_faults(manifest: PackManifest, directory: str) -> list[str]:
    if manifest.data_file is None:
        return []
    path = os.path.join(directory, manifest.data_file)
    try:
        fd = open_weights(path)
    except OSError as error:
        return [f"its data file '{path}' cannot be opened ({error.strerror}): model and data file go together"]
    try:
        found = os.fstat(fd).st_size
    finally:
        os.close(fd)
    if found != manifest.data_bytes:
        return [f"its data file '{path}' must have {manifest.data_bytes} bytes, it has {found}: copy it again"]
    return []


def _processor(environment: Environment) -> str:
    return f"{environment.machine} with {' '.join(environment.features) or 'none of the features that matter'}"


def _check_types(values: dict[str, object]) -> None:
    expected: dict[str, type | tuple[type, ...]] = {
        "producer": str,
        "source_digest": str,
        "optimize": str,
        "prepack": bool,
        "tied_to_processor": bool,
        "data_file": (str, type(None)),
        "data_bytes": int,
        "streamed_start": int,
        "streamed_end": int,
    }
    unknown: Sequence[str] = sorted(set(values) - {f.name for f in fields(PackManifest)})
    if unknown:
        raise TypeError(f"unknown fields {', '.join(unknown):.200}")
    for name, kind in expected.items():
        if not isinstance(values[name], kind):
            raise TypeError(f"'{name}' is {values[name]!r:.200}")
    data_file = values["data_file"]
    if isinstance(data_file, str) and not (is_path(data_file) and os.path.basename(data_file) == data_file):
        raise ValueError(f"the data file must stand beside the model, found {quoted(data_file)}")
