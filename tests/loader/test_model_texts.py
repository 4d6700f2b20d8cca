"""Names of a model that are not UTF-8: found wherever they stand, and a typed error wherever a model is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from subprocesses import run_snippet
from weighted_models import external, initializer

import ort_delayed
from ort_delayed.loader.errors import ShardFormatError
from ort_delayed.loader.model_texts import fault_in_texts
from ort_delayed.loader.onnx_files import read_onnx_model
from ort_delayed.ops.errors import DelayedInitializerValueError
from ort_delayed.skeletons import NotAModelError

BAD = "=BAD="
ARRAY = np.ones(4, np.float32)


def tensor(name: str = "w", location: str = "w.bin") -> onnx.TensorProto:
    return external(name, ARRAY, location)


def graph_of(*initializers: onnx.TensorProto, nodes: tuple[onnx.NodeProto, ...] = ()) -> onnx.GraphProto:
    y = helper.make_tensor_value_info("y", 1, [4])
    return helper.make_graph([*nodes, helper.make_node("Neg", ["w"], ["y"])], "g", [], [y], list(initializers))


def model_of(graph: onnx.GraphProto, *functions: onnx.FunctionProto) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)


def in_a_body(held: onnx.TensorProto) -> onnx.NodeProto:
    return helper.make_node("If", ["c"], ["z"], then_branch=graph_of(held), else_branch=graph_of(tensor()))


def function_of(*nodes: onnx.NodeProto) -> onnx.FunctionProto:
    return helper.make_function("own", "F", ["c"], ["z"], list(nodes), [helper.make_opsetid("", 17)])


def with_key(made: onnx.TensorProto) -> onnx.TensorProto:
    made.external_data.add(key=BAD, value="1")
    return made


def documented(made: onnx.TensorProto) -> onnx.TensorProto:
    made.doc_string = BAD
    return made


PLACES: dict[str, Callable[[], onnx.ModelProto]] = {
    "an initializer": lambda: model_of(graph_of(tensor(BAD))),
    "its location": lambda: model_of(graph_of(tensor(location=BAD))),
    "a key of its external data": lambda: model_of(graph_of(with_key(tensor()))),
    "its documentation": lambda: model_of(graph_of(documented(tensor()))),
    "a location in a body": lambda: model_of(graph_of(tensor(), nodes=(in_a_body(tensor(location=BAD)),))),
    "an initializer in a body of a function": lambda: model_of(graph_of(tensor()), function_of(in_a_body(tensor(BAD)))),
    "the tensor of a Constant in a function": lambda: model_of(
        graph_of(tensor()), function_of(helper.make_node("Constant", [], ["z"], value=tensor(location=BAD)))
    ),
    "an operator": lambda: model_of(graph_of(tensor(), nodes=(helper.make_node(BAD, ["w"], ["z"]),))),
    "an output": lambda: model_of(graph_of(tensor(), nodes=(helper.make_node("Neg", ["w"], [BAD]),))),
}


def spoiled(made: onnx.ModelProto) -> bytes:
    return made.SerializeToString().replace(BAD.encode(), b"=\xff\xfe\xfd=")


@pytest.fixture(params=PLACES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "w.bin").write_bytes(ARRAY.tobytes())
    (tmp_path / "m.onnx").write_bytes(spoiled(PLACES[request.param]()))
    return tmp_path / "m.onnx"


def test_a_model_of_names_that_are_text() -> None:
    for make in PLACES.values():
        assert fault_in_texts(make()) is None
    sparse = helper.make_sparse_tensor(initializer("s", ARRAY), initializer("", np.arange(4)), [4])
    made = model_of(graph_of(tensor()))
    made.graph.sparse_initializer.append(sparse)
    assert fault_in_texts(made) is None
    sparse.values.name = BAD
    made.graph.sparse_initializer.append(sparse)
    assert fault_in_texts(onnx.ModelProto.FromString(spoiled(made))) is not None


def test_converting_and_restoring(model: Path, tmp_path: Path) -> None:
    for work in (ort_delayed.convert_model, ort_delayed.restore_model):
        with pytest.raises(NotAModelError, match="not UTF-8 text"):
            work(model, tmp_path / "new.onnx")
    assert not (tmp_path / "new.onnx").exists()


def test_streaming(model: Path) -> None:
    with pytest.raises(ShardFormatError, match="not UTF-8 text"):
        read_onnx_model(str(model))
    with pytest.raises(ShardFormatError, match="not UTF-8 text"):
        ort_delayed.StreamingWeightLoader(str(model), ram_budget_bytes=1 << 28).stream(lambda group: None)


@pytest.mark.parametrize("by_path", [True, False])
def test_installing(model: Path, by_path: bool) -> None:
    given = model if by_path else model.read_bytes()
    with pytest.raises(ShardFormatError, match="not UTF-8 text"):
        ort_delayed.stream_install(given, onnxruntime.SessionOptions(), ram_budget=1 << 28)


def test_a_session_under_a_budget(model: Path) -> None:
    with pytest.raises(NotAModelError, match="not UTF-8 text"):
        ort_delayed.InferenceSession(str(model), ram_budget=1 << 28)
    with pytest.raises(DelayedInitializerValueError, match="not UTF-8 text"):
        ort_delayed.InferenceSession(model.read_bytes(), ram_budget=1 << 28)


def test_the_message_is_short_however_long_the_name() -> None:
    made = model_of(graph_of(tensor(BAD + "n" * 1_000_000)))
    fault = fault_in_texts(onnx.ModelProto.FromString(spoiled(made)))
    assert fault is not None
    assert len(fault) < 2000
    assert "(1000005 bytes)" in fault


def test_where_protobuf_is_the_one_in_python_they_are_refused_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = helper.make_model(graph_of(initializer("=NAME=", ARRAY)), producer_name="=PRODUCER=")
    for number, name in enumerate((b"=NAME=", b"=PRODUCER=")):
        wire = made.SerializeToString().replace(name, b"\xff" * len(name))
        (tmp_path / f"{number}.onnx").write_bytes(wire)
    monkeypatch.setenv("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
    code = """
        from google.protobuf.internal import api_implementation
        import onnxruntime
        import ort_delayed
        from ort_delayed.inspecting import inspect_weights
        assert api_implementation.Type() == "python"
        for path in sys.argv[1:]:
            options = onnxruntime.SessionOptions()
            for step in (
                lambda: inspect_weights(path),
                lambda: ort_delayed.InferenceSession(path, ram_budget=1 << 28),
                lambda: ort_delayed.InferenceSession(open(path, "rb").read(), ram_budget=1 << 28),
                lambda: ort_delayed.stream_install(path, options, ram_budget=1 << 28),
                lambda: ort_delayed.stream_install(open(path, "rb").read(), options, ram_budget=1 << 28),
            ):
                try:
                    step()
                except Exception as error:
                    print(type(error).__name__)
        """
    refused = ["NotAModelError", "NotAModelError", "DecodeError", "ShardFormatError", "ShardFormatError"]
    said = run_snippet(code, tmp_path / "0.onnx", tmp_path / "1.onnx").splitlines()
    assert said == 2 * refused
