"""The mapped weights of one session under a budget: its files, ONNX Runtime's mappings of them, and their pager."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ort_delayed.budgeted_source import BudgetedSource, ModelNotSuitedError
from ort_delayed.loader import platform
from ort_delayed.loader.budget import format_bytes
from ort_delayed.loader.mapped_ranges import MappedFiles, Piece, check_own, find_pieces
from ort_delayed.memory_plan import DelayedBytes, MemoryPlan, make_plan
from ort_delayed.packed_mappings import PackedMappings, check_mappable
from ort_delayed.pager import PagedGroup, PagedPiece, Pager

__all__ = ["PagedWeights"]

# Reading what is available takes some 0.2 ms.
_SECONDS_BETWEEN_LOOKS_AT_THE_SYSTEM = 2.0


class PagedWeights:
    """Owns the files, the pager and the registration of ranges that are touched page by page; close it.

    Args:
        source: the prepared model.
        budget_bytes: the budget.
        used_bytes: returns the bytes in use that count against the budget, now.
        drop_page_cache: whether pages that are given up are dropped from the page cache too; None: while the memory
            available to the process is less than the mapped weights.

    Attributes:
        source: the prepared model.
        files: the files that its weights stay in.
        by_page: ranges that are touched page by page.

    Raises:
        ShardFormatError: a weight reaches beyond the end of its file.
        OSError: a file cannot be opened.
    """

    def __init__(
        self,
        source: BudgetedSource,
        budget_bytes: int,
        used_bytes: Callable[[], int],
        *,
        drop_page_cache: bool | None,
    ) -> None:
        self.source = source
        self.files = MappedFiles(dict.fromkeys(t.path for t in source.tensors))
        try:
            self.files.check_inside(source.tensors)
            check_mappable(source.packed_ranges)
        except BaseException:
            self.files.close()
            raise
        self.by_page = platform.PageByPage()
        self._budget = budget_bytes
        self._used_bytes = used_bytes
        self._wants_drop_page_cache = drop_page_cache
        self._drops_page_cache = threading.Event()
        self._looked_at_system = 0.0
        self._pager: Pager | None = None
        self._mappings: frozenset[platform.FileMapping] = frozenset()
        self._packed = PackedMappings()
        self._not_by_page: dict[str, tuple[Piece, ...]] = {}

    @property
    def pager(self) -> Pager:
        """The pager; RuntimeError before :meth:`adopt`."""
        if self._pager is None:
            raise RuntimeError("weights are paged when the session has been constructed")
        return self._pager

    @property
    def mappings(self) -> frozenset[platform.FileMapping]:
        """The mappings that were taken to be the session's."""
        return self._mappings

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights that are recorded to be resident."""
        return 0 if self._pager is None else self._pager.resident_bytes

    def adopt(self, before: frozenset[platform.FileMapping], earlier: frozenset[platform.FileMapping]) -> None:
        """Find ONNX Runtime's mappings of the weights, now that the session has been built, and give all pages up.

        Args:
            before: mappings of the files before it was built.
            earlier: those among them that were this session's when it was built the last time: it is gone, and ONNX
                Runtime may have got its addresses again.

        Raises:
            AmbiguousMappingsError: another session on the same file was built at the same time.
            MappedFileChanged: a file has changed meanwhile.
            ModelNotSuitedError: ONNX Runtime put copies of weights into memory instead.
            OSError: it could not map packed weights.
        """
        self.files.check_unchanged()
        tensors, weights = self.source.tensors, self.source.weights
        mappings = frozenset(platform.file_mappings(self.files.paths))
        check_own(tensors, mappings - before)
        found = find_pieces(tensors, mappings - before)
        found |= find_pieces([t for t in tensors if t.name not in found], mappings & earlier)
        self._mappings = mappings - (before - earlier)
        packed = self.source.packed_ranges
        if packed:  # some, or all, may be too small to be paged: their files are not among ours then
            self._packed.take(packed, platform.file_mappings({t.path for t in packed}))
        pieces: list[PagedPiece] = []
        numbers: dict[str, range] = {}
        for name, own in found.items():
            by_rows = name in weights and weights[name].by_rows
            numbers[name] = range(len(pieces), len(pieces) + len(own))
            pieces.extend(PagedPiece(p.nbytes, by_rows, self._giving_up(p)) for p in own)
        self._not_by_page = dict(found)
        groups = [
            PagedGroup(tuple(n for name in names for n in numbers.get(name, ())), 0) for _, names in self.source.groups
        ]
        self.look_at_system()
        self._pager = Pager(pieces, groups, self._used_bytes, self._budget)
        self._pager.give_up_all()
        lost = [t for t in tensors if t.name in weights and t.name not in found]
        lost_bytes = sum(t.nbytes for t in lost)
        if lost_bytes > self._budget // 4:
            raise ModelNotSuitedError(
                f"ONNX Runtime replaced {len(lost)} weights of {format_bytes(lost_bytes)} (such as '{lost[0].name}') "
                "by others in memory while it optimized the model. Optimize the model once beforehand "
                "(ort_delayed.pack_model), or use a lower graph_optimization_level"
            )

    def replan(
        self, session_bytes: int, activations_bytes: int, delayed: DelayedBytes, construction_bytes: int
    ) -> MemoryPlan:
        """Make the plan for what has been measured, and let the pager keep to it.

        Memory that a delayed weight is loaded into comes between two ticks, where the pager cannot make room for it:
        so much is left free all the time.
        """
        plan = make_plan(
            budget_bytes=self._budget,
            session_bytes=session_bytes,
            activations_bytes=activations_bytes,
            groups=self.source.groups,
            weights=self.source.weights,
            can_map_by_page=self.by_page.works,
            delayed=delayed,
            construction_bytes=construction_bytes,
        )
        for name in plan.by_page:
            for piece in self._not_by_page.pop(name, ()):
                self.by_page.add(piece.address, piece.nbytes)
        limit = max(plan.budget_bytes - plan.headroom_bytes - plan.load_bytes, 0)
        windows = [g.window_bytes for g in plan.groups]
        self.pager.set_limit(limit, plan.stays_bytes, windows, session_bytes=plan.session_bytes)
        return plan

    def look_at_system(self) -> bool:
        """Decide whether memory is so short that pages must leave the page cache too to make room for others.

        Where kept and streamed pages fit into what is available, the system keeps them cached, and giving up and
        touching them costs next to nothing. Where they do not, it would push out the kept ones for the streamed ones.
        """
        wanted = self._wants_drop_page_cache
        if wanted is None and time.monotonic() - self._looked_at_system > _SECONDS_BETWEEN_LOOKS_AT_THE_SYSTEM:
            self._looked_at_system = time.monotonic()
            available = platform.available_memory_bytes()
            wanted = available is not None and available < sum(w.nbytes for w in self.source.weights.values())
        if wanted:
            self._drops_page_cache.set()
        elif wanted is not None:
            self._drops_page_cache.clear()
        return self._drops_page_cache.is_set()

    def after_fork(self) -> None:
        """In a forked child: another thread may have held a lock."""
        if self._pager is not None:
            self._pager.after_fork()

    def close(self) -> None:
        """Give up nothing any more, and close the files. Safe to call twice."""
        if self._pager is not None:
            self._pager.close()
        self._packed.close()
        self.files.close()
        self.by_page.close()

    def _giving_up(self, piece: Piece) -> Callable[[], None]:
        files, drops_page_cache = self.files, self._drops_page_cache

        def give_up() -> None:
            platform.give_up_pages(piece.address, piece.nbytes)
            if drops_page_cache.is_set():
                files.drop_cached(piece)

        return give_up
