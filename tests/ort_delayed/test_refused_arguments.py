"""What a caller gives by mistake is refused by its name, in a sentence that says what to give instead."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy
from stand_ins import write_stand_ins

import ort_delayed


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_stand_ins(tmp_path) / "model.onnx")


@pytest.mark.parametrize("given", [None, {"a": 1}])
def test_what_is_not_session_options(model: str, given: object) -> None:
    calls: list[Callable[[Any], object]] = [
        lambda options: ort_delayed.prepare_model(model, options),
        lambda options: ort_delayed.stream_install(model, options, ram_budget=1 << 28),
        ort_delayed.register_custom_ops,
    ]
    if given is not None:
        calls.append(lambda options: ort_delayed.InferenceSession(model, options))
    for call in calls:
        with pytest.raises(TypeError, match=r"^sess_options must be onnxruntime\.SessionOptions, found "):
            call(given)


def test_min_bytes_that_is_no_number(model: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="min_bytes must be a whole number of bytes, found '4KiB'"):
        ort_delayed.convert_model(model, tmp_path / "d.onnx", min_bytes="4KiB")  # type: ignore[arg-type]
    report = ort_delayed.convert_model(model, tmp_path / "d.onnx", min_bytes=np.int64(4096))  # type: ignore[arg-type]
    assert report.count("referenced")


@pytest.mark.parametrize("write", [ort_delayed.convert_model, ort_delayed.pack_model, ort_delayed.restore_model])
def test_models_in_memory_and_safetensors_files(write: Callable[..., object], tmp_path: Path) -> None:
    for given in (onnx.ModelProto(), b"model"):
        with pytest.raises(TypeError, match="the source must be the path of a model file, found"):
            write(given, tmp_path / "d.onnx")
    with pytest.raises(TypeError, match="the destination must be the path of a model file, found"):
        write(tmp_path / "d.onnx", onnx.ModelProto())
    safetensors.numpy.save_file({"w": np.ones(9, np.float32)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="is a safetensors file, which holds weights and no model"):
        write(tmp_path / "w.safetensors", tmp_path / "d.onnx")


def test_budgets_that_are_texts_or_hardly_meant(model: str) -> None:
    with pytest.raises(ValueError, match=r"found '64MiB'; RamBudget\.parse takes a text"):
        ort_delayed.InferenceSession(model, ram_budget="64MiB")  # type: ignore[arg-type]
    with pytest.raises(ort_delayed.RamBudgetExceeded, match="did you mean MiB"):
        ort_delayed.InferenceSession(model, ram_budget=256)
    with pytest.raises(ort_delayed.RamBudgetExceeded) as caught:
        ort_delayed.InferenceSession(model, ram_budget=1 << 17)
    assert "did you mean" not in str(caught.value)


def test_a_directory_instead_of_a_model(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="a directory was given where a model file is needed"):
        ort_delayed.InferenceSession(tmp_path, ram_budget=1 << 28)


def test_a_weights_dir_that_does_not_exist(model: str, tmp_path: Path) -> None:
    ort_delayed.convert_model(model, tmp_path / "d.onnx")
    nowhere = str(tmp_path / "nowhere")
    calls: list[Callable[[], object]] = [
        lambda: ort_delayed.InferenceSession(tmp_path / "d.onnx", weights_dir=nowhere),
        lambda: ort_delayed.InferenceSession(tmp_path / "d.onnx", weights_dir=nowhere, ram_budget=1 << 28),
        lambda: ort_delayed.prepare_model(tmp_path / "d.onnx", onnxruntime.SessionOptions(), weights_dir=nowhere),
    ]
    for call in calls:
        with pytest.raises(FileNotFoundError, match="weights_dir names no directory that exists"):
            call()


def test_a_budget_session_names_the_model_whose_data_file_has_gone(model: str) -> None:
    os.unlink(model + ".data")
    with pytest.raises(FileNotFoundError, match="needs a data file that is not there") as caught:
        ort_delayed.InferenceSession(model, ram_budget=1 << 28)
    assert repr(os.path.realpath(model)) in str(caught.value)
    assert caught.value.filename == os.path.realpath(model + ".data")
