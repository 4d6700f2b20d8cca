"""``stream_install``: weights from disk into values that a session uses in place, group by group, in a budget."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from google.protobuf.message import DecodeError

from ort_delayed.bound_options import BoundModel, bind, claimed, model_digest
from ort_delayed.external_files import EXTERNAL_DIRECTORY_ENTRY
from ort_delayed.graphs import iter_nodes
from ort_delayed.install_errors import InstallError, OptionsSpoiledError
from ort_delayed.install_plan import Assignment, NameMap, plan_from_model, plan_from_weights
from ort_delayed.install_preparing import InstallableModel, prepare_for_installing, put_inline
from ort_delayed.installed_model import InstalledModel, InstallReport
from ort_delayed.installed_values import InstalledValues, can_carry
from ort_delayed.library import register_custom_ops
from ort_delayed.loader.budget import RamBudget, RamBudgetExceeded
from ort_delayed.loader.errors import ShardFormatError
from ort_delayed.loader.external_data import has_external_data
from ort_delayed.loader.files import FileIdentity, confining_directories
from ort_delayed.loader.model_texts import fault_in_texts, parse_model
from ort_delayed.loader.onnx_files import check_ranges, iter_initializers, read_onnx_model
from ort_delayed.loader.platform import release_free_memory
from ort_delayed.loader.probe import PeakRamProbe, RssSampler
from ort_delayed.loader.sources import DiscoveredWeights, discover_weights, local_source
from ort_delayed.loader.streaming import LoadProgress
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.ops.attributes import is_delayed, read_attributes
from ort_delayed.ops.errors import DelayedInitializerError
from ort_delayed.ops.kernel import Binding
from ort_delayed.skeletons import NotAModelError, Skeleton
from ort_delayed.unique_names import make_names_unique
from ort_delayed.weight_copying import copy_weights, place_of

__all__ = ["InstallReport", "InstalledModel", "stream_install"]

_PREPACKING_ENTRY = "session.disable_prepacking"
_NOTHING_EXTERNAL = (
    "the model has no external initializers, so there is nothing to install. Restore a model with delayed nodes "
    "(ort_delayed.restore_model), save one with inline weights with external data (onnx.save_model with "
    "save_as_external_data=True), or give weights= to take them from elsewhere"
)


def stream_install(
    model: str | bytes | os.PathLike[str],
    sess_options: onnxruntime.SessionOptions,
    *,
    ram_budget: RamBudget | int,
    weights: str | os.PathLike[str] | None = None,
    name_map: NameMap | None = None,
    layers_per_group: int = 1,
    progress: Callable[[LoadProgress], Any] | None = None,
    allow_unused_tensors: bool = False,
    rss_sampler: RssSampler | None = None,
) -> InstalledModel:
    """Copy a model's external weights into values that ONNX Runtime uses in place, a layer group at a time.

    Every name, element type, shape and file is checked before anything is copied, and the options are touched only
    when everything has been: a failure leaves them as they were. From then on they belong to this model. The values
    live as long as the options or any session made with them. The weight files must stay as they are while sessions
    are made: ONNX Runtime's optimizers read them.

    Args:
        model: file name or serialized model. External-data locations are relative to the model's directory; for a
            model given as bytes, to the directory that the options' entry
            ``session.model_external_initializers_file_folder_path`` names, else to the working directory. It may
            have delayed nodes.
        sess_options: gets the values; prepacking is disabled in it unless its entry for that is set.
        ram_budget: bytes of resident memory that installing and building may add to the process, or a
            :class:`RamBudget`. Needed are the weights, and what ONNX Runtime adds.
        weights: a weight source (``.safetensors``, an index, a directory, an ``.onnx`` model with external data), from
            which the weights are taken by name; None: the model's own external data.
        name_map: from initializer to tensor name, a mapping (others keep their names) or a callable; None as a
            tensor name leaves that initializer as the model has it.
        layers_per_group: how many consecutive layers are copied between two checks of the budget; positive.
        progress: called with a :class:`~ort_delayed.loader.LoadProgress` after each group.
        allow_unused_tensors: whether tensors of ``weights`` that no initializer takes are allowed.
        rss_sampler: returns the resident set size in bytes; then nothing else is consulted.

    Raises:
        WeightMismatchError: missing or unknown names, other element types or shapes.
        OptionsInUseError: the options belong to a model already.
        RamBudgetExceeded, RamProbeUnavailable: from the budget.
        ShardFormatError, LocalWeightsRequired, ExternalDataError, FileNotFoundError, OSError: model or weights are
            refused.
        DelayedInitializerError: a delayed node of the model cannot be used.
        TypeError, ValueError: an argument is none of the above.
    """
    _check_arguments(model, sess_options, weights, name_map, layers_per_group, progress)
    probe = PeakRamProbe(ram_budget, rss_sampler=rss_sampler)
    with claimed(sess_options), contextlib.ExitStack() as undo:
        undo.callback(probe.abandon)
        probe.start()
        source = _read_source(model, sess_options, weights, probe)
        assignments = _plan(source, name_map, allow_unused_tensors=allow_unused_tensors)
        binding = Binding(log_failures=True)
        undo.callback(binding.close)
        ready = _prepare(source, assignments, sess_options, binding, probe)
        # The protos are not needed any more; what stands inline would be in memory twice.
        del source, assignments
        probe.checkpoint("preparing the model")
        values = InstalledValues()
        undo.callback(values.close)
        copied = copy_weights(ready.tensors, layers_per_group, values, ready.identities, probe, progress)
        ready.bound.check_files()
        if rss_sampler is None:
            release_free_memory()  # what is free again must not count as resident when a session is built
        resident = max(probe.checkpoint("installing weights") - probe.report.baseline_rss_bytes, 0)
        peak = probe.stop()
        # Nothing may fail from here on, because it could not be undone.
        _commit(sess_options, values, ready)
        undo.pop_all()
    report = InstallReport(
        source=ready.origin,
        groups_loaded=copied.groups,
        tensors_loaded=len(ready.tensors),
        tensors_inlined=ready.tensors_inlined,
        bytes_copied=copied.nbytes,
        prepacking_disabled=_entry(sess_options, _PREPACKING_ENTRY) == "1",
        peak_ram=peak,
    )
    return InstalledModel(
        ready.model.serialized, sess_options, report, resident_bytes=resident, rss_sampler=rss_sampler
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """What is installed into what: the model's proto and directory, its path, the weight source, if any."""

    model: onnx.ModelProto
    directory: str
    path: Path | None
    weights: DiscoveredWeights | None


