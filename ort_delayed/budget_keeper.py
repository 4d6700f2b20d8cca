"""Keeping one session to its RAM budget: the measuring, the pager, the watcher and the checks, put together.

What counts is the process's resident memory above a baseline taken when construction begins. Memory that the process
gains while no run of the session is under way is not the session's: it moves the baseline. The bound is checked
against the kernel's own high-water mark after construction and after each run.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import onnxruntime

from ort_delayed.budgeted_source import BudgetedSource, ModelNotSuitedError, prepare_budgeted
from ort_delayed.loader import platform
from ort_delayed.loader.budget import RamBudget, RamBudgetExceeded, RamProbeUnavailable, format_bytes
from ort_delayed.loader.mapped_ranges import MappedFiles, Piece, find_pieces
from ort_delayed.loader.probe import PeakSource
from ort_delayed.loader.resident_memory import PeakWindow, current_rss_bytes
from ort_delayed.memory_plan import MemoryPlan, make_plan
from ort_delayed.ops.kernel import Binding
from ort_delayed.packed_source import optimized_already
from ort_delayed.pager import PagedGroup, PagedPiece, Pager, PagerCounts
from ort_delayed.watcher import Watcher

__all__ = ["BudgetKeeper", "MemoryReport", "RunMemory"]

_MIB = 1 << 20
_PREPACKING_ENTRY = "session.disable_prepacking"
# What one core can touch in a second of pages that are in the page cache; with it goes how often the watcher looks.
_TOUCHED_PER_CORE = 15 << 30
_SHORTEST_SLEEP, _LONGEST_SLEEP = 0.0005, 0.01
_WORTH_A_NEW_PLAN = _MIB
_SHRINKAGE_ENTRY = "memory.enable_memory_arena_shrinkage"
_one_construction = threading.Lock()
_all_runs_lock = threading.Lock()
_keepers: weakref.WeakSet[BudgetKeeper] = weakref.WeakSet()


@dataclass(frozen=True)
class RunMemory:
    """What one run did, in bytes where it is not a number of times.

    Attributes:
        peak_bytes: the most above the baseline.
        dropped_bytes: mapped bytes that were given up.
        refetched_bytes: mapped bytes, given up before, that were announced as needed again.
        ticks: how often the clock ticked.
        reliefs: how often the watching thread had to give up pages.
    """

    peak_bytes: int
    dropped_bytes: int
    refetched_bytes: int
    ticks: int
    reliefs: int


@dataclass(frozen=True)
class MemoryReport:
    """What happened in a session under a budget so far.

    Attributes:
        budget_bytes: the budget.
        baseline_rss_bytes: resident set size of the process that counts as nothing; what the process gained while
            no run was under way is included.
        construction_peak_bytes: the most above the baseline while the session was constructed.
        peak_bytes: the most above the baseline, runs included.
        peak_source: how peaks are known.
        runs: how many runs have ended.
        last_run: the last of them, None before the first.
        drops_page_cache: whether pages are given up from the page cache as well, because memory is short.
    """

    budget_bytes: int
    baseline_rss_bytes: int
    construction_peak_bytes: int
    peak_bytes: int
    peak_source: PeakSource
    runs: int
    last_run: RunMemory | None
    drops_page_cache: bool


@dataclass(slots=True)
class _Run:
    """A run (or a construction) that is under way.

    Attributes:
        cancel: ends it before its time.
        failure: why it was ended.
        window: its high-water mark.
        beside: budgets of other sessions, by the session, that had a run meanwhile.
    """

    cancel: Callable[[], None]
    failure: RamBudgetExceeded | None = None
    window: PeakWindow | None = None
    beside: dict[int, int] = field(default_factory=dict)


class BudgetKeeper:
    """Keeps one session to its budget. The session's owner closes it *before* ONNX Runtime's session goes.

    Args:
        budget: the budget.
        drop_page_cache: whether pages that are given up are dropped from the page cache too; None: where the memory
            available to the process is less than the mapped files.

    Raises:
        RamProbeUnavailable: resident memory cannot be measured, or pages cannot be given up here.
    """

    def __init__(self, budget: RamBudget | int, *, drop_page_cache: bool | None = None) -> None:
        self.budget = RamBudget.of(budget)
        self._wants_drop_page_cache = drop_page_cache
        if not platform.can_give_up_pages():
            raise RamProbeUnavailable(
                "a RAM budget for a session needs a system on which the pages of mapped files can be given up (Linux)"
            )
        self._window = PeakWindow()
        self._baseline = _resident_bytes()
        self._foreign = 0
        self._idle_rss = self._baseline
        self._lock = threading.RLock()
        self._runs: dict[int, _Run] = {}
        self._elsewhere = _mapped_elsewhere(self)
        self._source: BudgetedSource | None = None
        self._files: MappedFiles | None = None
        self._pager: Pager | None = None
        self._by_page = platform.PageByPage()
        self._unpaged: dict[str, tuple[Piece, ...]] = {}
        self._plan: MemoryPlan | None = None
        self._mappings: set[platform.FileMapping] = set()
        self._report = MemoryReport(
            self.budget.max_bytes, self._baseline, 0, 0, "highest-sample", 0, None, drops_page_cache=False
        )
        self._mark = self.budget.max_bytes - min(48 * _MIB, self.budget.max_bytes // 4)
        self._building_lock = threading.Lock()
        self._is_building = False
        self._watcher = Watcher(_weak_look(self))
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
        ticked = weakref.WeakMethod(self._on_tick)

        def on_tick(group: int) -> None:
            tick = ticked()
            if tick is not None:
                tick(group)

        prepared = prepare_budgeted(source, options, binding, self.budget, on_tick, weights_dir=weights_dir)
        files = MappedFiles(dict.fromkeys(t.path for t in prepared.tensors))
        try:
            files.check_inside(prepared.tensors)
        except BaseException:
            files.close()
            raise
        self._release_model()
        self._source, self._files = replace(prepared, model=b""), files
        return prepared.model, prepared.external_directory

    def session_arguments(self, providers: Sequence[object] | None, arguments: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments for onnxruntime.InferenceSession: those given, and what the prepared model needs.

        Raises:
            ValueError: another provider than the CPU's is asked for; its memory cannot be given up.
        """
        names = [p[0] if isinstance(p, tuple) else p for p in providers or ()]
        if any(name != "CPUExecutionProvider" for name in names):
            raise ValueError(f"a session under a RAM budget runs on CPUExecutionProvider, asked for was {names}")
        assert self._source is not None
        disabled = [*arguments.get("disabled_optimizers", ()), *self._source.disabled_optimizers]
        # A second attempt, with other providers, would only print a banner.
        return {"enable_fallback": 0} | arguments | ({"disabled_optimizers": disabled} if disabled else {})

    @contextmanager
    def constructing(self, options: onnxruntime.SessionOptions) -> Iterator[None]:
        """While ONNX Runtime builds the session: the settings that leave weights mapped, and the watcher.

        Raises:
            RamBudgetExceeded: the session does not fit into the budget.
            ModelNotSuitedError: ONNX Runtime put copies of mapped weights into memory.
        """
        assert self._source is not None
        assert self._files is not None
        # Mappings are told apart by what is new, so two constructions must not overlap.
        prepacking = "0" if self._source.packed else "1"
        optimized = nullcontext() if self._source.packed is None else optimized_already(options)
        entry = _config_entry(options, _PREPACKING_ENTRY, prepacking)
        with _one_construction, optimized, entry, _without_memory_pattern(options):
            before = set(platform.file_mappings(self._files.paths))

            def cancel() -> None:
                options.set_load_cancellation_flag(True)

            run = _Run(cancel)
            with self._lock:
                self._runs[id(run)] = run
            self._is_building = True
            self._watcher.start()
            try:
                yield
            except Exception as error:
                if run.failure is not None:
                    raise run.failure from error
                raise
            finally:
                self._watcher.stop()
                with self._building_lock:  # from here on ONNX Runtime may unmap what it likes
                    self._is_building = False
                with self._lock:
                    self._runs.pop(id(run), None)
                if run.failure is not None:
                    options.set_load_cancellation_flag(False)
            self._adopt(self._source, self._files, before)

    def _adopt(self, source: BudgetedSource, files: MappedFiles, before: set[platform.FileMapping]) -> None:
        """Find ONNX Runtime's mappings of the weights, make the plan, and check that the session fits."""
        files.check_unchanged()
        mappings = set(platform.file_mappings(files.paths))
        found = find_pieces(source.tensors, mappings - before)
        # A session that is made again may get the addresses of the one before it.
        found |= find_pieces([t for t in source.tensors if t.name not in found], mappings & self._mappings)
        self._mappings = mappings - (before - self._mappings)
        lost = [t for t in source.tensors if t.name in source.weights and t.name not in found]
        lost_bytes = sum(t.nbytes for t in lost)
        self._report = replace(self._report, drops_page_cache=self._drops_page_cache(source))
        pieces: list[PagedPiece] = []
        numbers: dict[str, range] = {}
        for name, own in found.items():
            by_rows = name in source.weights and source.weights[name].by_rows
            numbers[name] = range(len(pieces), len(pieces) + len(own))
            pieces.extend(PagedPiece(p.nbytes, by_rows, self._giving_up(p, files)) for p in own)
            self._unpaged[name] = own
        groups = [
            PagedGroup(tuple(n for name in names for n in numbers.get(name, ())), 0) for _, names in source.groups
        ]
        self._pager = Pager(pieces, groups, self.used_bytes, self.budget.max_bytes)
        self._pager.give_up_all()
        session_bytes = max(self.used_bytes(), 0)
        self._replan(session_bytes, 0)
        peak = self._take_peak(self._window)
        self._report = replace(
            self._report, construction_peak_bytes=peak, peak_bytes=max(peak, self._report.peak_bytes)
        )
        if lost_bytes > self.budget.max_bytes // 4:
            raise ModelNotSuitedError(
                f"ONNX Runtime replaced {len(lost)} weights of {format_bytes(lost_bytes)} (such as '{lost[0].name}') "
                "by others in memory while it optimized the model. Optimize the model once beforehand "
                "(ort_delayed.pack_model), or use a lower graph_optimization_level"
            )
        if peak > self.budget.max_bytes:
            raise RamBudgetExceeded(
                budget_bytes=self.budget.max_bytes, observed_bytes=peak, operation="constructing the session"
            )
        assert self._plan is not None
        if self._plan.least_budget_bytes > self.budget.max_bytes:
            raise RamBudgetExceeded(
                budget_bytes=self.budget.max_bytes,
                observed_bytes=session_bytes,
                requested_bytes=self._plan.least_budget_bytes - session_bytes,
                operation="constructing the session",
            )
        self._idle_rss = _resident_bytes()

    def _giving_up(self, piece: Piece, files: MappedFiles) -> Callable[[], None]:
        if self._report.drops_page_cache:

            def give_up() -> None:
                platform.give_up_pages(piece.address, piece.nbytes)
                files.drop_cached(piece)

            return give_up
        return lambda: platform.give_up_pages(piece.address, piece.nbytes)

    def _drops_page_cache(self, source: BudgetedSource) -> bool:
        if self._wants_drop_page_cache is not None:
            return self._wants_drop_page_cache
        available = platform.available_memory_bytes()
        return available is not None and available < sum(w.nbytes for w in source.weights.values())

    def _replan(self, session_bytes: int, activations_bytes: int) -> None:
        assert self._source is not None
        assert self._pager is not None
        plan = make_plan(
            budget_bytes=self.budget.max_bytes,
            session_bytes=session_bytes,
            activations_bytes=activations_bytes,
            groups=self._source.groups,
            weights=self._source.weights,
            can_map_by_page=self._by_page.works,
        )
        self._plan = plan
        for name in plan.by_page:
            for piece in self._unpaged.pop(name, ()):
                self._by_page.add(piece.address, piece.nbytes)
        limit = plan.budget_bytes - plan.headroom_bytes
        self._mark = limit + plan.headroom_bytes // 4
        self._pager.set_limit(limit, plan.stays_bytes, [g.window_bytes for g in plan.groups])

    @staticmethod
    def configure_run(options: onnxruntime.RunOptions) -> None:
        """What a run under a budget needs of its options: memory of activations goes back when it is over.

        Otherwise a run whose activations do not fit would leave them in the arena, and no later run would fit.
        """
        options.add_run_config_entry(_SHRINKAGE_ENTRY, "cpu:0")

    # --- Runs ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self, cancel: Callable[[], None]) -> Iterator[None]:
        """A run is under way. ``cancel`` ends it before its time, and may be called from any thread.

        Raises:
            MappedFileChanged: before anything is touched.
            RamBudgetExceeded: the budget was exceeded; the run was ended, or its results are not handed out.
        """
        assert self._files is not None
        assert self._pager is not None
        self._files.check_unchanged()
        run = _Run(cancel)
        counts = self._begin(run)
        try:
            try:
                yield
            finally:
                peak = self._end(run, counts)
        except Exception as error:
            if run.failure is not None:
                raise run.failure from error
            raise
        if run.failure is not None:
            raise run.failure
        # The kernel's mark is the process's: where other sessions ran meanwhile, all of them together are bound.
        if peak > self.budget.max_bytes + sum(run.beside.values()):
            raise RamBudgetExceeded(
                budget_bytes=self.budget.max_bytes, observed_bytes=peak, operation="running the model"
            )

    def _begin(self, run: _Run) -> PagerCounts:
        assert self._pager is not None
        with _all_runs_lock, self._lock:
            if not self._runs:
                # What the process has gained since the last run is not this session's.
                self._foreign = max(self._foreign + _resident_bytes() - self._idle_rss, 0)
                self._elsewhere = _mapped_elsewhere(self)
            for other in _keepers:
                if other is not self and other._runs:
                    run.beside[id(other)] = other.budget.max_bytes
                    for theirs in other._runs.values():
                        theirs.beside[id(self)] = self.budget.max_bytes
            self._runs[id(run)] = run
            run.window = PeakWindow()
        self._pager.begin()
        self._watcher.start()
        return replace(self._pager.counts)

    def _end(self, run: _Run, before: PagerCounts) -> int:
        assert self._pager is not None
        assert self._plan is not None
        self._watcher.stop()
        with self._lock:
            peak = self._take_peak(run.window)
            self._runs.pop(id(run), None)
            run.window = None
            if not self._runs:
                self._idle_rss = _resident_bytes()
            now = self._pager.counts
            last = RunMemory(
                peak,
                now.dropped_bytes - before.dropped_bytes,
                now.refetched_bytes - before.refetched_bytes,
                now.ticks - before.ticks,
                now.reliefs - before.reliefs,
            )
            self._report = replace(
                self._report, peak_bytes=max(peak, self._report.peak_bytes), runs=self._report.runs + 1, last_run=last
            )
            activations = self._pager.most_other_bytes - self._plan.session_bytes
            if activations > self._plan.activations_bytes + _WORTH_A_NEW_PLAN:
                self._replan(self._plan.session_bytes, activations)
        return peak

    def _on_tick(self, group: int) -> None:
        assert self._pager is not None
        for run in list(self._runs.values()):
            if run.failure is not None:
                raise run.failure
        self._pager.tick(group)

    def look(self) -> float:
        """For the watcher: make room where little is left; returns the seconds until the next look."""
        if self._pager is not None:
            used = self._pager.relieve(self._mark)
        else:
            used = self.used_bytes()
            if used > self._mark:
                with self._building_lock:
                    self._relieve_construction()
                used = self.used_bytes()
        if used > self.budget.max_bytes:
            self._fail(used)
        distance = self._mark - used
        rate = _TOUCHED_PER_CORE * (os.cpu_count() or 1)
        return min(max(distance / rate, _SHORTEST_SLEEP), _LONGEST_SLEEP)

    def _relieve_construction(self) -> None:
        """Give up what ONNX Runtime has mapped, while it builds the session.

        It unmaps raw weights as it packs or folds them, and what it allocates next may come to stand at their
        addresses. To give up pages there with MADV_DONTNEED would wipe that. Packed ranges stay mapped.
        """
        if not self._is_building or self._files is None or self._source is None:
            return
        names = self._source.packed_ranges
        packed = {(t.path, *_pages(t.offset, t.nbytes)) for t in self._source.tensors if t.name in names}
        others = []
        for mapping in platform.file_mappings(self._files.paths):
            if (mapping.path, *_pages(mapping.offset, mapping.nbytes)) in packed:
                platform.give_up_pages(mapping.address, mapping.nbytes)
            else:
                others.append(mapping)
        for mapping in others:
            if self.used_bytes() <= self._mark:
                break
            platform.reclaim_pages(mapping.address, mapping.nbytes)

    def _fail(self, used: int) -> None:
        what = "constructing the session" if self._pager is None else "running the model"
        with self._lock:
            for run in self._runs.values():
                if run.failure is None:
                    run.failure = RamBudgetExceeded(
                        budget_bytes=self.budget.max_bytes, observed_bytes=used, operation=what
                    )
                    run.cancel()

    # --- Measuring ----------------------------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Resident bytes above the baseline, now; without what other sessions' weights have gained meanwhile."""
        elsewhere = _mapped_elsewhere(self) - self._elsewhere if len(_keepers) > 1 else 0
        return _resident_bytes() - self._baseline - self._foreign - elsewhere

    def _take_peak(self, window: PeakWindow | None) -> int:
        mark = None if window is None else window.read()
        source: PeakSource = "highest-sample" if mark is None else "kernel-high-water-mark"
        self._report = replace(self._report, peak_source=source)
        return (_resident_bytes() if mark is None else mark) - self._baseline - self._foreign

    @property
    def mapped_bytes(self) -> int:
        """Bytes of mapped weights that are recorded to be resident."""
        pager = self._pager
        return 0 if pager is None else pager.resident_bytes

    @property
    def plan(self) -> MemoryPlan:
        """The plan, with activations as seen so far."""
        if self._plan is None:
            raise RuntimeError("the plan is made when the session has been constructed")
        return self._plan

    @property
    def position(self) -> int | None:
        """The group of the plan that a run has come to, None while none is under way."""
        # Before a run's window is open, the pager still stands where the last run ended.
        is_running = any(run.window is not None for run in list(self._runs.values()))
        return self._pager.group if self._pager is not None and is_running else None

    @property
    def report(self) -> MemoryReport:
        """What has happened so far."""
        return replace(self._report, baseline_rss_bytes=self._baseline + self._foreign)

    def after_fork(self) -> None:
        """In a forked child: nothing of the parent's runs is under way, and its locks may be held for ever."""
        self._lock = threading.RLock()
        self._runs.clear()
        if self._pager is not None:
            self._pager.after_fork()
        # A child starts without the pages of file mappings.
        self._idle_rss = _resident_bytes()

    def _release_model(self) -> None:
        self._unpaged.clear()
        pager, self._pager = self._pager, None
        files, self._files = self._files, None
        if pager is not None:
            pager.close()
        if files is not None:
            files.close()

    def close(self) -> None:
        """End the thread, and give up nothing any more. Safe to call twice."""
        self._watcher.close()
        self._release_model()
        self._by_page.close()


