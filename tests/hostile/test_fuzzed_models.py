"""Model files that were damaged, or written by somebody who means harm, through everything that takes a model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from fuzzing import fuzz, lengths
from hypothesis import strategies as st
from mutations import changed_bytes, changed_proto
from onnx import TensorProto, helper, numpy_helper
from packable_models import PACKABLE
from trial_worker import TrialWorker

MODELS = Path(__file__).resolve().parent.parent.parent / "models"


def _kept() -> onnx.ModelProto:
    """Weights of every storage: raw, typed, external, in Constant nodes, in a function, in an If."""
    w = np.arange(16, dtype=np.float32).reshape(4, 4)
    typed = helper.make_tensor("typed", TensorProto.FLOAT, [4, 4], w.ravel().tolist())
    outside = helper.make_tensor("outside", TensorProto.FLOAT, [4, 4], w.tobytes(), raw=True)
    outside.ClearField("raw_data")
    outside.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "shared_weight.bin"), ("offset", "0"), ("length", "64")):
        outside.external_data.add(key=key, value=value)
    branch = helper.make_graph(
        [helper.make_node("Identity", ["inner"], ["b"])],
        "branch",
        [],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, [4, 4])],
        [numpy_helper.from_array(w, "inner")],
    )
    nodes = [
        helper.make_node("Constant", [], ["constant"], value=numpy_helper.from_array(w)),
        helper.make_node("Constant", [], ["floats"], value_floats=[1.0, 2.0, 3.0, 4.0]),
        helper.make_node("If", ["flag"], ["branched"], then_branch=branch, else_branch=branch),
        helper.make_node("F", ["typed"], ["called"], domain="local"),
        helper.make_node("Sum", ["x", "outside", "constant", "floats", "branched", "called"], ["y"]),
    ]
    body = [
        helper.make_node("Constant", [], ["one"], value=numpy_helper.from_array(w)),
        helper.make_node("Add", ["a", "one"], ["b"]),
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "F", ["a"], ["b"], body, opsets[:1])
    graph = helper.make_graph(
        nodes,
        "graph",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4]),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 4])],
        [typed, outside],
    )
    return helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=8)


SEEDS: dict[str, Callable[[], onnx.ModelProto]] = {
    p.name: lambda p=p: onnx.load(p, load_external_data=False)  # type: ignore[misc]
    for p in sorted(MODELS.glob("*.onnx"))
    if not p.name.startswith("type_") or p.name in ("type_bool.onnx", "type_complex64.onnx", "type_int64.onnx")
}
SEEDS["kept"] = _kept
SMALL = {n: p for n, p in PACKABLE.items() if n in ("loop", "branches", "small_only", "quantized")}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the files that the models name."""
    made = tmp_path_factory.mktemp("models")
    for path in MODELS.glob("*.bin"):
        shutil.copy(path, made)
    return made


def written(directory: Path, wire: bytes) -> Path:
    """The case, in a file of its own: an earlier one may still be mapped somewhere."""
    path = directory / "case.onnx"
    path.unlink(missing_ok=True)
    path.write_bytes(wire)
    return path


seeds = st.sampled_from(sorted(SEEDS)).map(lambda name: SEEDS[name]())
changed_fields = seeds.flatmap(changed_proto)
damaged = seeds.map(lambda model: model.SerializeToString()).flatmap(changed_bytes)


@lengths(60, 6000)
def test_reading_and_converting_models_whose_fields_were_changed(
    worker: TrialWorker, directory: Path, examples: int
) -> None:
    fuzz(examples, changed_fields, lambda wire: worker.run("read_model", written(directory, wire)))


@lengths(60, 6000)
def test_sessions_on_models_whose_fields_were_changed(worker: TrialWorker, directory: Path, examples: int) -> None:
    def trial(wire: bytes) -> None:
        worker.run("run_model", written(directory, wire), upstream="plain_session")

    fuzz(examples, changed_fields, trial)


@lengths(40, 6000)
def test_reading_and_converting_damaged_files(worker: TrialWorker, directory: Path, examples: int) -> None:
    fuzz(examples, damaged, lambda wire: worker.run("read_model", written(directory, wire)))


@lengths(30, 6000)
def test_sessions_on_damaged_files(worker: TrialWorker, directory: Path, examples: int) -> None:
    def trial(wire: bytes) -> None:
        worker.run("run_model", written(directory, wire), upstream="plain_session")

    fuzz(examples, damaged, trial)


@lengths(20, 2000)
def test_packing_models_whose_fields_were_changed(worker: TrialWorker, directory: Path, examples: int) -> None:
    def trial(wire: bytes) -> None:
        worker.run("pack_model", written(directory, wire), upstream="plain_session")

    fuzz(examples, changed_fields, trial)
