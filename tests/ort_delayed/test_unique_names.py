"""Names of initializers: unique in the whole model where a value is installed under them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from ort_delayed.unique_names import make_names_unique, rename_value

node = helper.make_node


def value(name: str, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, None)


def nested() -> onnx.ModelProto:
    """Branches that have a ``w`` each, which an If inside the first captures."""
    w = [numpy_helper.from_array(np.full(2, v, np.float32), "w") for v in (1, 10)]
    captures = helper.make_graph([node("Add", ["x", "w"], ["c"])], "captures", [], [value("c")])
    doubles = helper.make_graph([node("Add", ["w", "w"], ["d"])], "doubles", [], [value("d")])
    inner = node("If", ["condition"], ["i"], then_branch=captures, else_branch=doubles)
    then = helper.make_graph([inner], "then", [], [value("i")], [w[0]])
    other = helper.make_graph([node("Add", ["x", "w"], ["e"])], "else", [], [value("e")], [w[1]])
    choose = node("If", ["outer"], ["y"], then_branch=then, else_branch=other)
    inputs = [value("x"), value("condition", TensorProto.BOOL), value("outer", TensorProto.BOOL)]
    graph = helper.make_graph([choose], "g", inputs, [value("y")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def outcomes(model: onnx.ModelProto) -> list[list[float]]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.zeros(2, np.float32)
    return [
        session.run(None, {"x": x, "outer": np.array(outer), "condition": np.array(inner)})[0].tolist()
        for outer in (True, False)
        for inner in (True, False)
    ]


def test_renaming_changes_no_result() -> None:
    model = nested()
    expected = outcomes(model)
    assert expected == [[1, 1], [2, 2], [10, 10], [10, 10]]
    branches = [a.g for a in model.graph.node[0].attribute]
    make_names_unique(model, [(g, g.initializer[0]) for g in branches])
    names = {g.initializer[0].name for g in branches}
    assert len(names) == 2
    assert "w" not in names
    assert outcomes(model) == expected


def test_a_body_that_has_the_name_itself_keeps_it() -> None:
    inner = helper.make_graph([node("Identity", ["w"], ["w2"])], "inner", [value("w")], [value("w2")])
    weight = numpy_helper.from_array(np.ones(2, np.float32), "w")
    loop = node("Loop", ["count", "", "w"], ["y"], body=inner)
    graph = helper.make_graph([loop], "g", [], [value("y")], [weight])
    rename_value(graph, "w", "new")
    assert list(graph.node[0].input) == ["count", "", "new"]
    assert graph.node[0].attribute[0].g.node[0].input[0] == "w"


def test_the_main_graph_keeps_its_names() -> None:
    weight = numpy_helper.from_array(np.ones(2, np.float32), "w")
    graph = helper.make_graph([node("Add", ["x", "w"], ["y"])], "g", [value("x")], [value("y")], [weight])
    model = helper.make_model(graph)
    make_names_unique(model, [(None, model.graph.initializer[0])])
    assert [t.name for t in model.graph.initializer] == ["w"]


def test_annotations_and_declarations_follow() -> None:
    weight = numpy_helper.from_array(np.ones(2, np.float32), "w")
    graph = helper.make_graph([node("Add", ["w", "w"], ["y"])], "g", [], [value("y")], [weight])
    graph.value_info.append(value("w"))
    annotation = graph.quantization_annotation.add(tensor_name="w")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="w")
    rename_value(graph, "w", "new")
    assert list(graph.node[0].input) == ["new", "new"]
    assert (graph.initializer[0].name, graph.value_info[0].name) == ("new", "new")
    assert (annotation.tensor_name, annotation.quant_parameter_tensor_names[0].value) == ("new", "new")
