"""`StreamingWeightLoader`: weights from disk to a callback, one layer group at a time, under an enforced RAM budget."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ort_delayed.loader import platform
from ort_delayed.loader.budget import RamBudget
from ort_delayed.loader.layers import LayerGroup, LayerGroupSpec, group_tensors
from ort_delayed.loader.mapping import StreamedLayerGroup, map_group, ranges_of
from ort_delayed.loader.probe import PeakRamProbe, PeakRamReport, RssSampler
from ort_delayed.loader.sources import DiscoveredWeights, discover_weights, local_source

__all__ = ["LoadPlan", "LoadProgress", "StreamingLoadReport", "StreamingWeightLoader", "make_plan"]


@dataclass(frozen=True)
class StreamingLoadReport:
    """What one streaming run did, also one that failed.

    Attributes:
        source: the index, file or directory that was read.
        source_format: ``"safetensors"``, ``"onnx-external-data"``, or ``"undiscovered"`` if the run did not get
            that far.
        groups_loaded: groups that were mapped.
        tensors_loaded: tensors in them.
        bytes_mapped: the sum of those tensors' sizes.
        peak_ram: resident memory, the loader's plan included.
    """

    source: Path
    source_format: str
    groups_loaded: int
    tensors_loaded: int
    bytes_mapped: int
    peak_ram: PeakRamReport


@dataclass(frozen=True)
class LoadProgress:
    """How far a run is, after each group.

    Attributes:
        group: the group that has just been released.
        groups_done: groups so far, of ``groups_total``.
        bytes_done: tensor bytes so far, of ``bytes_total``.
        current_rss_bytes: resident set size now.
        peak_rss_bytes: its highest value since the run started.
    """

    group: LayerGroupSpec
    groups_done: int
    groups_total: int
    bytes_done: int
    bytes_total: int
    current_rss_bytes: int
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a source holds, in groups, and the resident bytes that knowing it takes."""

    weights: DiscoveredWeights
    groups: tuple[LayerGroup, ...]
    retained_bytes: int


def make_plan(source: Path, probe: PeakRamProbe, *, layers_per_group: int = 1) -> LoadPlan:
    """Discover ``source`` (from :func:`~ort_delayed.loader.sources.local_source`) and group its tensors.

    Args:
        source: the source.
        probe: a probe started for this, whose budget discovery has to fit.
        layers_per_group: how many consecutive layers make a group.
    """
    before = probe.checkpoint("starting discovery")
    weights = discover_weights(source, probe=probe)
    groups = group_tensors(weights.tensors, layers_per_group)
    # What was parsed and is free again must not count as retained, nor be missing when the first group is mapped.
    platform.release_free_memory()
    after = probe.checkpoint(f"planning the layer groups of '{source}'")
    return LoadPlan(weights, groups, max(after - before, 0))