@dataclass(frozen=True, slots=True)
class _Ready:
    """All that is known before the first weight is copied: the model, what goes into values, and from which files."""

    model: InstallableModel
    tensors: tuple[TensorOnDisk, ...]
    tensors_inlined: int
    identities: Mapping[str, FileIdentity]
    origin: Path | None
    bound: BoundModel


def _check_arguments(
    model: object, options: object, weights: object, name_map: object, layers_per_group: object, progress: object
) -> None:
    if not isinstance(model, str | bytes | os.PathLike):
        raise TypeError(f"model must be a file name or a serialized model, found {type(model).__name__}")
    if not isinstance(options, onnxruntime.SessionOptions):
        raise TypeError(f"sess_options must be onnxruntime.SessionOptions, found {type(options).__name__}")
    if isinstance(layers_per_group, bool) or not isinstance(layers_per_group, int) or layers_per_group <= 0:
        raise ValueError(f"layers_per_group must be a positive whole number, found {layers_per_group!r}")
    if name_map is not None and weights is None:
        raise ValueError("name_map says which tensors of a weight source are taken: it needs weights=")
    if name_map is not None and not (isinstance(name_map, Mapping) or callable(name_map)):
        raise TypeError(f"name_map must be a mapping or callable, found {type(name_map).__name__}")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be callable, found {type(progress).__name__}")


def _read_source(
    model: str | bytes | os.PathLike[str],
    options: onnxruntime.SessionOptions,
    weights: str | os.PathLike[str] | None,
    probe: PeakRamProbe,
) -> _Source:
    path: Path | None = None
    if isinstance(model, bytes):
        # Where ONNX Runtime would look for the external data of a model given as bytes.
        directory = os.path.abspath(_entry(options, EXTERNAL_DIRECTORY_ENTRY) or "")
        try:
            proto = parse_model(model)
        except DecodeError as error:
            raise ShardFormatError(f"the bytes given as the model are not an ONNX model: {error}") from error
        fault = fault_in_texts(proto)
        if fault is not None:
            raise ShardFormatError(f"the bytes given as the model are not an ONNX model: {fault}")
    else:
        path = Path(os.path.abspath(model))
        directory = str(path.parent)
        try:
            proto = read_onnx_model(str(path), probe=probe)
        except RamBudgetExceeded:
            if weights is None:
                _refuse_inline_weights(str(path))  # which no budget could cure
            raise
    found = None if weights is None else discover_weights(local_source(weights), probe=probe)
    probe.checkpoint("reading the model")
    return _Source(proto, directory, path, found)


