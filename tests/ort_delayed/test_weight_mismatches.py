"""What does not fit between a model and its weights: found before anything is copied, all of it, with what to do."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from checkpoints import save_safetensors
from installable_models import chain, chain_weights, graph_model, node, run, save_external, value

import ort_delayed
from ort_delayed.install_errors import WeightMismatchError

BUDGET = 1 << 30
FIRST, SECOND = "encoder.layer.0.weight", "encoder.layer.1.weight"


@pytest.fixture
def model(tmp_path: Path) -> str:
    weights = chain_weights(2)
    return save_external(tmp_path / "model.onnx", chain(weights), weights)


@pytest.fixture(autouse=True)
def _nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("ort_delayed.weight_copying.read_into", never)
    monkeypatch.setattr("ort_delayed.install_preparing.read_into", never)


def refused(model: str, tmp_path: Path, tensors: dict[str, np.ndarray], **settings: Any) -> WeightMismatchError:
    source = save_safetensors(tmp_path / "c" / "w.safetensors", tensors)
    options = onnxruntime.SessionOptions()
    with pytest.raises(WeightMismatchError) as caught:
        ort_delayed.stream_install(model, options, ram_budget=BUDGET, weights=source, **settings)
    assert "nothing has been copied" in str(caught.value)
    run(model, options, {"x": np.ones((1, 16), np.float32)})  # the options are as they were
    return caught.value


def test_missing_and_unknown_names_are_both_listed(model: str, tmp_path: Path) -> None:
    weights = chain_weights(2)
    error = refused(model, tmp_path, {FIRST: weights[FIRST], "a": np.ones(3, np.float32), "b": np.ones(4, np.float32)})
    assert error.missing == (SECOND,)
    assert error.unknown == ("a", "b")
    assert f"Initializers that the weights do not have (1): '{SECOND}' (float32 [16, 16])" in str(error)
    assert "Tensors that the model does not know (2): 'a' (float32 [3]); 'b' (float32 [4])" in str(error)
    assert "name_map" in str(error)


def test_unknown_tensors_alone_are_refused_unless_they_are_allowed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {**chain_weights(2), "pooler.weight": np.ones(3, np.float32)}
    error = refused(model, tmp_path, tensors)
    assert (error.missing, error.unknown) == ((), ("pooler.weight",))
    assert "allow_unused_tensors=True" in str(error)
    monkeypatch.undo()
    ort_delayed.stream_install(
        model,
        onnxruntime.SessionOptions(),
        ram_budget=BUDGET,
        weights=tmp_path / "c" / "w.safetensors",
        allow_unused_tensors=True,
    )


def test_other_element_types_and_shapes_are_all_named(model: str, tmp_path: Path) -> None:
    weights = chain_weights(2)
    error = refused(model, tmp_path, {FIRST: weights[FIRST].astype(np.float16), SECOND: np.ones((16, 17), np.float32)})
    assert error.mismatched == (FIRST, SECOND)
    assert f"'{FIRST}' is float32 [16, 16], tensor '{FIRST}' is float16 [16, 16]: convert one of them" in str(error)
    assert f"'{SECOND}' is float32 [16, 16], tensor '{SECOND}' is float32 [16, 17]" in str(error)


def _rectangle(tmp_path: Path, name: str) -> str:
    made = graph_model([node("MatMul", ["x", name], ["y"])], [value("x", ["n", 16])], [value("y", None)])
    return save_external(tmp_path / "m.onnx", made, {name: np.ones((16, 24), np.float32)})


def test_a_transposed_weight_of_the_same_name_is_called_so(tmp_path: Path) -> None:
    model = _rectangle(tmp_path, "dense.weight")
    error = refused(model, tmp_path, {"dense.weight": np.ones((24, 16), np.float32)})
    assert error.transposed == error.mismatched == ("dense.weight",)
    assert "it is stored transposed" in str(error)
    assert "optimize=False" in str(error)


def test_a_renamed_and_transposed_weight_is_recognised(tmp_path: Path) -> None:
    # What TorchScript exporters make of `dense.weight`: another name for its transpose.
    model = _rectangle(tmp_path, "onnx::MatMul_2155")
    error = refused(model, tmp_path, {"dense.weight": np.ones((24, 16), np.float32)})
    assert (error.missing, error.unknown) == (("onnx::MatMul_2155",), ("dense.weight",))
    assert error.transposed == ("onnx::MatMul_2155",)
    assert "'onnx::MatMul_2155': transposed, from 'dense.weight'" in str(error)
    assert "optimize=False" in str(error)


def test_a_renamed_weight_is_recognised(tmp_path: Path) -> None:
    model = _rectangle(tmp_path, "val_79")
    error = refused(model, tmp_path, {"dense.weight": np.ones((16, 24), np.float32)})
    assert "'val_79': renamed, from 'dense.weight'" in str(error)
    assert error.transposed == ()


def test_names_that_only_the_map_knows(model: str, tmp_path: Path) -> None:
    error = refused(model, tmp_path, chain_weights(2), name_map={"nothing": "x", FIRST: "other"})
    assert error.missing == (FIRST,)
    assert "which name_map calls 'other'" in str(error)
    assert set(error.unknown) == {FIRST, "nothing"}
    assert "Names in name_map that are no initializers of the model (1): 'nothing'" in str(error)


def test_an_inline_initializer_that_the_map_names_must_be_there(tmp_path: Path) -> None:
    bias = onnx.numpy_helper.from_array(np.zeros(16, np.float32), "bias")
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "bias"], ["y"])]
    stored = {"w": np.ones((16, 16), np.float32)}
    made = graph_model(nodes, [value("x", ["n", 16])], [value("y", None)], [bias])
    model = save_external(tmp_path / "m.onnx", made, stored)
    error = refused(model, tmp_path, stored, name_map={"bias": "beta"})
    assert error.missing == ("bias",)


def test_an_element_type_that_onnxruntime_does_not_have(tmp_path: Path) -> None:
    made = graph_model([node("Identity", ["w"], ["y"])], [], [value("y", [2], onnx.TensorProto.COMPLEX64)])
    model = save_external(tmp_path / "m.onnx", made, {"w": np.ones(2, np.complex64)})
    with pytest.raises(WeightMismatchError, match=r"complex64 \[2\]: this onnxruntime has no values"):
        ort_delayed.stream_install(model, onnxruntime.SessionOptions(), ram_budget=BUDGET)


def test_long_lists_are_cut_in_the_message_only(tmp_path: Path) -> None:
    weights = chain_weights(30)
    model = save_external(tmp_path / "m.onnx", chain(weights), weights)
    error = refused(model, tmp_path, {"a": np.ones(1, np.float32)})
    assert len(error.missing) == 30
    assert "and 22 more" in str(error)
    assert len(str(error)) < 2000


def test_the_error_can_be_pickled() -> None:
    error = WeightMismatchError("text", missing=["a"], unknown=["b"], mismatched=["c"], transposed=["d"])
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.missing, copy.unknown, copy.mismatched, copy.transposed) == (
        "text",
        ("a",),
        ("b",),
        ("c",),
        ("d",),
    )


def test_a_prefix_is_recognised_among_tensors_of_one_shape(tmp_path: Path) -> None:
    # What wrapping a model in another one makes of its names.
    weights = chain_weights(3)
    wrapped = {f"model.{name}": w for name, w in weights.items()}
    model = save_external(tmp_path / "m.onnx", chain(wrapped), wrapped)
    error = refused(model, tmp_path, weights)
    assert f"'model.{SECOND}': renamed, from '{SECOND}';" in str(error)
    assert "3 names differ by a prefix only: name_map=lambda name: name.removeprefix('model.') takes them" in str(error)
    (tmp_path / "other").mkdir()
    model = save_external(tmp_path / "other" / "m.onnx", chain(weights), weights)
    error = refused(model, tmp_path, wrapped)
    assert "name_map=lambda name: 'model.' + name takes them" in str(error)


def test_a_square_weight_may_be_transposed_unseen(tmp_path: Path) -> None:
    weights = chain_weights(1)
    renamed = {"onnx::MatMul_1": next(iter(weights.values()))}
    model = save_external(tmp_path / "m.onnx", chain(renamed), renamed)
    error = refused(model, tmp_path, weights)
    assert f"renamed or transposed, which a square does not show, from '{FIRST}'" in str(error)
    assert error.transposed == ()
