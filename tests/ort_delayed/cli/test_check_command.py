"""``ort-delayed check``."""

from __future__ import annotations

import json


def test_a_sound_model(command):
    status, out, err = command("check", "model.onnx")
    assert (status, err) == (0, "")
    assert "no faults" in out


def test_one_line_per_fault(command, files):
    for shard in (files / "artifacts").glob("*.safetensors"):
        shard.write_bytes(b"short")
    status, out, err = command("check", "artifacts")
    assert status == 1
    assert "cannot be used" in out
    assert "no faults" not in out
    assert len(err.splitlines()) == 2
    assert all(line.startswith("fault: ") for line in err.splitlines())


def test_json(command, files):
    (files / "model.onnx.data").unlink()
    status, out, err = command("check", "model.onnx", "--json")
    assert (status, err) == (1, "")
    assert len(json.loads(out)["faults"]) == 1


def test_weights_dir(command, files):
    (files / "sub").mkdir()
    command("convert", "inline.onnx", "d.onnx")
    command("convert", "d.onnx", "sub/d.onnx")
    status, out, _ = command("check", "sub/d.onnx")
    assert status == 0
    assert "note: " in out
    assert command("check", "sub/d.onnx", "--weights-dir", "sub")[0] == 1
