"""Explaining a refusal never fails, whatever the file holds. Each fault's message is in test_safetensors_files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from checkpoints import entry, raw_safetensors

from ort_delayed.loader import safetensors_faults
from ort_delayed.loader.safetensors_faults import explain_fault


def explain(path: Path, said: str = "Error while deserializing header: incomplete metadata") -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        return explain_fault(fd, path.stat().st_size, said)
    finally:
        os.close(fd)


def test_the_librarys_words_stand_behind_ours(tmp_path: Path) -> None:
    path = raw_safetensors(tmp_path / "m", {"a": entry(0, 8)}, bytes(7))
    assert explain(path) == (
        "it is truncated: its tensors take 8 bytes, the file holds 7 of them (safetensors: incomplete metadata)"
    )


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"a": 3}',
        b'{"a": {"data_offsets": "xy"}}',
        b'{"a": {"data_offsets": [1]}}',
        b'{"a": {"data_offsets": [0, 1e999]}}',
        b"[" * 9999,
    ]
    + [json.dumps({"a": entry(0, 8)}).encode(), b'{"__metadata__": 7}', b'{"a": {"data_offsets": [null, {}]}}'],
)
def test_where_nothing_more_can_be_said_the_library_is_quoted(tmp_path: Path, header: bytes) -> None:
    path = raw_safetensors(tmp_path / "m", header, bytes(8))
    assert explain(path, "what the library said").endswith("(safetensors: what the library said)")


def test_a_very_large_header_is_not_parsed_for_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_faults, "_LARGEST_EXPLAINED", 10)
    path = raw_safetensors(tmp_path / "m", {"a": entry(0, 8)}, bytes(7))
    assert explain(path).startswith("its header is not valid")