def _pages(offset: int, nbytes: int) -> tuple[int, int]:
    """The first page of a range of a file, and the first behind it. (The kernel joins mappings that touch.)"""
    return offset // mmap.PAGESIZE, -(-(offset + nbytes) // mmap.PAGESIZE)


def _resident_bytes() -> int:
    found = current_rss_bytes()
    if found is None:
        raise RamProbeUnavailable("resident memory cannot be measured, so a session cannot keep to a RAM budget")
    return found


def _weak_look(keeper: BudgetKeeper) -> Callable[[], float]:
    """What the watcher calls. Its thread must not keep the keeper alive."""
    look = weakref.WeakMethod(keeper.look)

    def look_if_alive() -> float:
        found = look()
        return _LONGEST_SLEEP if found is None else found()

    return look_if_alive


@contextmanager
def _config_entry(options: onnxruntime.SessionOptions, key: str, value: str) -> Iterator[None]:
    """While the session is built, the options have this entry. One that was not there stays, with its default."""
    previous = "0"
    with contextlib.suppress(RuntimeError):
        previous = options.get_session_config_entry(key)
    options.add_session_config_entry(key, value)
    try:
        yield
    finally:
        options.add_session_config_entry(key, previous)


@contextmanager
def _without_memory_pattern(options: onnxruntime.SessionOptions) -> Iterator[None]:
    """While the session is built, the options have no memory pattern.

    With it a second run takes one planned block for its activations, beside those that the first run has left in the
    arena: twice the memory, for each shape of inputs.
    """
    previous, options.enable_mem_pattern = options.enable_mem_pattern, False
    try:
        yield
    finally:
        options.enable_mem_pattern = previous


def _mapped_elsewhere(keeper: BudgetKeeper) -> int:
    """Bytes of mapped weights that other sessions under a budget are recorded to have resident."""
    return sum(k.mapped_bytes for k in list(_keepers) if k is not keeper)


def _all_after_fork() -> None:
    global _one_construction, _all_runs_lock
    _one_construction, _all_runs_lock = threading.Lock(), threading.Lock()
    for keeper in list(_keepers):
        keeper.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_all_after_fork)
