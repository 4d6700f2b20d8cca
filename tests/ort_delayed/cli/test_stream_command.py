"""``ort-delayed stream``."""

from __future__ import annotations

import json

from stand_ins import encoder_weights

TOTAL = sum(w.nbytes for w in encoder_weights().values())


def test_every_group_and_the_report(command):
    status, out, err = command("stream", "artifacts", "--ram", "64MiB")
    assert (status, err) == (0, "")
    for group in ("embeddings", "layer-0000", "layer-0001", "layer-0002", "classifier"):
        assert group in out
    assert "5 groups, 14 tensors" in out
    assert "budget 64.0 MiB" in out


def test_layers_per_group(command):
    _, out, _ = command("stream", "checkpoint", "--ram", "64MiB", "--layers-per-group", "2")
    assert "embeddings..layer-0000" in out


def test_json(command):
    status, out, _ = command("stream", "artifacts", "--ram", "64MiB", "--json")
    assert status == 0
    found = json.loads(out)
    assert found["report"]["bytes_mapped"] == TOTAL
    assert [s["bytes_done"] for s in found["steps"]][-1] == TOTAL
    assert found["within_budget"] is True


def test_a_budget_that_is_too_small_is_1_and_says_what_would_do(command):
    status, out, err = command("stream", "artifacts", "--ram", "100KB")
    assert (status, out) == (1, "")
    assert "bytes are needed here" in err
    assert len(err.splitlines()) == 1


def test_inline_weights_cannot_be_streamed(command):
    status, _, err = command("stream", "inline.onnx", "--ram", "64MiB")
    assert status == 1
    assert "save_as_external_data" in err
