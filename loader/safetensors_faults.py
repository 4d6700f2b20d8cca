"""Saying what is wrong with a safetensors file that the library has refused.

The library decides; this only finds the tensor and the bytes for the message, because the library's own words do not
tell a hole from an overlap, nor a truncated file from one with a rest behind its tensors.
"""

from __future__ import annotations

import json
import re

from ort_delayed.loader.reading import ShortReadError, read_into

__all__ = ["explain_fault"]

_LARGEST_EXPLAINED = 4 << 20
"""Bytes of header up to which a refused file is looked at more closely: parsing takes many times its size."""


def explain_fault(fd: int, file_size: int, library_message: str) -> str:
    """A sentence part on what is wrong, with the library's message behind it.

    Args:
        fd: the open file.
        file_size: its size in bytes.
        library_message: the text of the library's error.
    """
    said = library_message.removeprefix("Error while deserializing header: ")
    return f"{_found(fd, file_size, said)} (safetensors: {said})"


def _found(fd: int, file_size: int, said: str) -> str:
    if file_size < 8:
        return f"the file has {file_size} bytes, and the length of its header alone takes 8"
    prefix = bytearray(8)
    read_into(fd, memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    if 8 + length > file_size:
        return f"it is truncated or no safetensors file: the header should take {length} bytes, {file_size - 8} follow"
    if "unknown variant" in said:
        kind = re.search(r"unknown variant `([^`]*)`", said)
        return f"a tensor has the type {kind[1] if kind else '?'}, which this release of safetensors does not know"
    if "overflow" in said:
        return "the shape of a tensor overflows: its size in bytes cannot be a number of 64 bits"
    header = _header(fd, length) if length <= _LARGEST_EXPLAINED else None
    return (_range_fault(header, file_size - 8 - length) if header else None) or "its header is not valid"


def _header(fd: int, length: int) -> dict[str, tuple[int, int]] | None:
    """The byte range of each tensor, as far as they can be made out."""
    text = bytearray(length)
    try:
        read_into(fd, memoryview(text), 8)
        entries = json.loads(text)
        return {name: _range(entry) for name, entry in entries.items() if name != "__metadata__"}
    except (ShortReadError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _range(entry: dict[str, list[int]]) -> tuple[int, int]:
    start, end = entry["data_offsets"]
    return int(start), int(end)


def _range_fault(ranges: dict[str, tuple[int, int]], data_bytes: int) -> str | None:
    at, before = 0, "the start of the data"
    for name, (start, end) in sorted(ranges.items(), key=lambda item: item[1]):
        if end < start:
            return f"tensor '{name}' ends at byte {end} of the data, before it starts at {start}"
        if start > at:
            return f"there is a hole of {start - at} bytes between {before} and tensor '{name}'"
        if start < at:
            return f"tensor '{name}' overlaps {before} by {at - start} bytes"
        at, before = end, f"tensor '{name}'"
    if at > data_bytes:
        return f"it is truncated: its tensors take {at} bytes, the file holds {data_bytes} of them"
    if at < data_bytes:
        return f"{data_bytes - at} trailing bytes follow the last tensor"
    return None
