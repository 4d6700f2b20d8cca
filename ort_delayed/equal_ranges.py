"""Finding ranges of a file that hold the same bytes, so that tied weights are stored once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from ort_delayed.loader.reading import PIECE_BYTES, read_into

__all__ = ["find_equal_ranges"]

_SAMPLE_BYTES = 256
_SAMPLES = 8


def find_equal_ranges(fd: int, ranges: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """For each name the first name whose range holds the same bytes, which may be its own.

    Samples are compared first, so what differs is hardly read; what agrees in all samples is read whole.

    Args:
        fd: the open file.
        ranges: offset and bytes by name.

    Raises:
        ShortReadError, OSError: the file cannot be read.
    """
    by_sample: dict[tuple[int, bytes], list[str]] = {}
    for name, (offset, nbytes) in ranges.items():
        by_sample.setdefault((nbytes, _sample(fd, offset, nbytes)), []).append(name)
    first: dict[str, str] = {}
    for names in by_sample.values():
        if len(names) == 1:
            first[names[0]] = names[0]
            continue
        by_digest: dict[bytes, str] = {}
        for name in names:
            first[name] = by_digest.setdefault(_digest(fd, *ranges[name]), name)
    return first


def _sample(fd: int, offset: int, nbytes: int) -> bytes:
    starts = sorted({nbytes * number // _SAMPLES for number in range(_SAMPLES)})
    found = [b"".join(map(bytes, _pieces(fd, offset + s, min(_SAMPLE_BYTES, nbytes - s)))) for s in starts]
    return b"".join(found)


def _digest(fd: int, offset: int, nbytes: int) -> bytes:
    digest = hashlib.sha256()
    for piece in _pieces(fd, offset, nbytes):
        digest.update(piece)
    return digest.digest()


def _pieces(fd: int, offset: int, nbytes: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(nbytes, PIECE_BYTES)))
    for start in range(0, nbytes, PIECE_BYTES):
        piece = buffer[: min(PIECE_BYTES, nbytes - start)]
        read_into(fd, piece, offset + start)
        yield piece
