"""The op in ``onnx.reference``: all 14 types, both modes, bodies and functions, and the same typed errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import pytest
from delayed_models import delayed, function, model, node, output_only, single_weight, value, write
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from ort_delayed.ops import DelayedInitializer, DelayedInitializerError

DTYPES = [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15]


def evaluator(made: onnx.ModelProto, directory: Path) -> ReferenceEvaluator:
    return ReferenceEvaluator(made, new_ops=[DelayedInitializer.in_directory(directory)])


@pytest.mark.parametrize("load_device", ["cpu", "file"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_bit_by_bit(dtype: int, load_device: str, tmp_path: Path) -> None:
    numpy_type = helper.tensor_dtype_to_np_dtype(dtype)
    raw = bytes([1, 0] * 32) if dtype == TensorProto.BOOL else bytes(range(190, 254))
    (tmp_path / "w.bin").write_bytes(b"\xff" + raw)
    count = 64 // numpy_type.itemsize
    made = output_only([count], dtype=dtype, offset=1, load_device=load_device)
    (y,) = evaluator(made, tmp_path).run(None, {})
    assert (y.dtype, y.shape, y.tobytes()) == (numpy_type, (count,), raw)


def test_cpu_is_read_once_and_file_at_every_run(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    path = write(tmp_path / "w.bin", weight)
    held = evaluator(single_weight(load_device="cpu"), tmp_path)
    fresh = evaluator(single_weight(load_device="file"), tmp_path)
    write(path, 2 * weight)
    assert np.array_equal(held.run(None, {"x": x})[0], x @ weight)
    assert np.array_equal(fresh.run(None, {"x": x})[0], x @ (2 * weight))
    path.unlink()
    assert np.array_equal(held.run(None, {"x": x})[0], x @ weight)
    with pytest.raises(DelayedInitializerError, match=r"w\.bin"):
        fresh.run(None, {"x": x})


def test_what_a_caller_does_to_an_output_does_not_reach_the_next_run(tmp_path: Path) -> None:
    write(tmp_path / "w.bin", np.ones(3, np.float32))
    session = evaluator(output_only([3], load_device="cpu"), tmp_path)
    session.run(None, {})[0][:] = 7
    assert session.run(None, {})[0].tolist() == [1, 1, 1]


def test_a_missing_file_in_cpu_mode_fails_when_the_evaluator_is_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="12 bytes needed") as caught:
        evaluator(output_only([3], load_device="cpu"), tmp_path)
    assert isinstance(caught.value, DelayedInitializerError)
    evaluator(output_only([3], load_device="file"), tmp_path)


def test_relative_to_the_working_directory_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "w.bin", np.ones(3, np.float32))
    monkeypatch.chdir(tmp_path)
    assert ReferenceEvaluator(output_only([3]), new_ops=[DelayedInitializer]).run(None, {})[0].tolist() == [1, 1, 1]


def test_in_a_body(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight, -weight)

    def branch(name: str, offset: int) -> onnx.GraphProto:
        nodes = [delayed(f"{name}_w", [3, 3], offset=offset), node("MatMul", ["x", f"{name}_w"], [f"{name}_y"])]
        return helper.make_graph(nodes, name, [], [value(f"{name}_y", None)])

    made = model(
        [node("If", ["c"], ["y"], then_branch=branch("t", 0), else_branch=branch("e", 36))],
        [value("c", [], TensorProto.BOOL), value("x", ["n", 3])],
        [value("y", ["n", 3])],
    )
    session = evaluator(made, tmp_path)
    assert np.array_equal(session.run(None, {"c": np.array(True), "x": x})[0], x @ weight)
    assert np.array_equal(session.run(None, {"c": np.array(False), "x": x})[0], x @ -weight)


def test_in_a_function_with_reference_attributes(tmp_path: Path, weight: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight, -weight)
    body = delayed("w", [3, 3])
    for attribute in body.attribute:
        if attribute.name == "offset":
            attribute.CopyFrom(onnx.AttributeProto(name="offset", type=onnx.AttributeProto.INT, ref_attr_name="start"))
    layer = function("F", ["a"], ["b"], [body, node("MatMul", ["a", "w"], ["b"])], attributes=["start"])
    # A function is run by an evaluator of its own, which gets the op: onnx.reference hands new_ops to bodies only.
    session = ReferenceEvaluator(layer, new_ops=[DelayedInitializer.in_directory(tmp_path)])
    x = np.eye(3, dtype=np.float32)
    assert np.array_equal(session.run(None, {"a": x}, attributes={"start": 0})[0], weight)
    assert np.array_equal(session.run(None, {"a": x}, attributes={"start": 36})[0], -weight)
    # Inlined, each call is a node with values of its own.
    calls = [node("F", ["x"], ["h"], domain="local", start=0), node("F", ["h"], ["y"], domain="local", start=36)]
    made = model(calls, [value("x", ["n", 3])], [value("y", ["n", 3])], functions=[layer])
    inlined = evaluator(onnx.inliner.inline_local_functions(made), tmp_path)
    assert np.array_equal(inlined.run(None, {"x": x})[0], weight @ -weight)


def test_zero_elements_and_scalars(tmp_path: Path) -> None:
    write(tmp_path / "w.bin", np.array([2.5], np.float32))
    assert evaluator(output_only([0, 3]), tmp_path).run(None, {})[0].shape == (0, 3)
    (scalar,) = evaluator(output_only([]), tmp_path).run(None, {})
    assert np.shape(scalar) == ()
    assert float(scalar) == 2.5
