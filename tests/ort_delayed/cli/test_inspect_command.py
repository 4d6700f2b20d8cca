"""``ort-delayed inspect``."""

from __future__ import annotations

import json

from stand_ins import encoder_weights


def test_a_model(command, files):
    status, out, err = command("inspect", "model.onnx")
    assert (status, err) == (0, "")
    assert "external data files, 14 tensors" in out
    assert "input   input_ids       int64    [batch, sequence]" in out
    assert "layer-0001" in out
    assert "[1] model.onnx.data" in out


def test_every_tensor(command):
    _, out, _ = command("inspect", "artifacts", "--tensors")
    for name in encoder_weights():
        assert name in out
    assert "256x256" in out


def test_json(command):
    status, out, _ = command("inspect", "artifacts", "--json")
    assert status == 0
    found = json.loads(out)
    assert found["source_format"] == "safetensors"
    assert {t["name"] for t in found["tensors"]} == set(encoder_weights())
    assert found["total_bytes"] == sum(w.nbytes for w in encoder_weights().values())


def test_delayed_nodes(command):
    command("convert", "model.onnx", "d.onnx")
    _, out, _ = command("inspect", "d.onnx")
    assert "delayed, read at every run, 5 tensors" in out
