"""Safetensors headers that nobody writes: accepted exactly where the safetensors library accepts them. And indexes.

tests/loader/test_safetensors_files.py changes single bytes of valid files; here the headers' structure is changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import bits, raw_safetensors, save_safetensors
from fuzzing import fuzz, lengths
from hypothesis import strategies as st
from mutations import INTERESTING_INTEGERS, INTERESTING_TEXTS, changed_bytes
from trial_worker import TrialWorker

TYPES = {"F32": 32, "F64": 64, "F16": 16, "BF16": 16, "I8": 8, "U8": 8, "BOOL": 8, "I64": 64, "U16": 16, "C64": 64}
TYPES |= {"F8_E4M3": 8, "F4": 4, "F6_E2M3": 6}
HUGE = "a number of 5001 digits"
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(INTERESTING_INTEGERS)
    | st.sampled_from([0.5, -0.0, 1e308, 1e999, float("nan"), 8.0, 2**70])
    | st.sampled_from([*INTERESTING_TEXTS, "\ud800", "F32", "w0", HUGE]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "dtype", ""]), inner, max_size=2),
    max_leaves=4,
)
names = st.sampled_from(["w0", "w1", "layer.0.w", "layer.10.w", "", "__metadata__", "é", "a\0b", "\ud800", "n" * 300])


def text_of(value: Any) -> str:
    """JSON, with numbers that json.dumps writes and others refuse, and one that has more digits than Python reads."""
    if value == HUGE:
        return "1" + "0" * 5000
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{text_of(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text_of, value)) + "]"
    return json.dumps(value)


@st.composite
def headers(draw: st.DrawFn) -> tuple[bytes, int]:
    """A header that is almost valid, as bytes, and the size of the data behind it."""
    rows: list[tuple[str, Any]] = []
    at = 0
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(sorted(TYPES)))
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 4, 8]), max_size=4))
        size = -(-_product(shape) * TYPES[dtype] // 8)
        entry: dict[str, Any] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
        odd = draw(st.integers(0, 24))
        if odd == 0:
            entry[draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))] = draw(json_values)
        elif odd == 1:
            del entry[draw(st.sampled_from(sorted(entry)))]
        elif odd == 2:
            entry["data_offsets"][draw(st.integers(0, 1))] += draw(st.sampled_from([-1, 1, 8, -8, 2**63]))
        elif odd == 3:
            entry["shape"].append(draw(st.sampled_from([1, 2**31, 2**32, 2**63, 2**64 - 1, 2**64, -1, 1.0])))
        elif odd == 4:
            entry["shape"] += [1] * 70
        rows.append((f"w{number}" if draw(st.integers(0, 12)) else draw(names), entry))
    if draw(st.integers(0, 2)) == 0:
        metadata: Any = draw(st.dictionaries(names, st.sampled_from(["w0", "pt", "", "w9"]), max_size=2))
        rows.append(("__metadata__", metadata if draw(st.integers(0, 6)) else draw(json_values)))
    if draw(st.integers(0, 12)) == 0 and rows:
        rows.append(draw(st.sampled_from(rows)))
    order = draw(st.permutations(rows))
    text = "{" + ",".join(f"{json.dumps(k)}:{text_of(v)}" for k, v in order) + "}"
    if draw(st.integers(0, 12)) == 0:
        text = draw(st.sampled_from([text_of(draw(json_values)), " " + text, text + "}", "\ufeff" + text, "[" * 5000]))
    text += draw(st.sampled_from([""] * 4 + [" ", " " * 7, " " * 4096, "\n", "\0", "\t "]))
    return text.encode("utf-8", "surrogatepass"), max(0, at + draw(st.sampled_from([0] * 9 + [-1, 1, 4096])))


def _product(shape: list[int]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


@lengths(200, 30000)
def test_headers_that_are_almost_valid(worker: TrialWorker, tmp_path: Path, examples: int) -> None:
    def trial(case: tuple[bytes, int, int | None]) -> None:
        header, nbytes, length = case
        data = bytes(i * 37 % 251 for i in range(nbytes))
        path = raw_safetensors(tmp_path / "case.safetensors", header, data, length=length)
        worker.run("safetensors_file", path)

    lengths_of_headers = st.sampled_from([None] * 12 + [0, 1, 8, 2**31, 2**63, 2**64 - 1])
    fuzz(examples, st.builds(lambda h, n: (*h, n), headers(), lengths_of_headers), trial)


@lengths(60, 20000)
def test_files_that_were_damaged_in_several_places(worker: TrialWorker, tmp_path: Path, examples: int) -> None:
    arrays = {"a": bits("float32", (2, 3)), "b": bits("bool", (5,)), "c": bits("bfloat16", (0, 4))}
    arrays["d"] = bits("int8", ())
    whole = save_safetensors(tmp_path / "whole.safetensors", arrays, {"tied": "a", "format": "pt"}).read_bytes()

    def trial(content: bytes) -> None:
        path = tmp_path / "case.safetensors"
        path.write_bytes(content)
        worker.run("safetensors_file", path)

    fuzz(examples, changed_bytes(whole), trial)


# Indexes

shards = st.sampled_from(
    ["s1.safetensors"] * 6
    + ["s2.safetensors"] * 6
    + ["./s1.safetensors", "sub/../s1.safetensors", "absent", "", ".", "..", "/etc/passwd", "/dev/zero", "model.onnx"]
    + ["https://h/s.safetensors", "file:/x", "a\0b", "\ud800", "n" * 300, "out", "*", "../x.safetensors", "i" * 5000]
)


@st.composite
def indexes(draw: st.DrawFn) -> bytes:
    weight_map: Any = {"a": "s1.safetensors", "b": "s1.safetensors", "c": "s2.safetensors"}
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(["a", "b", "c", "tied", "d", "", "\ud800", "é"]))
        if draw(st.integers(0, 4)) == 0:
            weight_map.pop(name, None)
        else:
            weight_map[name] = draw(shards) if draw(st.integers(0, 5)) else draw(json_values)
    index: dict[str, Any] = {"metadata": {"total_size": 25}, "weight_map": weight_map}
    odd = draw(st.integers(0, 14))
    if odd < 3:
        index[draw(st.sampled_from(["metadata", "weight_map", "more"]))] = draw(json_values)
    elif odd < 8:
        index["metadata"] = {"total_size": draw(json_values)}
    elif odd == 8:
        del index[draw(st.sampled_from(["metadata", "weight_map"]))]
    text = text_of(index)
    if draw(st.integers(0, 12)) == 0:
        text = draw(st.sampled_from(["\ufeff" + text, text * 2, text[:-1], text_of(draw(json_values)), "[" * 100_000]))
    return text.encode("utf-8", "surrogatepass")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    arrays = {"a": bits("float32", (2,)), "b": bits("float32", (3,), 1)}
    save_safetensors(tmp_path / "s1.safetensors", arrays, {"tied": "a"})
    save_safetensors(tmp_path / "s2.safetensors", {"c": bits("int8", (5,), 2)})
    (tmp_path / "sub").mkdir()
    (tmp_path / "model.onnx").write_bytes(b"no model")
    return tmp_path


@lengths(100, 20000)
def test_any_index(worker: TrialWorker, checkpoint: Path, examples: int) -> None:
    def trial(content: bytes) -> None:
        path = checkpoint / "model.safetensors.index.json"
        path.write_bytes(content)
        worker.run("stream_weights", path)

    fuzz(examples, indexes(), trial)
