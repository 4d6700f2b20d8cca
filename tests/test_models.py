"""The small models in models/: the script makes the same bytes again, and each model gives what numpy computes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx.reference
import pytest

import ort_delayed
import ort_delayed.ops

MODELS = Path(__file__).parent.parent / "models"
CARRIED_TYPES = ["bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64"]
CARRIED_TYPES += ["uint8", "uint16", "uint32", "uint64"]
COMPLEX_TYPES = ["complex64", "complex128"]


def floats(name: str, *shape: int) -> np.ndarray:
    """All of a float32 data file, in the given shape."""
    return np.fromfile(MODELS / name, "<f4").reshape(shape)


def run(name: str, **inputs: np.ndarray) -> list[np.ndarray]:
    return ort_delayed.InferenceSession(str(MODELS / name)).run(None, inputs)


def delayed_attributes(model: onnx.ModelProto) -> list[dict]:
    """The attributes of the delayed nodes of the main graph, read with nothing of the project."""
    nodes = [n for n in model.graph.node if (n.domain, n.op_type) == ("ai.rt", "DelayedInitializer")]
    return [{a.name: onnx.helper.get_attribute_value(a) for a in n.attribute} for n in nodes]


@pytest.fixture
def x() -> np.ndarray:
    return np.linspace(-1, 1, 3 * 8, dtype=np.float32).reshape(3, 8)


def test_the_script_makes_the_same_bytes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(MODELS / "make_models.py"), str(tmp_path)], check=True, timeout=120)
    made = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    committed = {p.name: p.read_bytes() for p in MODELS.iterdir() if p.suffix in (".onnx", ".bin")}
    assert made.keys() == committed.keys()
    assert [name for name in made if made[name] != committed[name]] == []


def test_every_file_is_small_and_in_the_readme() -> None:
    readme = (MODELS / "README.md").read_text()
    for path in MODELS.iterdir():
        if path.suffix in (".onnx", ".bin"):
            assert path.stat().st_size < 64 * 1024, path.name
            assert f"`{path.name}`" in readme, path.name


@pytest.mark.parametrize("name", sorted(p.name for p in MODELS.glob("*.onnx")))
def test_every_model_passes_the_checker_and_names_files_beside_it(name: str) -> None:
    model = onnx.load(MODELS / name)
    onnx.checker.check_model(model, full_check=True)
    for attributes in delayed_attributes(model):
        assert (MODELS / attributes["filename"].decode()).is_file()


def test_the_specifications_cpu_example() -> None:
    (y,) = run("test_cc_delayedinitializer_cpu.onnx")
    np.testing.assert_array_equal(y, floats("onnx_light_backend_delayedinitializer_cpu.bin", 3), strict=True)
    assert y.tolist() == [3, 4, 5]


def test_the_specifications_file_example() -> None:
    (y,) = run("test_cc_delayedinitializer_file.onnx")
    np.testing.assert_array_equal(y, floats("onnx_light_backend_delayedinitializer_file.bin", 4)[2:], strict=True)
    assert y.tolist() == [1.5, -2]


def expected_bytes(name: str) -> tuple[str, tuple[int, ...], bytes]:
    """Type, shape and bytes that a model of one element type must yield, read from its data file."""
    attributes = delayed_attributes(onnx.load(MODELS / name))
    assert [a["load_device"] for a in attributes] == [b"cpu", b"file"]
    first, second = ({k: v for k, v in a.items() if k != "load_device"} for a in attributes)
    assert first == second
    dtype = onnx.helper.tensor_dtype_to_np_dtype(first["dtype"])
    count = int(np.prod(first["shape"]))
    data = (MODELS / "types.bin").read_bytes()[first["offset"] :][: count * dtype.itemsize]
    assert len(data) == count * dtype.itemsize
    assert first["offset"] % 2 == 1
    return dtype.name, tuple(first["shape"]), data


@pytest.mark.parametrize("element_type", CARRIED_TYPES)
def test_element_types(element_type: str) -> None:
    dtype, shape, data = expected_bytes(f"type_{element_type}.onnx")
    assert dtype == element_type
    for y in run(f"type_{element_type}.onnx"):
        assert (y.dtype.name, y.shape, y.tobytes()) == (dtype, shape, data)


@pytest.mark.parametrize("element_type", CARRIED_TYPES + COMPLEX_TYPES)
def test_element_types_with_the_reference_evaluator(element_type: str) -> None:
    dtype, shape, data = expected_bytes(f"type_{element_type}.onnx")
    op = ort_delayed.ops.DelayedInitializer.in_directory(str(MODELS))
    evaluator = onnx.reference.ReferenceEvaluator(onnx.load(MODELS / f"type_{element_type}.onnx"), new_ops=[op])
    for y in evaluator.run(None, {}):
        assert (y.dtype.name, y.shape, y.tobytes()) == (dtype, shape, data)


@pytest.mark.parametrize("element_type", COMPLEX_TYPES)
def test_onnxruntime_has_no_complex_tensors(element_type: str) -> None:
    with pytest.raises(ort_delayed.DelayedInitializerError, match=element_type):
        ort_delayed.InferenceSession(str(MODELS / f"type_{element_type}.onnx"))


def test_shared_weight(x: np.ndarray) -> None:
    w = floats("shared_weight.bin", 8, 8)
    np.testing.assert_allclose(run("shared_weight.onnx", x=x)[0], x @ w @ w @ w.T, rtol=1e-5, atol=1e-6)


def test_tied_weights() -> None:
    w = floats("tied_weights.bin", 20, 6)
    ids = np.array([0, 19, 7, 7], np.int64)
    np.testing.assert_allclose(run("tied_weights.onnx", ids=ids)[0], np.tanh(w[ids]) @ w.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("condition", [True, False])
def test_if_branches(condition: bool, x: np.ndarray) -> None:
    then_w, else_w = floats("if_branches.bin", 2, 4, 4)
    (y,) = run("if_branches.onnx", condition=np.array(condition), x=x[:, :4])
    np.testing.assert_allclose(y, x[:, :4] @ (then_w if condition else else_w), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("trips", [0, 1, 5])
def test_loop_body(trips: int, x: np.ndarray) -> None:
    w = floats("loop_body.bin", 4, 4)
    expected = x[:, :4]
    for _ in range(trips):
        expected = np.tanh(expected @ w)
    (y,) = run("loop_body.onnx", trips=np.array(trips, np.int64), x=x[:, :4])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_function_calls(x: np.ndarray) -> None:
    w = floats("function_calls.bin", 8, 8)
    expected = x
    for _ in range(6):
        expected = np.tanh(expected @ w)
    np.testing.assert_allclose(run("function_calls.onnx", x=x)[0], expected, rtol=1e-5, atol=1e-6)


def test_function_reference_attributes(x: np.ndarray) -> None:
    even, odd = floats("function_even_layers.bin", 3, 8, 8), floats("function_odd_layers.bin", 3, 8, 8)
    expected = x
    for i in range(6):
        expected = np.tanh(expected @ (odd if i % 2 else even)[i // 2])
    np.testing.assert_allclose(run("function_reference_attributes.onnx", x=x)[0], expected, rtol=1e-5, atol=1e-6)


def test_matmul_chain() -> None:
    x = np.linspace(-1, 1, 2 * 32, dtype=np.float32).reshape(2, 32)
    expected = x.astype(np.float64)
    for w in floats("matmul_chain.bin", 8, 32, 32).astype(np.float64):
        expected = expected @ w.T
    np.testing.assert_allclose(run("matmul_chain.onnx", x=x)[0], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("if_branches", {"condition": np.array(True), "x": np.ones((1, 4), np.float32)}),
        ("loop_body", {"trips": np.array(2, np.int64), "x": np.ones((1, 4), np.float32)}),
        ("function_calls", {"x": np.ones((1, 8), np.float32)}),
        ("function_reference_attributes", {"x": np.ones((1, 8), np.float32)}),
    ],
)
def test_session_and_reference_evaluator_agree(name: str, inputs: dict[str, np.ndarray]) -> None:
    # onnx.reference hands new_ops on to bodies, but not to functions: they are inlined first.
    model = onnx.inliner.inline_local_functions(onnx.load(MODELS / f"{name}.onnx"))
    op = ort_delayed.ops.DelayedInitializer.in_directory(str(MODELS))
    (expected,) = onnx.reference.ReferenceEvaluator(model, new_ops=[op]).run(None, inputs)
    np.testing.assert_allclose(run(f"{name}.onnx", **inputs)[0], expected, rtol=1e-5, atol=1e-6)
