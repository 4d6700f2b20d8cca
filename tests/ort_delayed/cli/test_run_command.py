"""``ort-delayed run``: inputs, measurements, the comparison, budgets, timelines."""

from __future__ import annotations

import csv
import json

import numpy as np
import onnxruntime
import pytest
from stand_ins import feeds
from weighted_models import initializer, model, node, save, value

from ort_delayed.cli import feeds as made_feeds
from ort_delayed.cli.errors import CommandError
from ort_delayed.cli.measuring import largest_difference
from ort_delayed.cli.timeline import MemoryTimeline, Timeline, csv_text
from ort_delayed.inspecting import ModelValue


def test_a_run_and_the_axes_that_it_assumed(command):
    status, out, err = command("run", "model.onnx", "--repeat", "2", "--dim", "sequence=4")
    assert (status, err) == (0, "")
    assert "inputs: input_ids 1x4, attention_mask 1x4, made up with seed 0" in out
    assert "note: axes of length 1 unless --dim says otherwise: batch" in out
    assert "ort-delayed" in out
    assert "later runs" in out


def test_feeds_and_save(command, files):
    status, out, _ = command("run", "model.onnx", "--feeds", "feeds.npz", "--save", "out.npz", "--repeat", "1")
    assert status == 0
    assert "made up" not in out
    expected = onnxruntime.InferenceSession("model.onnx").run(None, feeds())[0]
    with np.load(files / "out.npz") as found:
        assert found.files == ["logits"]
        np.testing.assert_array_equal(found["logits"], expected)


def test_a_budget_is_kept_and_reported(command):
    status, out, _ = command("run", "model.onnx", "--ram", "64MiB", "--repeat", "2")
    assert status == 0
    assert "budget 64.0 MiB, peak " in out
    assert " of the clock, " in out


def test_a_budget_that_is_too_small_is_1(command):
    status, out, err = command("run", "model.onnx", "--ram", "1MiB")
    assert (status, out) == (1, "")
    assert "RAM budget exceeded" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", ["model.onnx", "delayed.onnx"])
def test_compare(command, files, name):
    command("convert", "model.onnx", "delayed.onnx")
    status, out, err = command("run", name, "--compare", "--repeat", "2", "--json", "--dim", "batch=2")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert set(found["rows"]) == {"ort-delayed", "plain onnxruntime"}
    assert all(len(row["run_seconds"]) == 2 for row in found["rows"].values())
    assert found["largest_difference"] <= 1e-5
    assert found["feeds"]["input_ids"] == [2, 1]


def test_compare_prints_both_rows(command):
    _, out, _ = command("run", "model.onnx", "--compare", "--repeat", "1", "--ram", "64MiB")
    assert "plain onnxruntime  " in out
    assert "largest difference to plain onnxruntime: " in out


def test_plain_onnxruntime_that_fails_is_said_in_one_line(command, files, monkeypatch):
    import ort_delayed.cli.plain_process

    monkeypatch.setattr(ort_delayed.cli.plain_process.sys, "executable", "/bin/false")
    status, _, err = command("run", "model.onnx", "--compare", "--repeat", "1")
    assert status == 1
    assert err == "ort-delayed run: error: plain onnxruntime failed: exit status 1\n"


# --- Inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"input_ids": np.zeros((1, 1), np.int64)}, "missing 'attention_mask', unknown none"),
        (feeds() | {"extra": np.zeros(1)}, "missing none, unknown 'extra'"),
    ],
)
def test_feeds_of_other_names_are_refused(command, files, arrays, expected):
    np.savez(files / "feeds.npz", **arrays)
    status, _, err = command("run", "model.onnx", "--feeds", "feeds.npz")
    assert status == 1
    assert expected in err


@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_feeds_that_are_no_npz_file(command, files, content):
    (files / "feeds.npz").write_bytes(content)
    status, _, err = command("run", "model.onnx", "--feeds", "feeds.npz")
    assert status == 1
    assert "is not an .npz file" in err


def test_feeds_of_one_array_and_of_pickles(command, files):
    np.save(files / "feeds.npy", np.zeros(1))
    assert "is not an .npz file" in command("run", "model.onnx", "--feeds", "feeds.npy")[2]
    np.savez(files / "feeds.npz", input_ids=np.array([{}]), attention_mask=np.zeros(1))
    assert "is not an .npz file" in command("run", "model.onnx", "--feeds", "feeds.npz")[2]


