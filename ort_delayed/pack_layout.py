"""Where each range of a packed model's data file goes. Pure: numbers in, numbers out.

    small weights      together, in front: they are needed in every run, and none is worth a page of its own
    streamed ranges    what kernels read while the model runs, in order of first use, each on whole pages
    ranges behind      raw values that only ONNX Runtime's packing reads, while a session is made

So what a run reads is one ascending scan of the file, and the system's read-ahead drags in nothing but what comes next.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GROUP_BYTES", "SMALL_BYTES", "DataLayout", "RangeGroup"]

SMALL_BYTES = 64 << 10
"""Ranges below this many bytes are small. It is also the largest page size in use (arm64)."""

GROUP_BYTES = 16 << 20
"""Streamed ranges are grouped until a group has this many bytes; a larger range is a group by itself."""

PAGE_BYTES = 4096
SMALL_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class RangeGroup:
    """Streamed ranges that stand together and are used one after the other.

    Attributes:
        offset: first byte in the data file, a multiple of the page size.
        nbytes: bytes up to the end of its last range.
    """

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.offset + self.nbytes


class DataLayout:
    """Gives each range its offset, in the order in which they are asked for: small ones, streamed ones, those behind.

    Attributes:
        end: first byte behind all ranges so far.
        streamed_start: where the streamed ranges begin, once there is one.
        streamed_end: first byte behind the streamed ranges so far.
    """

    def __init__(self) -> None:
        self.end = 0
        self.streamed_start: int | None = None
        self.streamed_end = 0
        self._groups: list[RangeGroup] = []
        self._behind = False

    @property
    def groups(self) -> tuple[RangeGroup, ...]:
        """The groups of streamed ranges, in order of first use."""
        return tuple(self._groups)

    def small(self, nbytes: int) -> int:
        """The offset of a small weight.

        Raises:
            ValueError: streamed ranges have been placed already.
        """
        if self.streamed_start is not None or self._behind:
            raise ValueError("small weights go in front: place them before any other range")
        return self._place(nbytes, SMALL_ALIGNMENT)

    def streamed(self, nbytes: int) -> int:
        """The offset of a range that a run reads.

        Raises:
            ValueError: ranges that go behind the streamed ones have been placed already.
        """
        if self._behind:
            raise ValueError("streamed ranges go in front of raw values: place them first")
        small = nbytes < SMALL_BYTES and self.streamed_start is not None
        offset = self._place(nbytes, SMALL_ALIGNMENT if small else PAGE_BYTES)
        if self.streamed_start is None:
            self.streamed_start = offset
        self.streamed_end = self.end
        last = self._groups[-1] if self._groups else None
        if last is not None and (small or self.end - last.offset <= GROUP_BYTES):
            self._groups[-1] = RangeGroup(last.offset, self.end - last.offset)
        else:
            self._groups.append(RangeGroup(offset, nbytes))
        return offset

    def behind(self, nbytes: int) -> int:
        """The offset of raw values that no kernel reads while the model runs."""
        offset = self._place(nbytes, PAGE_BYTES)
        self._behind = True
        return offset

    def _place(self, nbytes: int, alignment: int) -> int:
        offset = -(-self.end // alignment) * alignment
        self.end = offset + nbytes
        return offset
