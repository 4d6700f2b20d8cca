"""Model files, weights and directories whose names are no text: an error that says so, or it works."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
from conversions import N, X, vector_model
from weighted_models import initializer, run_delayed, run_plain, same_bits, save, weights

import ort_delayed
from ort_delayed.checking import check_weights
from ort_delayed.inspecting import inspect_weights
from ort_delayed.loader.external_data import ExternalDataError
from ort_delayed.ops import make_node
from ort_delayed.ops.errors import DelayedInitializerValueError
from ort_delayed.planning import plan_session

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux only")
ODD = "\udcff"
LARGE = 20_000  # of float32, which stay in the model file


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = vector_model(initializer("w0", weights(N)))
    made.graph.initializer.append(initializer("unused", weights(LARGE)))
    return save(made, tmp_path / "m.onnx")


def odd_copy(source: Path) -> Path:
    return Path(shutil.copy(source, source.with_name(f"{ODD}.onnx")))


def test_what_only_reads_a_model_takes_any_name(source: Path) -> None:
    path = odd_copy(source)
    assert check_weights(path)
    assert inspect_weights(path).source == str(path)


def test_a_model_in_such_a_directory_runs_delayed(source: Path, tmp_path: Path) -> None:
    """Plain onnxruntime does not open it; delayed nodes name what stands beside the model."""
    (tmp_path / ODD).mkdir()
    converted = tmp_path / ODD / "c.onnx"
    ort_delayed.convert_model(source, converted)
    assert same_bits(run_delayed(converted, X), run_plain(source, X))


def external(path: Path) -> Path:
    onnx.save_model(onnx.load(path), path.with_name("e.onnx"), save_as_external_data=True, location="e.bin")
    return path.with_name("e.onnx")


def in_odd_directory(path: Path) -> Path:
    directory = path.parent / ODD
    directory.mkdir()
    for name in ("e.onnx", "e.bin"):
        shutil.copy(path.with_name(name), directory)
    return directory / "e.onnx"


WAYS: dict[str, Callable[[Path], object]] = {
    "budget": lambda path: ort_delayed.InferenceSession(path, ram_budget=1 << 28),
    "plan": lambda path: plan_session(path, 1 << 28),
    "pack": lambda path: ort_delayed.pack_model(path, path.parent.parent / "p.onnx"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_would_have_to_name_itself_is_refused(source: Path, way: str) -> None:
    made = onnx.load(source)
    made.graph.initializer[0].raw_data = weights(N).tobytes()
    made.graph.initializer.append(initializer("w1", weights(LARGE)))
    path = odd_copy(save(made, source))
    with pytest.raises(ExternalDataError, match=r"'.*udcff.*' is not UTF-8 text, so no model can name it"):
        WAYS[way](path)


@pytest.mark.parametrize("way", [*WAYS, "install"])
def test_a_directory_that_onnxruntime_would_have_to_open_is_refused(source: Path, way: str) -> None:
    path = in_odd_directory(external(source))

    def install(path: Path) -> object:
        return ort_delayed.stream_install(str(path), onnxruntime.SessionOptions(), ram_budget=1 << 28)

    with pytest.raises(ExternalDataError, match=r"udcff.*is not UTF-8 text"):
        {**WAYS, "install": install}[way](path)


def test_a_destination_whose_data_file_would_have_such_a_name_is_refused(source: Path, tmp_path: Path) -> None:
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match="not UTF-8"):
        ort_delayed.convert_model(source, tmp_path / f"{ODD}.onnx")
    with pytest.raises(ExternalDataError, match="not UTF-8"):
        ort_delayed.pack_model(external(source), tmp_path / f"{ODD}.onnx")
    ort_delayed.convert_model(source, tmp_path / "c.onnx")
    with pytest.raises(ValueError, match="not UTF-8"):
        ort_delayed.convert_model(tmp_path / "c.onnx", tmp_path / f"{ODD}.onnx", copy=True)
    (tmp_path / "below").mkdir()
    with pytest.raises(ExternalDataError, match="not UTF-8"):
        ort_delayed.restore_model(tmp_path / "c.onnx", tmp_path / "below" / f"{ODD}.onnx")
    after = {name for name in os.listdir(tmp_path) if name[:2] not in ("c.", "e.", "be")}
    assert sorted(after) == before
    assert os.listdir(tmp_path / "below") == []


def test_a_node_cannot_name_such_a_file() -> None:
    for name in (ODD, "\ud800"):
        with pytest.raises(DelayedInitializerValueError, match="filename is not UTF-8 text"):
            make_node("w", filename=name, shape=[1], dtype=int(onnx.TensorProto.FLOAT))
    assert make_node("w", filename="é", shape=[1], dtype=int(onnx.TensorProto.FLOAT)).attribute