def _plan(source: _Source, name_map: NameMap | None, *, allow_unused_tensors: bool) -> tuple[Assignment, ...]:
    if source.weights is not None:
        return plan_from_weights(
            source.model,
            source.directory,
            source.weights,
            name_map,
            allow_unused_tensors=allow_unused_tensors,
            can_carry=can_carry,
        )
    assignments = plan_from_model(source.model, source.directory, can_carry=can_carry)
    if not assignments:
        raise InstallError(_NOTHING_EXTERNAL)
    return assignments


def _refuse_inline_weights(path: str) -> None:
    """Refuse a model file that has no external weights, without reading its large values."""
    with contextlib.suppress(NotAModelError, OSError), Skeleton(path) as skeleton:
        if not any(map(has_external_data, iter_initializers(skeleton.model.graph))):
            raise InstallError(_NOTHING_EXTERNAL)


def _prepare(
    source: _Source,
    assignments: Sequence[Assignment],
    options: onnxruntime.SessionOptions,
    binding: Binding,
    probe: PeakRamProbe,
) -> _Ready:
    identities = _check_files(source, assignments)
    assignments = _name_uniquely(source.model, assignments)
    inlined = [a for a in assignments if a.inline]
    tensors = tuple(a.source for a in assignments if not a.inline)
    _reserve_all(tensors, source.model, probe)
    put_inline(inlined, identities)
    model = prepare_for_installing(source.model, source.directory, assignments, options, binding)
    used = {os.path.realpath(a.source.path): identities[a.source.path] for a in assignments}
    bound = BoundModel(model_digest(model.serialized), binding if model.has_delayed_nodes else None, used)
    origin = source.path if source.weights is None else source.weights.source
    return _Ready(model, tensors, len(inlined), identities, origin, bound)


def _check_files(source: _Source, assignments: Sequence[Assignment]) -> dict[str, FileIdentity]:
    """The identity of each weight file, after every range has been found to lie inside its file."""
    own = [a.source for a in assignments if a.is_own]
    named_by = "the model" if source.path is None else f"'{source.path}'"
    identities = dict(check_ranges(own, within=confining_directories(source.directory), named_by=named_by))
    if source.weights is not None:
        identities |= source.weights.identities
    return identities


def _name_uniquely(model: onnx.ModelProto, assignments: Sequence[Assignment]) -> tuple[Assignment, ...]:
    make_names_unique(model, [(None if a.is_main else a.scope.graph, a.tensor) for a in assignments if not a.inline])
    return tuple(replace(a, source=replace(a.source, name=a.tensor.name)) for a in assignments)


def _reserve_all(installed: Sequence[TensorOnDisk], model: onnx.ModelProto, probe: PeakRamProbe) -> None:
    # All of it has to be resident in the end, so what cannot fit is refused before any weight is read.
    held = {place_of(t): t.nbytes for t in installed}
    for node in filter(is_delayed, iter_nodes(model.graph.node)):
        with contextlib.suppress(DelayedInitializerError):  # preparing says what is wrong with it
            attributes = read_attributes(node)
            if attributes.load_device == "cpu":
                held[attributes.filename, attributes.offset, attributes.element_type, attributes.shape] = (
                    attributes.nbytes
                )
    probe.reserve(sum(held.values()), f"planning to install {len(installed)} weights")


def _commit(options: onnxruntime.SessionOptions, values: InstalledValues, ready: _Ready) -> None:
    previous = _entry(options, EXTERNAL_DIRECTORY_ENTRY)
    if ready.model.external_directory is not None:
        # First, because ONNX Runtime may refuse it (entries have a greatest length), and it can be put back.
        options.add_session_config_entry(EXTERNAL_DIRECTORY_ENTRY, ready.model.external_directory)
    try:
        values.add_to(options)
    except OptionsSpoiledError:
        bind(options, replace(ready.bound, digest=b""))  # no model is theirs
        raise
    except BaseException:
        options.add_session_config_entry(EXTERNAL_DIRECTORY_ENTRY, previous)  # an empty entry is as good as none
        raise
    bind(options, ready.bound)
    if ready.bound.binding is not None:
        register_custom_ops(options)
        weakref.finalize(options, ready.bound.binding.close).atexit = False
    if _entry(options, _PREPACKING_ENTRY) == "":
        options.add_session_config_entry(_PREPACKING_ENTRY, "1")


def _entry(options: onnxruntime.SessionOptions, key: str) -> str:
    """A session config entry; empty where it is not set."""
    try:
        value: str = options.get_session_config_entry(key)
    except RuntimeError:
        return ""
    return value