class StreamingWeightLoader:
    """Streams local sharded weights to a callback under a measured budget of incremental resident memory.

    Args:
        source: a ``.safetensors`` file, a ``.safetensors.index.json``, an ``.onnx`` model with external data, or a
            directory with one of them.
        ram_budget: bytes of resident memory that streaming may add to the process, or a :class:`RamBudget`.
        ram_budget_bytes: the same in bytes; exactly one of the two is given.
        layers_per_group: how many consecutive layers are mapped together; positive.
        rss_sampler: returns the resident set size in bytes; then nothing else is consulted.

    Attributes:
        source: the resolved source.
        ram_budget: the budget.
        layers_per_group: as given.
        last_report: the report of the last run, also of one that failed; None before the first.

    Raises:
        ValueError: no budget or two, a budget or ``layers_per_group`` that is not a positive whole number.
        LocalWeightsRequired: the source is a URL or a repository id.
        FileNotFoundError: there is no such source.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        ram_budget: RamBudget | int | None = None,
        ram_budget_bytes: RamBudget | int | None = None,
        layers_per_group: int = 1,
        rss_sampler: RssSampler | None = None,
    ) -> None:
        given = [b for b in (ram_budget, ram_budget_bytes) if b is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of ram_budget and ram_budget_bytes is needed, found {len(given)}")
        if isinstance(layers_per_group, bool) or not isinstance(layers_per_group, int) or layers_per_group <= 0:
            raise ValueError(f"layers_per_group must be a positive whole number, found {layers_per_group!r}")
        self.ram_budget = RamBudget.of(given[0])
        self.source = local_source(source)
        self.layers_per_group = layers_per_group
        self.last_report: StreamingLoadReport | None = None
        self._rss_sampler = rss_sampler
        self._plan: LoadPlan | None = None

    @property
    def plan(self) -> LoadPlan:
        """What the source holds; discovered once, within the budget, without reading weights.

        Raises:
            ShardFormatError, LocalWeightsRequired, FileNotFoundError, OSError: the source is refused.
            RamBudgetExceeded, RamProbeUnavailable: from the budget.
        """
        if self._plan is None:
            self._plan = self._discover(self._probe())
        return self._plan

    @property
    def layer_groups(self) -> tuple[LayerGroupSpec, ...]:
        """The groups in the order in which they are streamed; see :attr:`plan` for errors."""
        return tuple(group.spec for group in self.plan.groups)

    @property
    def source_format(self) -> str:
        """``"safetensors"`` or ``"onnx-external-data"``; see :attr:`plan` for errors."""
        return self.plan.weights.source_format

    def stream(
        self,
        consumer: Callable[[StreamedLayerGroup], Any],
        *,
        progress: Callable[[LoadProgress], Any] | None = None,
    ) -> StreamingLoadReport:
        """Call ``consumer`` with each group, and return the report.

        A group's arrays are views of mapped files that end with the callback: copy what is needed later.

        Args:
            consumer: takes a :class:`StreamedLayerGroup`; what it returns is ignored.
            progress: called after each group.

        Raises:
            TypeError: ``consumer`` or ``progress`` cannot be called.
            BufferReleaseError: the consumer kept a view.
            RamBudgetExceeded, RamProbeUnavailable: from the budget.
            ShardFormatError, LocalWeightsRequired, FileNotFoundError, OSError: the source is refused.
            BaseException: whatever the consumer raises, as the same object.
        """
        if not callable(consumer):
            raise TypeError(f"consumer must be callable, found {type(consumer).__name__}")
        groups = self._groups(progress)
        for group in groups:
            try:
                consumer(group)
            except BaseException as error:
                group.abandon(error)
                # Not thrown into the generator, which cannot let every exception through (StopIteration).
                groups.close()
                raise
        assert self.last_report is not None
        return self.last_report

    def load(
        self,
        consumer: Callable[[StreamedLayerGroup], Any],
        *,
        progress: Callable[[LoadProgress], Any] | None = None,
    ) -> StreamingLoadReport:
        """The same as :meth:`stream`."""
        return self.stream(consumer, progress=progress)

    def iter_layer_groups(
        self, *, progress: Callable[[LoadProgress], Any] | None = None
    ) -> Iterator[StreamedLayerGroup]:
        """Yield one group at a time; it is released when the next is asked for, or by its own ``release()``.

        A variable of the loop body that still refers to a view then is a view that is held. Arguments and errors are
        those of :meth:`stream`.
        """
        return self._groups(progress)

    def _probe(self) -> PeakRamProbe:
        return PeakRamProbe(self.ram_budget, rss_sampler=self._rss_sampler)

    def _discover(self, probe: PeakRamProbe) -> LoadPlan:
        # What is free already must not be given back in between, and make the plan look smaller than it is.
        platform.release_free_memory()
        with probe:
            return make_plan(self.source, probe, layers_per_group=self.layers_per_group)

    def _groups(self, progress: Callable[[LoadProgress], Any] | None) -> Generator[StreamedLayerGroup, None, None]:
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be callable, found {type(progress).__name__}")
        return self._run(progress)

    def _run(self, progress: Callable[[LoadProgress], Any] | None) -> Generator[StreamedLayerGroup, None, None]:
        self.last_report = None
        done = _Done()
        probe = self._probe()
        try:
            if self._plan is None:
                # Discovery has a baseline of its own; if it fails, its measurements are the report's.
                self._plan = self._discover(probe)
                probe = self._probe()
            plan = self._plan
            probe.start(charged_bytes=plan.retained_bytes)
            self._reserve_largest(plan, probe)
            bytes_total = sum(g.spec.mapped_bytes for g in plan.groups)
            for group in plan.groups:
                yield from self._one(plan, group, probe, done)
                current = probe.checkpoint(f"releasing layer group '{group.spec.name}'")
                if progress is not None:
                    counts = (done.groups, len(plan.groups), done.nbytes, bytes_total)
                    progress(LoadProgress(group.spec, *counts, current, probe.report.peak_rss_bytes))
            probe.stop()
        finally:
            probe.abandon()
            if probe.started:
                self.last_report = self._report(done, probe.report)

    def _one(
        self, plan: LoadPlan, group: LayerGroup, probe: PeakRamProbe, done: _Done
    ) -> Generator[StreamedLayerGroup, None, None]:
        name = group.spec.name
        probe.reserve(self._needs(group), f"mapping layer group '{name}'")
        mapped = map_group(group, identities=plan.weights.identities, within=plan.weights.within)
        done.add(group.spec)
        try:
            probe.checkpoint(f"mapping layer group '{name}'")
            yield mapped
            probe.checkpoint(f"applying layer group '{name}'")
        except BaseException as error:
            mapped.abandon(error)
            raise
        mapped.release()

    def _reserve_largest(self, plan: LoadPlan, probe: PeakRamProbe) -> None:
        # A group that can never fit is refused before any weight is read, not when its turn comes.
        largest = max(plan.groups, key=self._needs)
        probe.reserve(self._needs(largest), f"planning to map the largest layer group, '{largest.spec.name}'")

    def _needs(self, group: LayerGroup) -> int:
        # Resident memory comes in whole pages; a sampler of the caller's counts in what units it will.
        if self._rss_sampler is not None:
            return group.spec.mapped_bytes
        return sum(r.nbytes for r in ranges_of(group.tensors))

    def _report(self, done: _Done, peak: PeakRamReport) -> StreamingLoadReport:
        weights = self._plan.weights if self._plan is not None else None
        return StreamingLoadReport(
            source=weights.source if weights is not None else self.source,
            source_format=weights.source_format if weights is not None else "undiscovered",
            groups_loaded=done.groups,
            tensors_loaded=done.tensors,
            bytes_mapped=done.nbytes,
            peak_ram=peak,
        )


@dataclass(slots=True)
class _Done:
    """Running counts of one run."""

    groups: int = 0
    tensors: int = 0
    nbytes: int = 0

    def add(self, spec: LayerGroupSpec) -> None:
        self.groups += 1
        self.tensors += len(spec.tensor_names)
        self.nbytes += spec.mapped_bytes
