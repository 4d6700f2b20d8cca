"""``ort-delayed convert``, ``restore`` and ``pack``."""

from __future__ import annotations

import json
import os

import numpy as np
import onnxruntime
import pytest
from stand_ins import feeds

import ort_delayed


def outputs(path: str) -> np.ndarray:
    return ort_delayed.InferenceSession(path).run(None, feeds())[0]


def test_convert_and_restore(command, files):
    status, out, err = command("convert", "inline.onnx", "d.onnx")
    assert (status, err) == (0, "")
    assert "encoder.layer.2.dense.weight       float32   256.0 KiB  written\n" in out
    assert "kept (1)\n" in out
    assert "\n(1) smaller than min_bytes=4096\n" in out
    assert "data file: " in out
    status, out, _ = command("restore", "d.onnx", "r.onnx")
    assert status == 0
    assert "referenced" in out
    expected = onnxruntime.InferenceSession("inline.onnx").run(None, feeds())[0]
    restored = onnxruntime.InferenceSession("r.onnx").run(None, feeds())[0]
    np.testing.assert_allclose(outputs("d.onnx"), expected, atol=1e-5)
    np.testing.assert_allclose(restored, expected, atol=1e-5)


def test_options_of_convert(command, files):
    arguments = ("--load-device", "cpu", "--min-bytes", "1", "--select", "*.bias", "--select", "classifier.*", "--copy")
    status, out, _ = command("convert", "model.onnx", "d.onnx", *arguments, "--json")
    assert status == 0
    report = json.loads(out)
    written = {t["name"] for t in report["tensors"] if t["action"] == "written"}
    assert written == {"classifier.weight"} | {
        f"encoder.layer.{i}.{p}.bias" for i in range(3) for p in ("dense", "norm")
    }
    _, out, _ = command("inspect", "d.onnx", "--json")
    assert {t["storage"] for t in json.loads(out)["tensors"] if t["kind"] == "delayed node"} == {"cpu"}


def test_quiet_prints_totals_only(command):
    _, out, _ = command("convert", "inline.onnx", "d.onnx", "--quiet")
    assert "encoder.layer" not in out
    assert "written, 5 tensors" in out


@pytest.mark.parametrize("name", ["convert", "restore", "pack"])
def test_an_existing_destination_is_kept_unless_told_otherwise(command, files, name):
    (files / "out.onnx").write_bytes(b"precious")
    status, _, err = command(name, "model.onnx", "out.onnx")
    assert status == 1
    assert err == f"ort-delayed {name}: error: the destination 'out.onnx' exists; give --overwrite to replace it\n"
    assert (files / "out.onnx").read_bytes() == b"precious"
    assert command(name, "model.onnx", "out.onnx", "--overwrite")[0] == 0
    assert outputs("out.onnx").shape == (1, 8, 5)


def test_a_destination_in_no_directory(command):
    status, _, err = command("convert", "model.onnx", "nowhere/d.onnx")
    assert status == 1
    assert "does not exist" in err


def test_a_note_about_absolute_paths(command, files):
    (files / "sub").mkdir()
    _, out, _ = command("convert", "model.onnx", "sub/d.onnx")
    assert f"note: the model names '{files / 'model.onnx.data'}' by its absolute path" in out


def test_a_note_about_patterns_that_select_nothing(command, files):
    status, out, err = command("convert", "model.onnx", "d.onnx", "--select", "nothing*")
    assert (status, err) == (0, "")
    assert "note: no tensor has a name like 'nothing*', so that pattern selects nothing" in out
    assert "absolute path" not in out


def test_pack(command, files):
    status, out, err = command("pack", "inline.onnx", "p.onnx")
    assert (status, err) == (0, "")
    assert f"packed for onnxruntime {onnxruntime.__version__}" in out
    expected = onnxruntime.InferenceSession("inline.onnx").run(None, feeds())[0]
    np.testing.assert_array_equal(outputs("p.onnx"), expected)


def test_options_of_pack(command, files):
    status, out, _ = command("pack", "inline.onnx", "p.onnx", "--optimize", "basic", "--no-prepack", "--json")
    assert status == 0
    report = json.loads(out)
    assert (report["manifest"]["optimize"], report["manifest"]["prepack"]) == ("basic", False)
    assert all(w["packed_bytes"] == 0 for w in report["weights"])


def test_progress_is_told_up_to_the_end(files):
    for write in (ort_delayed.convert_model, ort_delayed.restore_model):
        seen: list[tuple[int, int]] = []
        source = "inline.onnx" if write is ort_delayed.convert_model else "d.onnx"
        os.makedirs("other", exist_ok=True)
        destination = "d.onnx" if write is ort_delayed.convert_model else "other/r.onnx"
        write(source, destination, progress=lambda *step, seen=seen: seen.append(step))
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1] > 1 << 20