def test_feeds_that_the_model_refuses_are_1(command, files):
    np.savez(files / "feeds.npz", input_ids=np.zeros((1, 1), np.float32), attention_mask=np.zeros((1, 1), np.int64))
    status, _, err = command("run", "model.onnx", "--feeds", "feeds.npz")
    assert status == 1
    assert "the array 'input_ids' is of type float32, the model takes int64" in err


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "bool", "int8", "int32", "int64", "uint8", "uint64"])
def test_made_up_inputs(kind):
    found = made_feeds.random_feeds([ModelValue("x", kind, ("n", 3, "?"))], {"n": 50}, 0)["x"]
    assert (found.shape, found.dtype.name) == ((50, 3, 1), kind)
    again = made_feeds.random_feeds([ModelValue("x", kind, ("n", 3, "?"))], {"n": 50}, 0)["x"]
    np.testing.assert_array_equal(found, again)
    if not kind.startswith("float"):
        assert set(np.unique(found)) == {0, 1}


def test_an_axis_of_length_0():
    assert made_feeds.random_feeds([ModelValue("past", "float32", (1, "past", 2))], {"past": 0}, 0)["past"].size == 0


@pytest.mark.parametrize(("kind", "shape"), [("float32", None), ("STRING (8)", ("n",)), ("bfloat16", (1,))])
def test_inputs_that_cannot_be_made_up(kind, shape):
    with pytest.raises(CommandError, match="give --feeds"):
        made_feeds.random_feeds([ModelValue("x", kind, shape)], {}, 0)


# --- Differences ------------------------------------------------------------------------------------------------------


def test_the_largest_difference():
    a = {"y": np.array([1.0, np.nan, np.inf, 4.0]), "s": np.array(["x"])}
    b = {"y": np.array([1.0, np.nan, np.inf, 4.5]), "s": np.array(["x"])}
    assert largest_difference(a, a) == 0.0
    assert largest_difference(a, b) == 0.5
    assert np.isnan(largest_difference({"y": np.array([np.nan])}, {"y": np.array([1.0])}))
    assert largest_difference({"y": np.array([True])}, {"y": np.array([False])}) == 1.0
    with pytest.raises(CommandError, match="shape"):
        largest_difference({"y": np.zeros(2)}, {"y": np.zeros(3)})


# --- Timelines --------------------------------------------------------------------------------------------------------


def test_a_timeline_as_csv(command, files):
    arguments = ("--ram", "64MiB", "--repeat", "30", "--timeline", "memory.csv", "--dim", "batch=64")
    status, out, _ = command("run", "model.onnx", *arguments)
    assert status == 0
    assert "timeline: memory.csv" in out
    with open(files / "memory.csv") as file:
        rows = list(csv.DictReader(file))
    # Samples are taken every few milliseconds, if the machine has time for that: a run may have none.
    phases = {row["phase"] for row in rows}
    assert "construct" in phases
    assert len(phases & {f"run {n}" for n in range(1, 31)}) >= 3
    assert {row["layer"] for row in rows} & {"embeddings", "layer-0000", "layer-0001", "layer-0002"}
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)
    assert all(int(row["anonymous_bytes"]) > 0 < int(row["file_bytes"]) for row in rows)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_timeline_as_a_picture(command, files, ending):
    pytest.importorskip("matplotlib")
    name = f"memory.{ending}"
    status, _, _ = command("run", "model.onnx", "--ram", "64MiB", "--timeline", name)
    assert status == 0
    content = (files / name).read_bytes()
    assert content.startswith(b"\x89PNG") if ending == "png" else b"<svg" in content


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(command, files, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, out, err = command("run", "model.onnx", "--timeline", "memory.png")
    assert (status, out) == (2, "")
    assert "ort-delayed[plot]" in err


def test_a_run_that_breaks_its_budget_leaves_its_timeline(command, files):
    graph = model(
        [node("Tile", ["x", "repeats"], ["t"]), node("Add", ["t", "t"], ["y"])],
        [value("x", ["n"])],
        [value("y", ["m"])],
        [initializer("repeats", np.array([1 << 10]))],
    )
    save(graph, files / "large.onnx")
    arguments = ("--ram", "64MiB", "--dim", "n=65536", "--timeline", "memory.csv")
    status, _, err = command("run", "large.onnx", *arguments)
    assert status == 1
    assert "RAM budget exceeded" in err
    assert (files / "memory.csv").read_text().count("\n") > 2


def test_many_samples_are_thinned(monkeypatch):
    from ort_delayed.cli import timeline

    monkeypatch.setattr(timeline, "_MOST_SAMPLES", 8)
    with MemoryTimeline() as watched, watched.phase("run 1"):
        while watched._interval < 0.008:
            pass
    found = watched.timeline(labels=(), budget_bytes=None)
    assert len(found.seconds) < 20
    assert list(found.seconds) == sorted(found.seconds)


def test_labels_and_phases_of_samples():
    found = Timeline(
        (0.0, 1.0, 2.0), (1, 1, 1), (2, 2, 2), (-1, 0, 7), (("run 1", 0.5, 1.5),), ("embeddings",), 3, None
    )
    assert [found.label(i) for i in range(3)] == ["", "embeddings", ""]
    assert [found.phase(i) for i in range(3)] == ["", "run 1", ""]
    assert csv_text(found).splitlines()[2] == "1.000000,1,2,run 1,embeddings"
