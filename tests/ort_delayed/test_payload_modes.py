"""What ``cpu`` and ``file`` mean, and every shape of payload: the bytes that a run yields."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from delayed_models import FLOAT, delayed, model, node, output_only, save, single_weight, value, write
from onnx import TensorProto, helper

import ort_delayed

CARRIED = [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13]
MODES = ["cpu", "file"]


def run(path: str, **feeds: np.ndarray) -> np.ndarray:
    return ort_delayed.InferenceSession(path).run(None, feeds)[0]


# --- when the bytes are read ------------------------------------------------------------------------------------------


def test_cpu_bytes_survive_replacement_rewriting_and_removal(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    path = write(tmp_path / "w.bin", weight)
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", single_weight(load_device="cpu")))
    write(path, 2 * weight)
    assert np.array_equal(session.run(None, {"x": x})[0], x @ weight)
    write(tmp_path / "other.bin", 3 * weight).rename(path)
    assert np.array_equal(session.run(None, {"x": x})[0], x @ weight)
    path.unlink()
    assert np.array_equal(session.run(None, {"x": x})[0], x @ weight)


def test_two_cpu_sessions_each_have_what_the_file_held(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    path, made = tmp_path / "w.bin", save(tmp_path / "m.onnx", single_weight(load_device="cpu"))
    sessions = []
    for factor in (1, 5):
        write(path, factor * weight)
        sessions.append(ort_delayed.InferenceSession(made))
    for session, factor in zip(sessions, (1, 5), strict=True):
        assert np.array_equal(session.run(None, {"x": x})[0], x @ (factor * weight))


def test_file_bytes_are_those_of_each_run(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    path = tmp_path / "w.bin"
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", single_weight()))
    write(path, weight)
    assert np.array_equal(session.run(None, {"x": x})[0], x @ weight)
    write(path, 2 * weight)
    assert np.array_equal(session.run(None, {"x": x})[0], x @ (2 * weight))
    write(tmp_path / "other.bin", 3 * weight).rename(path)
    assert np.array_equal(session.run(None, {"x": x})[0], x @ (3 * weight))


@pytest.mark.parametrize("confined", [False, True])
def test_constructing_touches_no_file_payload(confined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = save(tmp_path / "m.onnx", single_weight(filename="weights/w.bin"))
    touched: list[str] = []
    for function in ("open", "stat", "lstat", "readlink", "scandir", "listdir"):

        def spy(path: object, *rest: object, original: object = getattr(os, function), **more: object) -> object:
            touched.append(str(path))
            return original(path, *rest, **more)  # type: ignore[operator]

        monkeypatch.setattr(os, function, spy)
    ort_delayed.InferenceSession(made, weights_dir=str(tmp_path) if confined else None)
    assert touched
    assert not [path for path in touched if "weights" in Path(path).name or path.endswith("w.bin")]


def test_the_op_runs_once_per_node_and_run(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    nodes = [
        delayed("w", [3, 3], load_device="cpu"),
        node("MatMul", ["x", "w"], ["h"]),
        node("MatMul", ["h", "w"], ["y"]),
    ]
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    made = save(tmp_path / "m.onnx", model(nodes, [value("x", ["n", 3])], [value("y", ["n", 3])]))
    session = ort_delayed.InferenceSession(made, options)
    for _ in range(3):
        session.run(None, {"x": x})
    events = json.loads(Path(session.end_profiling()).read_text())
    kernels = [e for e in events if e["name"] == "w_kernel_time"]
    assert len(kernels) == 3
    assert all(e["args"]["op_name"].startswith("DelayedInitializer") for e in kernels)


def test_an_output_belongs_to_the_caller(tmp_path: Path) -> None:
    write(tmp_path / "w.bin", np.ones(3, np.float32))
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", output_only([3], load_device="cpu")))
    first = session.run(None, {})[0]
    first[:] = 7
    assert session.run(None, {})[0].tolist() == [1, 1, 1]


# --- which bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", CARRIED)
def test_every_type_bit_by_bit(dtype: int, mode: str, tmp_path: Path) -> None:
    numpy_type = helper.tensor_dtype_to_np_dtype(dtype)
    # All byte values, so all NaN payloads, subnormals and large integers that fit in.
    raw = bytes([1, 0] * 128) if dtype == TensorProto.BOOL else bytes(range(256))
    (tmp_path / "w.bin").write_bytes(b"\xff" + raw)
    count = 256 // numpy_type.itemsize
    y = run(save(tmp_path / "m.onnx", output_only([count], dtype=dtype, offset=1, load_device=mode)))
    assert (y.dtype, y.shape, y.tobytes()) == (numpy_type, (count,), raw)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [[], [1], [2, 1, 3, 1, 2, 1, 1, 2], [0], [0, 3], [3, 0, 2], [24]])
@pytest.mark.parametrize("opset", [7, 13, 14, 21])
def test_shapes(shape: list[int], opset: int, mode: str, tmp_path: Path) -> None:
    numbers = np.arange(24, dtype=np.float32)
    write(tmp_path / "w.bin", numbers, padding=b"abc")
    made = model([delayed("y", shape, offset=3, load_device=mode)], [], [value("y", shape)], opset=opset)
    y = run(save(tmp_path / "m.onnx", made))
    assert y.shape == tuple(shape)
    assert np.array_equal(y.reshape(-1), numbers[: y.size])


@pytest.mark.parametrize("offset", [1, 3, 5, 4095, 4097])
def test_unaligned_offsets(offset: int, tmp_path: Path, weight: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight, padding=b"\xff" * offset)
    assert np.array_equal(run(save(tmp_path / "m.onnx", output_only([3, 3], offset=offset))), weight)


def test_past_four_gib_in_a_sparse_file(tmp_path: Path) -> None:
    offset = 5 * 2**30 + 3
    with open(tmp_path / "w.bin", "wb") as file:
        file.seek(offset)
        file.write(np.array([1.5, -2], np.float32).tobytes())
    for mode in MODES:
        y = run(save(tmp_path / "m.onnx", output_only([2], offset=offset, load_device=mode)))
        assert y.tolist() == [1.5, -2]


def test_two_nodes_on_the_same_and_on_overlapping_bytes(tmp_path: Path) -> None:
    write(tmp_path / "w.bin", np.arange(6, dtype=np.float32))
    placed = [("a", 0), ("b", 0), ("c", 8), ("d", 4)]
    for mode in MODES:
        nodes = [delayed(name, [4], offset=offset, load_device=mode) for name, offset in placed]
        path = save(tmp_path / "m.onnx", model(nodes, [], [value(name, [4]) for name, _ in placed]))
        for (_, offset), y in zip(placed, ort_delayed.InferenceSession(path).run(None, {}), strict=True):
            assert np.array_equal(y, np.arange(offset // 4, offset // 4 + 4, dtype=np.float32))


def test_the_same_bytes_as_two_types(tmp_path: Path) -> None:
    raw = np.array([1.0, -2.0], np.float32)
    write(tmp_path / "w.bin", raw)
    nodes = [delayed("a", [2], load_device="cpu"), delayed("b", [2], dtype=TensorProto.INT32, load_device="cpu")]
    made = model(nodes, [], [value("a", [2]), value("b", [2], TensorProto.INT32)])
    a, b = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", made)).run(None, {})
    assert np.array_equal(a, raw)
    assert np.array_equal(b, raw.view(np.int32))


# --- where the node stands --------------------------------------------------------------------------------------------


def test_outputs_many_consumers_and_none(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    nodes = [
        delayed("w", [3, 3]),
        delayed("unused", [3]),
        node("Transpose", ["w"], ["t"], perm=[1, 0]),
        node("MatMul", ["x", "w"], ["a"]),
        node("MatMul", ["a", "t"], ["b"]),
        node("Add", ["b", "w"], ["y"]),
    ]
    outputs = [value(name, None) for name in ("y", "w", "t")]
    path = save(tmp_path / "m.onnx", model(nodes, [value("x", [3, 3])], outputs))
    square = np.vstack([x, x[:1]])
    y, w, t = ort_delayed.InferenceSession(path).run(None, {"x": square})
    assert np.array_equal(w, weight)
    assert np.array_equal(t, weight.T)
    np.testing.assert_allclose(y, square @ weight @ weight.T + weight, rtol=1e-6)


def test_captured_by_nested_bodies(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    inner = helper.make_graph(
        [node("Identity", ["go"], ["go_on"]), node("MatMul", ["s", "w"], ["n"])],
        "inner",
        [value("trip", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("s", None)],
        [value("go_on", [], TensorProto.BOOL), value("n", None)],
    )
    then = helper.make_graph([node("Loop", ["m", "", "x"], ["l"], body=inner)], "then", [], [value("l", None)])
    other = helper.make_graph([node("Identity", ["w"], ["i"])], "else", [], [value("i", None)])
    made = model(
        [delayed("w", [3, 3]), node("If", ["c"], ["y"], then_branch=then, else_branch=other)],
        [value("c", [], TensorProto.BOOL), value("m", [], TensorProto.INT64), value("x", ["n", 3])],
        [value("y", None)],
    )
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", made))
    for trips in (0, 1, 3):
        (y,) = session.run(None, {"c": np.array(True), "m": np.array(trips, np.int64), "x": x})
        np.testing.assert_allclose(y, x @ np.linalg.matrix_power(weight, trips), rtol=1e-5)
    (y,) = session.run(None, {"c": np.array(False), "m": np.array(1, np.int64), "x": x})
    assert np.array_equal(y, weight)


def test_in_a_scan_body(tmp_path: Path, weight: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    body = helper.make_graph(
        [
            delayed("w", [3, 3]),
            node("MatMul", ["s", "w"], ["m"]),
            node("Add", ["m", "e"], ["n"]),
            node("Relu", ["n"], ["o"]),
        ],
        "body",
        [value("s", [1, 3]), value("e", [1, 3])],
        [value("n", [1, 3]), value("o", [1, 3])],
    )
    made = model(
        [node("Scan", ["x", "xs"], ["last", "ys"], body=body, num_scan_inputs=1)],
        [value("x", [1, 3]), value("xs", [4, 1, 3])],
        [value("last", [1, 3]), value("ys", [4, 1, 3])],
    )
    state, elements = np.ones((1, 3), np.float32), np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 1, 3)
    last, ys = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", made)).run(None, {"x": state, "xs": elements})
    for element, y in zip(elements, ys, strict=True):
        state = state @ weight + element
        np.testing.assert_allclose(y, np.maximum(state, 0), rtol=1e-5)
    np.testing.assert_allclose(last, state, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["a'b", 'a"b', "gewicht_ä_重み", "a\nb", "a\\b", "a b/c:0", "w/unchecked", "x/size", "", "a{0}%s"]
)
def test_odd_names(name: str, tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    output = name or "w"
    nodes = [delayed(output, [3, 3], name=name), node("MatMul", ["x", output], ["y"])]
    made = save(tmp_path / "m.onnx", model(nodes, [value("x", ["n", 3])], [value("y", ["n", 3])]))
    session = ort_delayed.InferenceSession(made)
    with pytest.raises(ort_delayed.DelayedInitializerError) as caught:
        session.run(None, {"x": x})
    assert repr(name) in str(caught.value)
    write(tmp_path / "w.bin", weight)
    assert np.array_equal(session.run(None, {"x": x})[0], x @ weight)


def test_values_named_as_preparing_would_name_its_own(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    nodes = [
        delayed("w", [3, 3]),
        node("Identity", ["x"], ["w/unchecked"], name="ort_delayed guard"),
        node("Neg", ["w/unchecked"], ["shape/3x3"]),
        node("Neg", ["shape/3x3"], ["x/size"]),
        node("Neg", ["x/size"], ["ort_delayed/false"]),
        node("Neg", ["ort_delayed/false"], ["h"]),
        node("MatMul", ["h", "w"], ["y"]),
    ]
    assert np.array_equal(
        run(save(tmp_path / "m.onnx", model(nodes, [value("x", ["n", 3])], [value("y", ["n", 3])])), x=x), x @ weight
    )


@pytest.mark.parametrize("opset", range(7, 24))
def test_opsets(opset: int, tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    nodes = [delayed("w", [3, 3]), node("MatMul", ["x", "w"], ["y"])]
    made = model(nodes, [value("x", ["n", 3])], [value("y", ["n", 3])], opset=opset, ir_version=10)
    assert np.array_equal(run(save(tmp_path / "m.onnx", made), x=x), x @ weight)


@pytest.mark.parametrize("ir_version", range(3, 12))
def test_ir_versions(ir_version: int, tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    nodes = [delayed("w", [3, 3]), node("MatMul", ["x", "w"], ["h"]), node("Mul", ["h", "two"], ["y"])]
    inputs = [value("x", ["n", 3])]
    if ir_version < 4:
        inputs.append(value("two", [1]))  # there, every initializer is a graph input too
    made = model(
        nodes,
        inputs,
        [value("y", ["n", 3])],
        initializers=[helper.make_tensor("two", FLOAT, [1], [2.0])],
        opset=8 if ir_version < 4 else 15,
        ir_version=ir_version,
    )
    assert np.array_equal(run(save(tmp_path / "m.onnx", made), x=x), 2 * (x @ weight))


def test_a_model_that_imports_the_ops_domain_only(tmp_path: Path, weight: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    made = model([delayed("y", [3, 3])], [], [value("y", [3, 3])], opset=None)
    assert np.array_equal(run(save(tmp_path / "m.onnx", made)), weight)


def test_nodes_in_no_topological_order_load_all_the_same(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    nodes = [
        node("MatMul", ["h", "w"], ["y"], name="second"),
        node("MatMul", ["x", "w"], ["h"], name="first"),
        delayed("w", [3, 3]),
    ]
    made = model(nodes, [value("x", ["n", 3])], [value("y", ["n", 3])])
    np.testing.assert_allclose(run(save(tmp_path / "m.onnx", made), x=x), x @ weight @ weight, rtol=1e-6)


def test_names_metadata_and_quantization_annotations_stay(tmp_path: Path, weight: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    made = single_weight()
    made.metadata_props.add(key="author", value="somebody")
    made.producer_name, made.model_version, made.graph.doc_string = "producer", 7, "graph doc"
    made.graph.quantization_annotation.add(tensor_name="w")
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", made))
    meta = session.get_modelmeta()
    assert (meta.custom_metadata_map, meta.producer_name, meta.version) == ({"author": "somebody"}, "producer", 7)
    assert [i.name for i in session.get_inputs()] == ["x"]
    assert [o.name for o in session.get_outputs()] == ["y"]
    assert session.get_overridable_initializers() == []
