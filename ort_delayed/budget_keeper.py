"""Keeping one session to its RAM budget: the measuring, the pager, the watcher and the checks, put together.

The bound is checked against the kernel's own high-water mark after construction and after each run; what counts is
said in :mod:`ort_delayed.memory_use`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import onnxruntime

from ort_delayed.budgeted_source import prepare_budgeted
from ort_delayed.construction_options import building_in_place
from ort_delayed.construction_relief import ConstructionRelief
from ort_delayed.loader import platform
from ort_delayed.loader.budget import RamBudget, RamBudgetExceeded, RamProbeUnavailable, format_bytes
from ort_delayed.memory_plan import DelayedBytes, MemoryPlan
from ort_delayed.memory_report import MemoryReport, RunMemory
from ort_delayed.memory_use import MemoryUse, RunPeak
from ort_delayed.ops.kernel import Binding
from ort_delayed.packed_mappings import ONE_CONSTRUCTION
from ort_delayed.packed_source import optimized_already
from ort_delayed.paged_weights import PagedWeights
from ort_delayed.pager import PagerCounts
from ort_delayed.run_turns import RunTurns
from ort_delayed.runs_under_way import RunsUnderWay, RunUnderWay
from ort_delayed.session_estimate import estimated_plan
from ort_delayed.watcher import Watcher

__all__ = ["BudgetKeeper"]

_MIB = 1 << 20
_SHRINKAGE_ENTRY = "memory.enable_memory_arena_shrinkage"
# How fast memory can grow, per core and second; with it goes how often the watcher looks. Pages of weights come as fast
# as a core reads. Pages of activations must be cleared first.
_READ_PER_CORE, _CLEARED_PER_CORE = 15 << 30, 4 << 30
_SHORTEST_SLEEP, _LONGEST_SLEEP = 0.0005, 0.01
_WORTH_A_NEW_PLAN = _MIB
_CONSTRUCTING, _RUNNING = "constructing the session", "running the model"
_RUN_ADVICE = "It may need more still: activations grow with the inputs, smaller batches or sequences need less"
_T = TypeVar("_T")


class BudgetKeeper:
    """Keeps one session to its budget. The session's owner closes it *before* ONNX Runtime's session goes.

    Args:
        budget: the budget.
        drop_page_cache: whether pages that are given up are dropped from the page cache too; None: while the memory
            available to the process is less than the mapped weights.
        options_are_private: whether nobody but the session uses its SessionOptions.

    Raises:
        RamProbeUnavailable: resident memory cannot be measured, or pages cannot be given up here.
    """

    def __init__(
        self, budget: RamBudget | int, *, drop_page_cache: bool | None = None, options_are_private: bool = False
    ) -> None:
        self.budget = RamBudget.of(budget)
        if not platform.can_give_up_pages():
            raise RamProbeUnavailable(
                "a RAM budget for a session needs a system on which the pages of mapped files can be given up (Linux)"
            )
        self._weights: PagedWeights | None = None
        self._use = MemoryUse(self.budget.max_bytes, _weak(self, BudgetKeeper._mapped_bytes, 0))
        self._construction = self._use.begin()
        self._report = MemoryReport(self.budget.max_bytes, self._use.baseline)
        self._wants_drop_page_cache = drop_page_cache
        self._options_are_private = options_are_private
        self._turns = RunTurns()
        self._runs = RunsUnderWay()
        self._lock = threading.Lock()  # of the report and the plan
        self._delayed = DelayedBytes()
        self._packing_bytes = 0
        self._expected_bytes = 0
        self._plan: MemoryPlan | None = None
        self._is_built = False
        self._is_paced = False
        self._earlier: frozenset[platform.FileMapping] = frozenset()
        self._relief: ConstructionRelief | None = None
        self._building_lock = threading.Lock()
        self._mark = self.budget.max_bytes - min(48 * _MIB, self.budget.max_bytes // 4)
        self._watcher = Watcher(_weak(self, BudgetKeeper.look, _LONGEST_SLEEP), _weakly_failed(self))
        _keepers.add(self)

    # --- Construction -------------------------------------------------------------------------------------------------

    def prepare(
        self,
        source: str | bytes | os.PathLike[str],
        options: onnxruntime.SessionOptions,
        binding: Binding,
        weights_dir: str | None,
    ) -> tuple[bytes, str | None]:
        """Prepare the model (see :func:`prepare_budgeted`) and open the files that its weights stay in.

        Returns:
            What to give to ONNX Runtime, and the directory of its external data.
        """
        if self._plan is not None:  # the session is made again
            self._construction = self._use.begin()
        kept = weakref.ref(self)

        def on_tick(group: int) -> None:
            keeper = kept()
            if keeper is not None:
                keeper._on_tick(group)

        prepared = prepare_budgeted(source, options, binding, self.budget, on_tick, weights_dir=weights_dir)
        weights = PagedWeights(
            replace(prepared, model=b""),
            self.budget.max_bytes,
            self._use.now,
            drop_page_cache=self._wants_drop_page_cache,
        )
        if self._weights is not None:
            self._is_built, self._earlier = False, self._weights.mappings
            self._weights.close()
        self._weights = weights
        self._delayed = DelayedBytes.of(binding.sources())
        # What budget would do, to be able to say so where this one does not.
        expected = estimated_plan(prepared, self.budget.max_bytes, self._delayed, can_map_by_page=True)
        self._packing_bytes, self._expected_bytes = expected.construction_bytes, expected.least_budget_bytes
        return prepared.model, prepared.external_directory

    def session_arguments(self, providers: Sequence[object] | None, arguments: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments for onnxruntime.InferenceSession: those given, and what the prepared model needs.

        Raises:
            ValueError: another provider than the CPU's is asked for; its memory cannot be given up.
        """
        names = [p[0] if isinstance(p, tuple) else p for p in providers or ()]
        if any(name != "CPUExecutionProvider" for name in names):
            raise ValueError(f"a session under a RAM budget runs on CPUExecutionProvider, asked for was {names}")
        assert self._weights is not None
        disabled = [*arguments.get("disabled_optimizers", ()), *self._weights.source.disabled_optimizers]
        # A second attempt, with other providers, would only print a banner.
        return {"enable_fallback": 0} | arguments | ({"disabled_optimizers": disabled} if disabled else {})

    @contextmanager
    def constructing(self, options: onnxruntime.SessionOptions) -> Iterator[None]:
        """While ONNX Runtime builds the session: the settings that leave weights mapped, and the watcher.

        Raises:
            RamBudgetExceeded: the session does not fit into the budget.
            ModelNotSuitedError: ONNX Runtime put copies of mapped weights into memory.
            AmbiguousMappingsError: another session on the same file was constructed at the same time.
        """
        assert self._weights is not None
        source, files = self._weights.source, self._weights.files
        # Mappings are told apart by what is new, so two constructions must not overlap.
        optimized = nullcontext() if source.packed is None else optimized_already(options)
        # Each kernel packs its weight, looks whether the file has the same, and frees what it has packed. Up to ONNX
        # Runtime 1.30 no thread can see to that memory, or to anything: the interpreter's lock is held meanwhile.
        packing = platform.large_blocks_go_back() if source.packed_ranges else nullcontext()
        in_place = building_in_place(
            options,
            prepacking=bool(source.packed),
            at_most_extended=bool(source.disabled_optimizers),
            are_private=self._options_are_private,
        )
        self._turns.is_parallel = options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
        with ONE_CONSTRUCTION, in_place, optimized, packing:
            before = frozenset(platform.file_mappings(files.paths))

            def cancel() -> None:
                options.set_load_cancellation_flag(True)

            run = RunUnderWay(self._construction, cancel)
            self._relief = ConstructionRelief(
                source.tensors,
                {t.name for t in source.packed_ranges},
                files,
                budget_bytes=self.budget.max_bytes,
                mark_bytes=self._mark,
                used_bytes=self._use.now,
                by_page=self._weights.by_page,
                before=before,
            )
            self._mark = self._relief.mark_bytes
            is_cancelled = False
            try:
                with self._runs.registered(run), self._watched():
                    yield
                is_cancelled = run.failure is not None
                run.raise_failure()
            except Exception as error:
                is_cancelled = is_cancelled or run.failure is not None
                run.raise_failure(error)
                raise
            finally:
                with self._building_lock:  # from here on ONNX Runtime may unmap what it likes
                    self._relief = None
                if is_cancelled or run.failure is not None:
                    options.set_load_cancellation_flag(False)
            self._weights.adopt(before, self._earlier)
            self._is_built = True
            self._check_construction(self._weights)

    def _check_construction(self, weights: PagedWeights) -> None:
        """Make the plan from what the session has taken, and refuse a session that does not fit."""
        platform.release_free_memory()  # else what construction has freed would be taken for the session's
        session_bytes = max(self._use.now(), 0)
        peak, how = self._construction.read()
        self._packing_bytes = min(self._packing_bytes, peak)
        self._replan(weights, session_bytes, 0)
        self._report = replace(
            self._report,
            construction_peak_bytes=peak,
            peak_bytes=max(peak, self._report.peak_bytes),
            peak_source=how,
            drops_page_cache=weights.look_at_system(),
        )
        self._check_peak(peak, self._construction, _CONSTRUCTING)
        if self.plan.least_budget_bytes > self.budget.max_bytes:
            raise RamBudgetExceeded(
                budget_bytes=self.budget.max_bytes,
                observed_bytes=session_bytes,
                requested_bytes=self.plan.least_budget_bytes - session_bytes,
                operation=_CONSTRUCTING,
                advice=self._advice(self.plan.least_budget_bytes),
            )
        self._use.end(self._construction)

    def _check_peak(self, peak: int, measured: RunPeak, operation: str) -> None:
        # The kernel's mark is the process's: where other sessions ran meanwhile, all of them together are bound.
        if peak > self.budget.max_bytes + sum(measured.beside.values()):
            raise self._exceeded(peak, operation)

    def _exceeded(self, observed: int, operation: str) -> RamBudgetExceeded:
        return RamBudgetExceeded(
            budget_bytes=self.budget.max_bytes,
            observed_bytes=observed,
            operation=operation,
            advice=self._advice(observed) if operation == _CONSTRUCTING else _RUN_ADVICE,
        )

    def _advice(self, needed: int) -> str:
        enough = max(self._expected_bytes, needed) * 5 // 4
        return f"About {format_bytes(enough)} should do; 'ort-delayed plan' says what they are needed for"

    def _replan(self, weights: PagedWeights, session_bytes: int, activations_bytes: int) -> None:
        plan = self._plan = weights.replan(session_bytes, activations_bytes, self._delayed, self._packing_bytes)
        # Where every group fits, a tick may fill memory up to the limit without waking the watcher.
        self._is_paced = all(group.nbytes <= plan.room_bytes for group in plan.groups)
        self._mark = plan.budget_bytes - plan.headroom_bytes + (plan.headroom_bytes // 4 if self._is_paced else 0)

    @staticmethod
    def configure_run(options: onnxruntime.RunOptions) -> None:
        """What a run under a budget needs of its options: memory of activations goes back when it is over.

        Otherwise a run whose activations do not fit would leave them in the arena, and no later run would fit.
        """
        options.add_run_config_entry(_SHRINKAGE_ENTRY, "cpu:0")

    # --- Runs ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self, cancel: Callable[[], None]) -> Iterator[None]:
        """A run is under way, when its turn has come. ``cancel`` ends it before its time, from any thread.

        Raises:
            RuntimeError: as :meth:`RunTurns.turn` says.
            MappedFileChanged: before anything is touched, or after a run during which a file was rewritten.
            RamBudgetExceeded: the budget was exceeded; the run was ended, or its results are not handed out.
        """
        assert self._weights is not None
        with self._turns.turn(), self._running_alone(cancel, self._weights):
            yield

    @contextmanager
    def _running_alone(self, cancel: Callable[[], None], weights: PagedWeights) -> Iterator[None]:
        weights.files.check_unchanged()
        run = RunUnderWay(self._use.begin(), cancel)
        try:
            drops = weights.look_at_system()
            with self._lock:
                self._report = replace(self._report, drops_page_cache=drops)
            with self._runs.registered(run):
                weights.pager.begin()
                self._start_watcher()
                before = replace(weights.pager.counts)
                try:
                    yield
                finally:
                    self._watcher.stop()
                    peak = self._note_run(run.peak, weights, before)
        except Exception as error:
            run.raise_failure(error)
            raise
        finally:
            self._use.end(run.peak)
        run.raise_failure()
        self._check_peak(peak, run.peak, _RUNNING)
        weights.files.check_not_rewritten()  # a file that was, has given the run a mixture

    def _start_watcher(self) -> None:
        try:
            self._watcher.start()
        except RuntimeError as error:  # the system has no thread left
            raise RamProbeUnavailable(
                f"the thread that watches memory cannot be started ({error}), so the RAM budget cannot be kept"
            ) from error

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self._start_watcher()
        try:
            yield
        finally:
            self._watcher.stop()

    def _note_run(self, measured: RunPeak, weights: PagedWeights, before: PagerCounts) -> int:
        """Enter a run that is over into the report, and its activations into the plan; returns its peak."""
        peak, how = measured.read()
        with self._lock:
            now, plan = weights.pager.counts, self.plan
            last = RunMemory(
                peak,
                now.dropped_bytes - before.dropped_bytes,
                now.refetched_bytes - before.refetched_bytes,
                now.ticks - before.ticks,
                now.reliefs - before.reliefs,
            )
            self._report = replace(
                self._report,
                peak_bytes=max(peak, self._report.peak_bytes),
                peak_source=how,
                runs=self._report.runs + 1,
                last_run=last,
            )
            activations = weights.pager.most_other_bytes - plan.session_bytes
            # What other sessions' runs took meanwhile cannot be told from activations, and would stick.
            if not measured.beside and activations > plan.activations_bytes + _WORTH_A_NEW_PLAN:
                self._replan(weights, plan.session_bytes, activations)
        return peak

    def _on_tick(self, group: int) -> None:
        assert self._weights is not None
        self._runs.raise_any_failure()
        self._weights.pager.tick(group)

    def look(self) -> float:
        """For the watcher: make room where little is left; returns the seconds until the next look."""
        if self._is_built and self._weights is not None:
            used = self._weights.pager.relieve(self._mark)
        else:
            used = self._use.now()
            if used > self._mark:
                with self._building_lock:
                    if self._relief is not None:
                        self._relief.relieve()
                used = self._use.now()
        if used > self.budget.max_bytes:
            self._fail_unless_shared(used)
        # Where every group fits, room for its weights was made at the tick: only activations can come as a surprise.
        # A look takes time from a core that computes, so it is not taken more often than that demands.
        distance, rate = (
            (self.budget.max_bytes - used, _CLEARED_PER_CORE)
            if self._is_built and self._is_paced
            else (self._mark - used, _READ_PER_CORE)
        )
        return min(max(distance / (rate * (os.cpu_count() or 1)), _SHORTEST_SLEEP), _LONGEST_SLEEP)

    def _fail_unless_shared(self, used: int) -> None:
        # Whose the pages are that came just now cannot be told: with runs of other sessions beside, all are bound
        # together.
        beside = self._runs.beside
        if beside and self._use.with_others() <= self.budget.max_bytes + sum(beside.values()):
            return
        what = self._operation
        self._runs.end(lambda: self._exceeded(used, what))

    def watcher_failed(self, error: BaseException) -> None:
        """The watching thread has ended: what is under way must not go on unwatched."""
        message = (
            f"the thread that watches memory failed while {self._operation} ({type(error).__name__}: {error}), so the "
            "RAM budget could not be kept any more. What was under way has been ended"
        )

        def failure() -> RamProbeUnavailable:
            made = RamProbeUnavailable(message)
            made.__cause__ = error
            return made

        self._runs.end(failure)

    @property
    def _operation(self) -> str:
        return _RUNNING if self._is_built else _CONSTRUCTING

    # --- Measuring ----------------------------------------------------------------------------------------------------

    def _mapped_bytes(self) -> int:
        weights = self._weights
        return 0 if weights is None else weights.resident_bytes

    @property
    def plan(self) -> MemoryPlan:
        """The plan, with activations as seen so far."""
        if self._plan is None:
            raise RuntimeError("the plan is made when the session has been constructed")
        return self._plan

    @property
    def position(self) -> int | None:
        """The group of the plan that a run has come to, None while none is under way."""
        is_running = self._is_built and self._weights is not None and self._runs
        return self._weights.pager.group if is_running and self._weights is not None else None

    @property
    def report(self) -> MemoryReport:
        """What has happened so far."""
        return replace(self._report, baseline_rss_bytes=self._use.baseline)

    def after_fork(self) -> None:
        """In a forked child: nothing of the parent's runs is under way, and its locks may be held for ever."""
        self._lock, self._building_lock = threading.Lock(), threading.Lock()
        self._runs.after_fork()
        self._turns.after_fork()
        if self._weights is not None:
            self._weights.after_fork()

    def close(self) -> None:
        """End the thread, and give up nothing any more. Safe to call twice."""
        self._watcher.close()
        self._use.end(self._construction)
        if self._weights is not None:
            self._weights.close()


def _weakly_failed(keeper: BudgetKeeper) -> Callable[[BaseException], None]:
    kept = weakref.ref(keeper)

    def call(error: BaseException) -> None:
        found = kept()
        if found is not None:
            found.watcher_failed(error)

    return call


def _weak(keeper: BudgetKeeper, method: Callable[[BudgetKeeper], _T], otherwise: _T) -> Callable[[], _T]:
    """A method of the keeper for those who must not keep it alive, and what they get when it is gone."""
    kept = weakref.ref(keeper)

    def call() -> _T:
        found = kept()
        return otherwise if found is None else method(found)

    return call


def _all_after_fork() -> None:
    for keeper in list(_keepers):
        keeper.after_fork()


_keepers: weakref.WeakSet[BudgetKeeper] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_all_after_fork)
