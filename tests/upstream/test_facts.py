"""Facts about onnxruntime, onnxruntime-extensions and onnx that the project depends on.

Each test says what to revisit when a release changes the fact. A fact that got *better* is a failure here too: it means
that a workaround can go.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import onnxruntime_extensions
import pytest
from delayed_models import FLOAT, model, node, save, single_weight, value, write
from onnx import TensorProto, helper
from subprocesses import run_snippet

import ort_delayed
from ort_delayed.external_files import EXTERNAL_DIRECTORY_ENTRY

Plain = onnxruntime.InferenceSession
VERSION = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])


def snippet(code: str, *arguments: object) -> str:
    preamble = """
import sys
import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime_extensions import PyCustomOpDef, get_library_path, onnx_op

def one_op(op_type, dtype=TensorProto.FLOAT):
    output = helper.make_tensor_value_info("y", dtype, None)
    graph = helper.make_graph([helper.make_node(op_type, [], ["y"], domain="up.stream")], "g", [], [output])
    opsets = [helper.make_opsetid("up.stream", 1), helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()

def session(op_type, dtype=TensorProto.FLOAT):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(get_library_path())
    return onnxruntime.InferenceSession(one_op(op_type, dtype), options, enable_fallback=0)
"""
    return run_snippet(preamble + code, *map(str, arguments))


# --- the Python custom op ---------------------------------------------------------------------------------------------


def test_an_array_returned_by_an_op_goes_through_python_objects_and_what_we_return_does_not() -> None:
    printed = snippet("""
@onnx_op(op_type="up.stream::Array", inputs=[], outputs=[PyCustomOpDef.dt_uint64])
def array():
    return np.array([2**63 + 1, 2**53 + 1], np.uint64)

calls = []
class Result:
    shape = (2,)
    def flatten(self):
        calls.append("flatten")
        return self
    def tolist(self):
        calls.append("tolist")
        return np.array([2**63 + 1, 2**53 + 1], np.uint64)

@onnx_op(op_type="up.stream::Result", inputs=[], outputs=[PyCustomOpDef.dt_uint64])
def result():
    return Result()

try:
    print(session("Array", TensorProto.UINT64).run(None, {})[0].tolist() == [2**63 + 1, 2**53 + 1])
except Exception:
    print(False)
print(session("Result", TensorProto.UINT64).run(None, {})[0].tolist() == [2**63 + 1, 2**53 + 1])
print(calls)
""")
    lines = printed.splitlines()
    assert lines[1:] == ["True", "['flatten', 'tolist']"], (
        "onnxruntime-extensions takes results of Python ops in another way than by flatten().tolist(): "
        "revisit ops/kernel.py (_Result)"
    )
    assert lines[0] == "False", (
        "a uint64 array comes out of a stock Python op unchanged now: ops/kernel.py (_Result) may not be needed"
    )


def test_an_exception_in_an_op_aborts_the_process() -> None:
    code = """
@onnx_op(op_type="up.stream::Raise", inputs=[], outputs=[PyCustomOpDef.dt_float])
def fail():
    raise ValueError("on purpose")

s = session("Raise")
try:
    s.run(None, {})
except Exception as error:
    print("an ordinary exception", error)
"""
    with pytest.raises(AssertionError) as ended:
        # Where the process ends well, this is what pytest says instead.
        assert snippet(code) is None, (
            "an exception in a Python op does not abort the process any more: "
            "guards (ort_delayed/kernel_nodes.py) and run threads (ort_delayed/run_threads.py) may be simplified"
        )
    assert "exit status -6" in str(ended.value)


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize(("given", "target"), [((0, 7), [2, 3]), ((0, 7), []), ((7, 1, 2), [0, 3])])
def test_a_reshape_that_does_not_fit_names_node_and_shape(given: tuple, target: list[int], opset: int) -> None:
    settings = {"allowzero": 1} if opset >= 14 and 0 in target else {}
    made = model(
        [node("Reshape", ["x", "shape"], ["y"], name="the guard's name", **settings)],
        [value("x", None)],
        [value("y", None)],
        initializers=[helper.make_tensor("shape", TensorProto.INT64, [len(target)], target)],
        opset=opset,
    )
    session = Plain(made.SerializeToString())
    shape = "{" + ",".join(map(str, given)) + "}"
    with pytest.raises(Exception) as caught:
        session.run(None, {"x": np.zeros(given, np.float32)})
    revisit = "revisit the guards: ort_delayed/kernel_nodes.py and _FAILED_SHAPE in ort_delayed/session.py"
    assert "the guard's name" in str(caught.value), revisit
    assert f"nput shape:{shape}" in str(caught.value), revisit


def test_an_op_with_several_output_types_gets_the_first() -> None:
    printed = snippet("""
for kind in (PyCustomOpDef.dt_float, PyCustomOpDef.dt_int8):
    @onnx_op(op_type="up.stream::Typed", inputs=[], outputs=[kind])
    def typed():
        return np.zeros(1, np.int8)
try:
    session("Typed", TensorProto.INT8)
    print("made")
except Exception as error:
    print("refused")
""")
    assert printed.strip() == "refused", (
        "ops of one name are told apart by the declared output type now: "
        "ops/kernel.py needs no op type per element type"
    )


# --- order ------------------------------------------------------------------------------------------------------------


def loads_before_the_first_use(made: onnx.ModelProto, directory: Path, loads: str) -> int:
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(directory / "profile")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = Plain(made.SerializeToString(), options)
    session.run(None, {"x": np.ones((1, 3), np.float32), "r": np.ones((3, 3), np.float32)})
    events = [e for e in json.loads(Path(session.end_profiling()).read_text()) if e["name"].endswith("_kernel_time")]
    ops = [e["args"]["op_name"] for e in sorted(events, key=lambda e: e["ts"])]
    return ops[: ops.index("MatMul")].count(loads)


@pytest.mark.parametrize("in_front", [False, True])
def test_the_place_of_nodes_without_inputs_decides_when_they_run(in_front: bool, tmp_path: Path) -> None:
    # RandomUniform has no inputs and is not folded, as a delayed node.
    loads = [node("RandomUniform", [], [f"w{i}"], shape=[3, 3], name=f"w{i}") for i in range(4)]
    uses = [node("MatMul", [f"h{i}" if i else "x", f"w{i}"], [f"h{i + 1}"], name=f"m{i}") for i in range(4)]
    nodes = [*loads, *uses] if in_front else [n for pair in zip(loads, uses, strict=True) for n in pair]
    made = model(nodes, [value("x", [1, 3]), value("r", [3, 3])], [value("h4", None)])
    expected = 1 if in_front else 4
    assert loads_before_the_first_use(made, tmp_path, "RandomUniform") == expected, (
        "ONNX Runtime orders nodes by another rule: revisit ort_delayed/ordering.py and ort_delayed/load_times.py"
    )


def test_size_is_not_folded_and_shape_is(tmp_path: Path) -> None:
    made = model(
        [node("Size", ["x"], ["size"]), node("Shape", ["x"], ["shape"])],
        [value("x", [2, 3])],
        [value("size", [], TensorProto.INT64), value("shape", [2], TensorProto.INT64)],
    )
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    Plain(made.SerializeToString(), options)
    ops = {n.op_type for n in onnx.load(options.optimized_model_filepath).graph.node}
    assert "Size" in ops, "ONNX Runtime folds Size of a static shape: ort_delayed/load_times.py needs another op"
    assert "Shape" not in ops, "ONNX Runtime does not fold Shape any more: the comment in load_times.py is out of date"


def test_an_if_with_a_known_condition_is_inlined_under_other_names(tmp_path: Path) -> None:
    branch = helper.make_graph([node("Relu", ["x"], ["o"], name="the name")], "b", [], [value("o", None)])
    made = model(
        [node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)],
        [value("x", [3])],
        [value("y", None)],
        initializers=[helper.make_tensor("c", TensorProto.BOOL, [], [True])],
    )
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    Plain(made.SerializeToString(), options)
    (found,) = onnx.load(options.optimized_model_filepath).graph.node
    revisit = "unknown_condition in ort_delayed/kernel_nodes.py may not be needed"
    assert found.op_type == "Relu", f"ONNX Runtime does not inline such an If any more: {revisit}"
    assert "the name" not in found.name, f"ONNX Runtime keeps the names of inlined nodes: {revisit} for messages"


# --- session options and external data --------------------------------------------------------------------------------


def external_product(directory: Path, factor: float) -> str:
    write(directory / "v.bin", np.float32(factor) * np.eye(3, dtype=np.float32))
    made = model([node("MatMul", ["x", "v"], ["y"])], [value("x", ["n", 3])], [value("y", ["n", 3])])
    external = onnx.TensorProto(name="v", data_type=FLOAT, dims=[3, 3], data_location=onnx.TensorProto.EXTERNAL)
    external.external_data.add(key="location", value="v.bin")
    made.graph.initializer.append(external)
    return save(directory / "m.onnx", made)


@pytest.mark.skipif(VERSION < (1, 28), reason="before 1.28 the entry counts only for models given as bytes")
def test_the_directory_entry_redirects_loads_by_path(tmp_path: Path) -> None:
    external_product(tmp_path / "a", 2)
    other = external_product(tmp_path / "b", 5)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(EXTERNAL_DIRECTORY_ENTRY, str(tmp_path / "a"))
    x = np.ones((1, 3), np.float32)
    assert np.array_equal(Plain(other, options).run(None, {"x": x})[0], 2 * x), (
        "the entry does not redirect models loaded by path any more: "
        "external_directory in ort_delayed/model_source.py may be simplified"
    )
    options.add_session_config_entry(EXTERNAL_DIRECTORY_ENTRY, "")
    assert np.array_equal(Plain(other, options).run(None, {"x": x})[0], 5 * x), (
        "an empty entry is not the same as none: external_directory in ort_delayed/model_source.py puts '' back"
    )


@pytest.mark.skipif(VERSION < (1, 24), reason="1.23 takes locations outside the model's directory")
@pytest.mark.parametrize("location", ["../v.bin", "{directory}/v.bin"])
def test_external_data_must_stay_below_the_models_directory(location: str, tmp_path: Path) -> None:
    external_product(tmp_path / "a", 2)
    made = onnx.load(tmp_path / "a" / "m.onnx", load_external_data=False)
    made.graph.initializer[0].external_data[0].value = location.format(directory=tmp_path)
    write(tmp_path / "v.bin", np.eye(3, dtype=np.float32))
    with pytest.raises(Exception) as caught:
        Plain(save(tmp_path / "a" / "m.onnx", made), enable_fallback=0)
    assert caught.value, "ONNX Runtime takes such locations: ort_delayed/external_files.py refuses them"


def test_ort_values_share_memory_and_are_not_checked() -> None:
    array = np.eye(3, dtype=np.float32)
    shared = onnxruntime.OrtValue.ortvalue_from_numpy(array)
    array[0, 0] = 7
    assert shared.numpy()[0, 0] == 7, "OrtValues copy: whoever relies on sharing must be revisited (add_initializer)"
    made = model(
        [node("MatMul", ["x", "v"], ["y"])],
        [value("x", ["n", 3])],
        [value("y", ["n", 3])],
        initializers=[helper.make_tensor("v", FLOAT, [3, 3], [0.0] * 9)],
    )
    options = onnxruntime.SessionOptions()
    options.add_initializer("no_such_initializer", shared)
    Plain(made.SerializeToString(), options)  # silently ignored
    options.add_initializer("v", shared)
    x = np.ones((1, 3), np.float32)
    assert np.array_equal(Plain(made.SerializeToString(), options).run(None, {"x": x})[0], x @ array)
    with pytest.raises(Exception, match="v"):
        options.add_initializer("v", shared)


def test_a_folded_initializer_keeps_the_models_own_value() -> None:
    made = model(
        [node("Mul", ["v", "two"], ["t"]), node("Add", ["x", "t"], ["y"])],
        [value("x", [3])],
        [value("y", [3])],
        initializers=[helper.make_tensor("v", FLOAT, [3], [1.0] * 3), helper.make_tensor("two", FLOAT, [1], [2.0])],
    )
    options = onnxruntime.SessionOptions()
    installed = onnxruntime.OrtValue.ortvalue_from_numpy(np.full(3, 10, np.float32))
    options.add_initializer("v", installed)
    (y,) = Plain(made.SerializeToString(), options).run(None, {"x": np.zeros(3, np.float32)})
    assert y.tolist() == [2, 2, 2], (
        "constant folding reads the installed OrtValue now: stream_install need not keep both the same bytes"
    )


# --- registration -----------------------------------------------------------------------------------------------------


def test_a_library_registered_twice_fails_every_session(tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    for _ in range(2):
        options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
    path = save(tmp_path / "m.onnx", model([node("Neg", ["x"], ["y"])], [value("x", [1])], [value("y", [1])]))
    with pytest.raises(Exception, match=r"(?i)conflict") as caught:
        Plain(path, options, enable_fallback=0)
    assert caught.value, "registering twice is harmless now: the probe in ort_delayed/library.py is not needed"


def test_what_a_plain_session_says_about_an_unprepared_model(tmp_path: Path) -> None:
    # README quotes these, so that a search finds them.
    path = save(tmp_path / "m.onnx", single_weight())
    with pytest.raises(Exception, match=r"ai\.rt"):
        Plain(path, enable_fallback=0)
    options = onnxruntime.SessionOptions()
    ort_delayed.register_custom_ops(options)
    with pytest.raises(Exception, match="ort_delayed"):
        Plain(path, options, enable_fallback=0)
