"""Packed models that were tampered with: their manifest, the entries about packed bytes, their data file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from fuzzing import fuzz, lengths
from hypothesis import strategies as st
from mutations import INTERESTING_INTEGERS, INTERESTING_TEXTS, changed_bytes, changed_proto
from packable_models import PACKABLE
from trial_worker import TrialWorker

from ort_delayed import pack_model
from ort_delayed.pack_manifest import MANIFEST_KEY

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(INTERESTING_INTEGERS)
    | st.sampled_from([0.5, 1e999, float("nan"), 2**70])
    | st.sampled_from([*INTERESTING_TEXTS, "\ud800", "all"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("offset"), inner),
    max_leaves=3,
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed model of one matrix and its data file."""
    directory = tmp_path_factory.mktemp("packed")
    source = directory / "source.onnx"
    onnx.save(PACKABLE["chain"]().model, source)
    pack_model(source, directory / "packed.onnx")
    source.unlink()
    return directory / "packed.onnx"


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value, as its holder and key."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += [(value, key), *places(inner)]
    return found


@st.composite
def manifests(draw: st.DrawFn, text: str) -> bytes:
    """A manifest's text with values replaced or taken out, or with bytes changed."""
    if draw(st.integers(0, 3)) == 0:
        return draw(changed_bytes(text.encode()))
    values = json.loads(text)
    for _ in range(draw(st.integers(1, 3))):
        holder, key = draw(st.sampled_from(places(values)))
        if draw(st.integers(0, 5)) == 0:
            del holder[key]
        else:
            holder[key] = draw(json_values)
    if draw(st.integers(0, 20)) == 0:
        return draw(st.sampled_from([b"[" * 100_000, b'{"format":' * 50_000, b'"' + b"9" * 5000 + b'"', b"9" * 5000]))
    return json.dumps(values).encode()


def _with_manifest(model: onnx.ModelProto, text: bytes) -> bytes:
    """The wire form of the model with that text, which may be none, as its manifest."""
    mark = b"\x01the text goes here\x01"
    for entry in model.metadata_props:
        if entry.key == MANIFEST_KEY:
            entry.value = (mark * (len(text) // len(mark) + 1))[: len(text)].decode()
            return model.SerializeToString().replace(entry.value.encode(), text, 1)
    raise AssertionError("no manifest")


@lengths(80, 8000)
def test_any_manifest(worker: TrialWorker, packed: Path, examples: int) -> None:
    model = onnx.load(packed, load_external_data=False)
    (text,) = [p.value for p in model.metadata_props if p.key == MANIFEST_KEY]

    def trial(changed: bytes) -> None:
        path = packed.with_name("case.onnx")
        path.write_bytes(_with_manifest(onnx.load(packed, load_external_data=False), changed) if changed else b"")
        worker.run("packed_model", path, upstream="default_session")

    fuzz(examples, manifests(text), trial)


@lengths(40, 4000)
def test_packed_models_whose_fields_were_changed(worker: TrialWorker, packed: Path, examples: int) -> None:
    model = onnx.load(packed, load_external_data=False)

    def trial(wire: bytes) -> None:
        path = packed.with_name("case.onnx")
        path.write_bytes(wire)
        worker.run("packed_model", path, upstream="default_session")

    fuzz(examples, changed_proto(model), trial)


@st.composite
def damaged_entries(draw: st.DrawFn, model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with one external-data entry of one weight changed."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    entries = [e for t in made.graph.initializer for e in t.external_data if e.key != "location"]
    entry = draw(st.sampled_from(range(len(entries))).map(entries.__getitem__))
    parts = entry.value.replace("|", ";").split(";")
    old = draw(st.sampled_from(parts))
    new = draw(st.sampled_from(INTERESTING_INTEGERS).map(str) | st.sampled_from(["", "x", "|", ";", "+", old + old]))
    entry.value = entry.value.replace(old, new, 1)
    if draw(st.integers(0, 5)) == 0:
        entry.key = draw(st.sampled_from(["prepacked_", "prepacked_x", "prepacked_" + "9" * 5000, "length", "x"]))
    return made


@lengths(40, 4000)
def test_entries_about_packed_bytes(worker: TrialWorker, packed: Path, examples: int) -> None:
    def trial(made: onnx.ModelProto) -> None:
        path = packed.with_name("case.onnx")
        path.write_bytes(made.SerializeToString())
        worker.run("packed_model", path, upstream="default_session")

    fuzz(examples, damaged_entries(onnx.load(packed, load_external_data=False)), trial)


@lengths(12, 1000)
def test_damaged_data_files(worker: TrialWorker, packed: Path, tmp_path: Path, examples: int) -> None:
    (data,) = packed.parent.glob("*.weights")
    content = data.read_bytes()
    shutil.copy(packed, tmp_path)

    def trial(changes: list[tuple[int, bytes]]) -> None:
        damaged = bytearray(content)
        for place, blob in changes:
            start = place * len(damaged) // 1000
            damaged[start : start + len(blob)] = blob
        (tmp_path / data.name).unlink(missing_ok=True)
        (tmp_path / data.name).write_bytes(damaged)
        worker.run("packed_model", tmp_path / packed.name, upstream="default_session")

    blobs = st.sampled_from([b"\xff" * 4096, bytes(64 << 10), b"x", b"\x80" * 100_000])
    fuzz(examples, st.lists(st.tuples(st.integers(0, 999), blobs), min_size=1, max_size=3), trial)
