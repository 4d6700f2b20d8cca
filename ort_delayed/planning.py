"""``plan_session``: what a session under a RAM budget would keep and what would stream, without loading anything."""

from __future__ import annotations

import os

import onnxruntime

from ort_delayed.budgeted_source import prepare_budgeted
from ort_delayed.checking import unusable_files
from ort_delayed.loader import platform
from ort_delayed.loader.budget import RamBudget
from ort_delayed.loader.errors import ShardFormatError
from ort_delayed.loader.external_data import ExternalDataError
from ort_delayed.loader.layers import group_names
from ort_delayed.memory_plan import DelayedBytes, MemoryPlan
from ort_delayed.ops.errors import DelayedInitializerError
from ort_delayed.ops.kernel import Binding
from ort_delayed.session_estimate import estimated_plan

__all__ = ["group_labels", "plan_session"]


def plan_session(
    model: str | os.PathLike[str], ram_budget: RamBudget | int, *, weights_dir: str | os.PathLike[str] | None = None
) -> MemoryPlan:
    """The plan of ``InferenceSession(model, ram_budget=ram_budget)``, with an estimate of what ONNX Runtime takes.

    No session is made and no weight is read, but payloads of ``cpu`` delayed nodes are. Activations are counted as
    nothing: they are known after a run, see ``InferenceSession.memory_plan``.

    Args:
        model: the model file.
        ram_budget: the budget; one that is too small gives a plan with a higher ``least_budget_bytes``.
        weights_dir: as for ``InferenceSession``.

    Raises:
        NotAModelError, ExternalDataError, DelayedInitializerError, OSError: as for constructing the session.
        PackedModelError: the model was packed for another machine and cannot be used here.
        ExternalDataError: also where a file of weights is missing or cut, as ``check_weights`` says it.
    """
    budget = RamBudget.of(ram_budget)
    directory = None if weights_dir is None else os.path.abspath(weights_dir)
    binding, by_page = Binding(), platform.PageByPage()
    try:
        options = onnxruntime.SessionOptions()
        try:
            source = prepare_budgeted(model, options, binding, budget, lambda group: None, weights_dir=directory)
        except DelayedInitializerError:
            raise
        except (OSError, ShardFormatError):
            _refuse_unusable_files(model, weights_dir)
            raise
        _refuse_unusable_files(model, weights_dir)
        delayed = DelayedBytes.of(binding.sources())
        return estimated_plan(source, budget.max_bytes, delayed, can_map_by_page=by_page.works)
    finally:
        by_page.close()
        binding.close()


def _refuse_unusable_files(model: str | os.PathLike[str], weights_dir: str | os.PathLike[str] | None) -> None:
    faults = unusable_files(model, weights_dir=weights_dir)
    if faults:
        raise ExternalDataError("; ".join(faults))


def group_labels(plan: MemoryPlan) -> tuple[str, ...]:
    """The layers that each group of a plan is about, by the names of its weights: ``"layer-0003"``, ``"val_79"``."""
    # What a packed model reads of a weight is named after it, with the buffer behind a space.
    names = [[name.split(" ")[0] for name in (*group.weights, group.tick or "")] for group in plan.groups]
    layer_of = {n: layer for layer, own in group_names({n for group in names for n in group if n}) for n in own}
    return tuple(_most_frequent([layer_of[n] for n in group if n]) for group in names)


def _most_frequent(layers: list[str]) -> str:
    # Exporters rename most weights; a numbered layer says more than such a name, however few of its tensors are left.
    numbered = [layer for layer in layers if "layer-" in layer]
    chosen = numbered or layers
    return max(chosen, key=chosen.count, default="")
