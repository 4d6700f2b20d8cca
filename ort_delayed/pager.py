"""The pager: gives up pages of mapped weights so that a run keeps to a number of resident bytes.

What is needed last is given up first. The order of use is known and comes round with every run, so that is the
weights just used: a fixed part of the model stays, the rest streams. Ticks of the clock (:mod:`ort_delayed.clock`)
say where in the order the run is, and the pager makes room for what comes next. Between ticks a watching thread
(:mod:`ort_delayed.watcher`) calls :meth:`Pager.relieve`. Whatever is given up when, results are the same bytes.

The pager knows neither ONNX Runtime nor whose mappings these are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["PagedGroup", "PagedPiece", "Pager", "PagerCounts"]

_RELIEF_BYTES = 16 << 20  # relieving goes so far below the mark, so that it is not needed again at once


@dataclass(frozen=True, slots=True)
class PagedPiece:
    """A part of a weight that is given up as a whole: its size in bytes, and how to give it up."""

    nbytes: int
    by_rows: bool
    give_up: Callable[[], None]


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """The pieces used between two ticks, in order of use, and the bytes of them that must be resident at once."""

    pieces: tuple[int, ...]
    window_bytes: int


@dataclass(slots=True)
class PagerCounts:
    """What the pager has done: bytes given up and touched again, ticks, calls of the watcher that gave pages up."""

    dropped_bytes: int = 0
    refetched_bytes: int = 0
    ticks: int = 0
    reliefs: int = 0


class Pager:
    """Owns the record of which pieces may be resident.

    Args:
        pieces: all of them.
        groups: what is used when; a run begins in group 0.
        used_bytes: returns the resident bytes that count against the budget, measured now.
        limit_bytes: what a tick fills memory up to.
    """

    def __init__(
        self,
        pieces: Sequence[PagedPiece],
        groups: Sequence[PagedGroup],
        used_bytes: Callable[[], int],
        limit_bytes: int,
    ) -> None:
        self.counts = PagerCounts()
        self._pieces = pieces
        self._groups = tuple(groups)
        self._used_bytes = used_bytes
        self._limit = limit_bytes
        self._stays: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        self._by_rows = bytes(p.by_rows for p in pieces)
        self._resident = bytearray(len(pieces))
        self._dropped = bytearray(len(pieces))
        self._resident_bytes = 0
        self._most_other_bytes = 0
        self._uses: list[list[int]] = [[] for _ in pieces]
        for number, group in enumerate(groups):
            for piece in group.pieces:
                self._uses[piece].append(number)
        self._group = 0
        self._whole = sum(p.nbytes for p in pieces if not p.by_rows)
        self._fits = False
        self._session_bytes = 0
        self._streamed = False  # whether pieces of the present group were given up while it was used
        self._closed = False

    @property
    def resident_bytes(self) -> int:
        """Bytes of the pieces that are recorded as resident."""
        return self._resident_bytes

    @property
    def group(self) -> int:
        """The group that a run has come to."""
        return self._group

    @property
    def most_other_bytes(self) -> int:
        """The most bytes in use at a tick of this run that were no mapped pages: the session's own and activations."""
        return self._most_other_bytes

    def set_limit(self, limit_bytes: int, stays_bytes: int, windows: Sequence[int], *, session_bytes: int = 0) -> None:
        """Change what memory is filled up to, what stays inside a group that streams, and the groups' windows.

        ``session_bytes`` is what is in use besides mapped pages at the least.
        """
        with self._lock:
            self._session_bytes = session_bytes
            self._limit = limit_bytes
            self._groups = tuple(PagedGroup(g.pieces, window) for g, window in zip(self._groups, windows, strict=True))
            self._stays = frozenset(self._first_pieces(stays_bytes))
            self._fits = stays_bytes >= self._whole

    def begin(self) -> None:
        """A run begins: make room for its first group."""
        with self._lock:
            self._most_other_bytes = 0
            self._enter(0)

    def tick(self, group: int) -> None:
        """A run has come to ``group``: make room for it."""
        with self._lock:
            self.counts.ticks += 1
            if self._fits and self._resident_bytes == self._whole:
                self._group = group  # nothing to make room for, and nothing to measure that would change that
            else:
                self._enter(group)

    def relieve(self, mark_bytes: int) -> int:
        """Give up pages until less than ``mark_bytes`` are in use, and say how many are.

        First what is not used now, last needed first; in a group that streams, first what of it does not stay. If that
        does not do, everything: then pages that an operator is reading come back at its next touch.
        """
        with self._lock:
            used = self._used_bytes()
            if used <= mark_bytes or self._closed:
                return used
            self.counts.reliefs += 1
            target = mark_bytes - min(_RELIEF_BYTES, mark_bytes // 8)
            for step in self._relief_steps():
                step(used - target)
                before, used = used, self._used_bytes()
                self.counts.dropped_bytes += max(before - used, 0)
                if used <= mark_bytes:
                    break
            return used

    def give_up_all(self) -> None:
        """Give up every page."""
        with self._lock:
            if not self._closed:
                self._give_up_blindly(range(len(self._pieces)))
                for piece in range(len(self._pieces)):
                    self._forget(piece)

    def close(self) -> None:
        """Nothing is given up from now on. Once this has returned the mappings may go."""
        with self._lock:
            self._closed = True

    def after_fork(self) -> None:
        """In a forked child: another thread may have held the lock."""
        self._lock = threading.Lock()

    def _enter(self, group: int) -> None:
        if self._closed:
            return
        if self._streamed:
            self._streamed = False
            self._leave_streamed()
        self._group = group
        coming = self._groups[group]
        used = self._used_bytes()
        self._most_other_bytes = max(self._most_other_bytes, used - self._resident_bytes)
        missing = sum(self._pieces[p].nbytes for p in coming.pieces if not self._resident[p] and not self._by_rows[p])
        # The system may have taken pages that are recorded as resident, if memory is short, and the watcher may have
        # given some up: they come back when they are touched, and need the room that they had.
        claimed = max(used, self._resident_bytes + self._session_bytes)
        excess = claimed + min(missing, coming.window_bytes) - self._limit
        if excess > 0:
            self.counts.dropped_bytes += self._drop(excess)
        for piece in coming.pieces:
            self._touch(piece)

    def _touch(self, piece: int) -> None:
        if self._resident[piece]:
            return
        self._resident[piece] = 1
        if not self._by_rows[piece]:
            self._resident_bytes += self._pieces[piece].nbytes
            if self._dropped[piece]:
                self.counts.refetched_bytes += self._pieces[piece].nbytes

    def _drop(self, excess: int) -> int:
        """Give up pieces outside the present group until ``excess`` bytes are freed; returns how many were."""
        freed = 0
        for piece in self._last_needed_first():
            if freed >= excess:
                break
            if self._resident[piece]:
                self._pieces[piece].give_up()
                self._forget(piece)
                if not self._by_rows[piece]:
                    freed += self._pieces[piece].nbytes
        return freed

    def _forget(self, piece: int) -> None:
        if self._resident[piece]:
            self._resident[piece] = 0
            self._dropped[piece] = 1
            if not self._by_rows[piece]:
                self._resident_bytes -= self._pieces[piece].nbytes

    def _relief_steps(self) -> Iterator[Callable[[int], object]]:
        group = self._groups[self._group]
        if self._does_not_fit(group):
            yield lambda _: self._stream(p for p in group.pieces if p not in self._stays)
        yield self._drop
        yield lambda _: self._stream(group.pieces)
        yield lambda _: self._give_up_blindly(range(len(self._pieces)))

    def _does_not_fit(self, group: PagedGroup) -> bool:
        whole = sum(self._pieces[p].nbytes for p in group.pieces if not self._by_rows[p])
        return group.window_bytes < whole

    def _stream(self, pieces: Iterable[int]) -> None:
        self._streamed = True
        self._give_up_blindly(pieces)

    def _give_up_blindly(self, pieces: Iterable[int]) -> None:
        # They stay recorded as resident: an operator that is under way may touch any of them again at once.
        for piece in pieces:
            self._pieces[piece].give_up()

    def _leave_streamed(self) -> None:
        """Which pieces of a group that streamed are resident is not known: make it known."""
        for piece in self._groups[self._group].pieces:
            if piece not in self._stays:
                self._pieces[piece].give_up()
                self._forget(piece)

    def _first_pieces(self, nbytes: int) -> Iterator[int]:
        seen: set[int] = set()
        for group in self._groups:
            for piece in group.pieces:
                if piece in seen or self._by_rows[piece]:
                    continue
                seen.add(piece)
                nbytes -= self._pieces[piece].nbytes
                if nbytes < 0:
                    return
                yield piece

    def _last_needed_first(self) -> Iterator[int]:
        """The pieces outside the present group, the one whose next use is farthest away first."""
        count, present = len(self._groups), self._group
        for distance in range(count - 1, 0, -1):
            for piece in reversed(self._groups[(present + distance) % count].pieces):
                uses = self._uses[piece]
                if len(uses) == 1 or min((u - present) % count for u in uses) == distance:
                    yield piece
