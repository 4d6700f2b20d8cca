"""What a session under a RAM budget is made from: which weights stay in their files, which pace the run, in what order.

Nothing here measures or gives up memory; :mod:`ort_delayed.budget_keeper` does that with what comes out.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx
import onnxruntime

from ort_delayed.clock import install_clock
from ort_delayed.loader.budget import RamBudget, format_bytes
from ort_delayed.loader.errors import ShardFormatError
from ort_delayed.loader.external_data import external_tensor, has_external_data, set_external_data
from ort_delayed.loader.model_texts import parse_model
from ort_delayed.loader.tensor_on_disk import TensorOnDisk, cut_off
from ort_delayed.memory_plan import PlannedWeight, cut_into_groups, sizes_of_groups
from ort_delayed.model_source import refuse_optimized_model, serialized
from ort_delayed.ops.kernel import Binding
from ort_delayed.pacing import possible_paces, possible_ticks
from ort_delayed.packed_source import accept_packed, all_packed_ranges, read_ranges
from ort_delayed.preparing import prepare
from ort_delayed.skeletons import Skeleton
from ort_delayed.use_order import WeightUse, order_of_use, scoped_initializers

__all__ = ["BudgetedSource", "ModelNotSuitedError", "prepare_budgeted"]

# Smaller weights are not worth a system call: they stay once they have been read.
_LEAST_MAPPED_BYTES = 64 << 10
# ONNX Runtime gets what is inline as bytes, parses them, and makes tensors of them.
_COPIES_OF_INLINE = 4
# ConstantFolding computes what hangs on weights alone (a Transpose, a Cast) once, and keeps the result in memory
# instead of the mapped weight; the others write changed weights. (What goes beyond ORT_ENABLE_EXTENDED does too.)
_REPLACING_OPTIMIZERS = ("ConstantFolding", "MatmulTransposeFusion", "TransposeOptimizer")
_NCHWC_READERS = {"Conv", "ConvTranspose"}


class ModelNotSuitedError(ValueError):
    """A model cannot run under this RAM budget as it is; the message says what to do to it."""


@dataclass(frozen=True, slots=True)
class BudgetedSource:
    """What ONNX Runtime gets, and what is known of it.

    Attributes:
        model: serialized, with handles of the binding.
        external_directory: what its external data's locations are relative to; None where it has none.
        tensors: the weights that stay in their files; names as in :class:`WeightUse`, real paths.
        weights: the same, in order of first use, for the plan.
        groups: what a run uses when: pairs of tick and names of weights.
        disabled_optimizers: optimizers that would put copies of mapped weights into memory.
        packed: whether kernels read packed weights from the files; None where the model is no packed one, which has
            been optimised already.
        packed_ranges: all ranges of packed bytes, also those that are too small to be among the tensors.
    """

    model: bytes
    external_directory: str | None
    tensors: tuple[TensorOnDisk, ...]
    weights: Mapping[str, PlannedWeight]
    groups: tuple[tuple[str | None, tuple[str, ...]], ...]
    disabled_optimizers: tuple[str, ...]
    packed: bool | None = None
    packed_ranges: tuple[TensorOnDisk, ...] = ()


def prepare_budgeted(
    source: str | bytes | os.PathLike[str],
    options: onnxruntime.SessionOptions,
    binding: Binding,
    budget: RamBudget,
    on_tick: Callable[[int], None],
    *,
    weights_dir: str | None = None,
) -> BudgetedSource:
    """Prepare a model for a session under a budget.

    Inline weights of a model file stay in that file, as external ones in theirs. Those of a model given as bytes count.

    Args:
        source: file name or serialized model.
        options: refused where they write the optimized model.
        binding: gets the payloads of delayed nodes and ticks.
        budget: groups are cut to its measure.
        on_tick: is called with the number of the group that a run has come to.
        weights_dir: as for ``InferenceSession``.

    Raises:
        ModelNotSuitedError: a model given as bytes has so many inline weights that they do not fit into the budget.
        NotAModelError, DecodeError: the source is no ONNX model in protobuf form.
        DelayedInitializerError, ExternalDataError, OSError: as for a session without a budget.
    """
    refuse_optimized_model(options)
    if isinstance(source, bytes):
        if len(source) * (_COPIES_OF_INLINE - 1) > budget.max_bytes:
            raise ModelNotSuitedError(
                f"the model was given as {format_bytes(len(source))} of bytes, of which ONNX Runtime makes copies; "
                f"that does not fit into a RAM budget of {format_bytes(budget.max_bytes)}. Give it by its path, or "
                "move its weights to external data (onnx.save_model(..., save_as_external_data=True), or "
                "ort_delayed.convert_model)"
            )
        model = parse_model(source)
        directory = os.path.abspath(weights_dir or "")
        return _prepared(model, directory, budget, binding, on_tick, weights_dir, None)
    with Skeleton(source) as skeleton:
        for tensor in (t for _, t in scoped_initializers(skeleton.model.graph)):
            lifted = skeleton.lifted(tensor)
            if lifted is not None and lifted.range.nbytes >= _LEAST_MAPPED_BYTES:
                name = os.path.basename(skeleton.path)
                set_external_data(tensor, name, lifted.range.offset, lifted.range.nbytes)
        return _prepared(skeleton.model, skeleton.directory, budget, binding, on_tick, weights_dir, skeleton)


def _prepared(
    model: onnx.ModelProto,
    directory: str,
    budget: RamBudget,
    binding: Binding,
    on_tick: Callable[[int], None],
    weights_dir: str | None,
    skeleton: Skeleton | None,
) -> BudgetedSource:
    packed = accept_packed(model, directory)
    model_file = None if skeleton is None else skeleton.path
    made = prepare(model, binding, model_directory=directory, weights_dir=weights_dir, model_file=model_file)
    model, external_directory = made.model, made.external_directory
    tensors = {
        name: _on_disk(name, tensor, external_directory)
        for name, tensor in scoped_initializers(model.graph)
        if has_external_data(tensor)
    }
    for path in dict.fromkeys(t.path for t in tensors.values()):
        if not os.path.exists(path):
            whose = "given as bytes" if model_file is None else repr(model_file)
            raise FileNotFoundError(errno.ENOENT, f"the model {whose} needs a data file that is not there", path)
        cut = cut_off(path, os.stat(path).st_size, [t for t in tensors.values() if t.path == path])
        if cut is not None:
            raise ShardFormatError(f"{cut}. Was a download or a copy interrupted?")
    uses = order_of_use(model.graph)
    initializers = {name: name for name in tensors}
    if packed:
        read = read_ranges(uses, tensors, dict(scoped_initializers(model.graph)))
        uses, tensors, initializers = read.uses, dict(read.ranges), dict(read.weights)
    possible = possible_ticks(model.graph)
    mapped = {n: t.nbytes for n, t in tensors.items() if t.nbytes >= _LEAST_MAPPED_BYTES and n not in possible}
    least_bytes, most_bytes = sizes_of_groups(budget.max_bytes, sum(mapped.values()))
    replaced = _replaced_bytes(model.graph, mapped, tensors)
    leaves_out = replaced > budget.max_bytes // 16 and packed is None
    large = {initializers[name] for name in mapped}
    by_weight = possible_paces(model, large, is_optimized=packed is not None, at_most_extended=leaves_out)
    # Of a weight that was packed into several buffers the first that is read: one node can wait for one tick.
    first = {initializers[use.weight]: use.weight for use in reversed(uses) if use.weight in initializers}
    paces = {first[weight]: pace for weight, pace in by_weight.items() if weight in first}
    groups = cut_into_groups(uses, mapped, possible, paces, least_bytes=least_bytes, most_bytes=most_bytes)
    ticks = {tick: lambda number=number: on_tick(number) for number, (tick, _) in enumerate(groups) if tick is not None}
    install_clock(model, ticks, binding, external_directory, paces)
    if skeleton is not None:
        skeleton.model = model
    return BudgetedSource(
        model.SerializeToString() if skeleton is None else serialized(skeleton),
        external_directory,
        tuple(t for n, t in tensors.items() if n in mapped),
        _weights(uses, mapped),
        groups,
        _REPLACING_OPTIMIZERS if leaves_out else (),
        packed,
        all_packed_ranges(model, external_directory or "") if packed else (),
    )


def _on_disk(name: str, tensor: onnx.TensorProto, directory: str | None) -> TensorOnDisk:
    found = external_tensor(tensor, directory or "")
    path = os.path.realpath(found.path)
    return TensorOnDisk(name, path, found.offset, found.nbytes, found.shape, found.element_type)


def _weights(uses: tuple[WeightUse, ...], mapped: Mapping[str, int]) -> dict[str, PlannedWeight]:
    read_whole = {use.weight for use in uses if not use.by_rows}
    ordered = dict.fromkeys(use.weight for use in uses if use.weight in mapped)
    return {name: PlannedWeight(name, mapped[name], name not in read_whole) for name in ordered}


def _replaced_bytes(graph: onnx.GraphProto, mapped: Mapping[str, int], tensors: Mapping[str, TensorOnDisk]) -> int:
    """Bytes of mapped weights that optimizers would replace by computed ones in memory, as far as can be foreseen."""
    constants = {t.name for t in graph.initializer} - {v.name for v in graph.input}
    replaced: set[str] = set()
    for node in graph.node:
        reads = [name for name in node.input if name]
        if reads and constants.issuperset(reads):
            constants.update(node.output)
            replaced.update(name for name in reads if name in mapped)
        if node.op_type in _NCHWC_READERS:
            replaced.update(name for name in reads[1:2] if name in mapped)
    # ONNX Runtime has few float16 kernels on a CPU: it casts such weights, and folds the casts.
    replaced.update(name for name in mapped if tensors[name].element_type.name == "float16")
    return sum(mapped[name] for name in replaced)
