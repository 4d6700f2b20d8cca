"""Inlining of functions that deliver or take delayed weights: only those, right, and each call with its own values."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from delayed_models import FLOAT, delayed, function, model, node, save, value, write
from onnx import AttributeProto, TensorProto, helper

import ort_delayed
from ort_delayed.graphs import iter_graphs
from ort_delayed.inlining import inline_delayed_functions
from ort_delayed.ops.errors import DelayedInitializerValueError

X = [value("x", ["n", 3])]
Y = [value("y", ["n", 3])]


def referring(made: onnx.NodeProto, **references: str) -> onnx.NodeProto:
    """The node with some attributes taken from the call."""
    for attribute in made.attribute:
        if attribute.name in references:
            reference = references[attribute.name]
            attribute.CopyFrom(AttributeProto(name=attribute.name, type=attribute.type, ref_attr_name=reference))
    return made


def called(made: onnx.ModelProto) -> set[str]:
    """Functions that are still called somewhere in the graphs."""
    return {n.op_type for g in iter_graphs(made.graph) for n in g.node if n.domain == "local"}


def run(made: onnx.ModelProto, directory: Path, **feeds: np.ndarray) -> np.ndarray:
    return ort_delayed.InferenceSession(save(directory / "m.onnx", made)).run(None, feeds)[0]


def layer(**settings: object) -> onnx.FunctionProto:
    return function("Layer", ["a"], ["b"], [delayed("w", [3, 3]), node("MatMul", ["a", "w"], ["b"])], **settings)


PLAIN = function("Plain", ["a"], ["b"], [node("Neg", ["a"], ["t"]), node("Tanh", ["t"], ["b"])])
TAKES = function("Takes", ["a", "w"], ["b"], [node("MatMul", ["a", "w"], ["b"])])
TURNS = function("Turns", ["w"], ["t"], [node("Transpose", ["w"], ["t"])])


def test_only_functions_with_delayed_nodes_are_inlined(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    nodes = [node("Layer", ["x"], ["h"], domain="local"), node("Plain", ["h"], ["y"], domain="local")]
    made = model(nodes, X, Y, functions=[layer(), PLAIN])
    assert called(inline_delayed_functions(onnx.ModelProto.FromString(made.SerializeToString()))) == {"Plain"}
    np.testing.assert_allclose(run(made, tmp_path, x=x), np.tanh(-(x @ weight)), rtol=1e-5)


def test_a_model_without_such_functions_is_returned_itself() -> None:
    made = model([delayed("w", [3, 3]), node("Plain", ["x"], ["y"], domain="local")], X, Y, functions=[PLAIN])
    before = made.SerializeToString()
    assert inline_delayed_functions(made) is made
    assert made.SerializeToString() == before


def test_functions_of_functions(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    outer = function("Outer", ["a"], ["b"], [node("Layer", ["a"], ["h"], domain="local"), node("Relu", ["h"], ["b"])])
    outermost = function("Outermost", ["a"], ["b"], [node("Outer", ["a"], ["b"], domain="local")])
    made = model(
        [node("Outermost", ["x"], ["h"], domain="local"), node("Outer", ["h"], ["y"], domain="local")],
        X,
        Y,
        functions=[outermost, outer, layer()],
    )
    expected = np.maximum(np.maximum(x @ weight, 0) @ weight, 0)
    np.testing.assert_allclose(run(made, tmp_path, x=x), expected, rtol=1e-5)


def test_an_if_in_a_function_in_a_loop(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight, -weight)

    def branch(name: str, offset: int) -> onnx.GraphProto:
        nodes = [delayed(f"{name}_w", [3, 3], offset=offset), node("MatMul", ["a", f"{name}_w"], [f"{name}_o"])]
        return helper.make_graph(nodes, name, [], [value(f"{name}_o", None)])

    choose = function(
        "Choose", ["c", "a"], ["b"], [node("If", ["c"], ["b"], then_branch=branch("t", 0), else_branch=branch("e", 36))]
    )
    body = helper.make_graph(
        [node("Identity", ["go"], ["go_on"]), node("Choose", ["c", "s"], ["n"], domain="local")],
        "body",
        [value("trip", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("s", None)],
        [value("go_on", [], TensorProto.BOOL), value("n", None)],
    )
    made = model(
        [node("Loop", ["m", "", "x"], ["y"], body=body)],
        [value("m", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), *X],
        Y,
        functions=[choose],
    )
    for condition, used in ((True, weight), (False, -weight)):
        feeds = {"m": np.array(2, np.int64), "c": np.array(condition), "x": x}
        np.testing.assert_allclose(run(made, tmp_path, **feeds), x @ used @ used, rtol=1e-5)


def test_each_call_has_its_own_values_and_the_defaults_of_the_function(
    tmp_path: Path, weight: np.ndarray, x: np.ndarray
) -> None:
    write(tmp_path / "w.bin", weight)
    write(tmp_path / "v.bin", weight, -weight)
    body = [
        referring(delayed("w", [3, 3]), filename="file", offset="start"),
        node("MatMul", ["a", "w"], ["m"]),
        referring(node("LeakyRelu", ["m"], ["b"], alpha=0.0), alpha="slope"),
    ]
    made = model(
        [
            node("F", ["x"], ["h"], domain="local", file="v.bin", start=36),
            node("F", ["h"], ["y"], domain="local", file="w.bin", slope=0.5),
        ],
        X,
        Y,
        functions=[
            function(
                "F",
                ["a"],
                ["b"],
                body,
                attributes=["file"],
                attribute_protos=[helper.make_attribute("start", 0), helper.make_attribute("slope", 0.25)],
            )
        ],
    )
    first, second = x @ -weight, None
    first = np.where(first < 0, first * np.float32(0.25), first)
    second = first @ weight
    second = np.where(second < 0, second * np.float32(0.5), second)
    np.testing.assert_allclose(run(made, tmp_path, x=x), second, rtol=1e-5)


def test_references_pass_through_nested_calls(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight, -weight)
    inner = function(
        "Inner",
        ["a"],
        ["b"],
        [referring(delayed("w", [3, 3]), offset="at"), node("MatMul", ["a", "w"], ["b"])],
        attributes=["at"],
    )
    call = node("Inner", ["a"], ["b"], domain="local", at=0)
    outer = function("Outer", ["a"], ["b"], [referring(call, at="start")], attributes=["start"])
    made = model([node("Outer", ["x"], ["y"], domain="local", start=36)], X, Y, functions=[outer, inner])
    np.testing.assert_allclose(run(made, tmp_path, x=x), x @ -weight, rtol=1e-5)


def test_a_reference_that_a_call_does_not_give_is_a_typed_error(tmp_path: Path, x: np.ndarray) -> None:
    body = [referring(delayed("w", [3, 3]), offset="start"), node("MatMul", ["a", "w"], ["b"])]
    made = model(
        [node("F", ["x"], ["y"], domain="local")],
        X,
        Y,
        functions=[function("F", ["a"], ["b"], body, attributes=["start"])],
    )
    with pytest.raises(ort_delayed.DelayedInitializerError, match="offset"):
        run(made, tmp_path, x=x)


def test_overloads(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    with_weight, without = layer(overload="weighted"), function("Layer", ["a"], ["b"], [node("Neg", ["a"], ["b"])])
    made = model(
        [node("Layer", ["x"], ["h"], domain="local", overload="weighted"), node("Layer", ["h"], ["y"], domain="local")],
        X,
        Y,
        functions=[with_weight, without],
        ir_version=10,
    )
    np.testing.assert_allclose(run(made, tmp_path, x=x), -(x @ weight), rtol=1e-5)


def test_functions_that_are_given_a_weight_are_inlined() -> None:
    constant = node("Constant", [], ["k"], value=helper.make_tensor("", FLOAT, [1], [2.0]))
    for extra, given in (
        ([], "w"),
        ([node("Transpose", ["w"], ["t"])], "t"),
        ([node("Mul", ["w", "i"], ["t"])], "t"),
        ([constant, node("Mul", ["w", "k"], ["t"])], "t"),
        ([node("Turns", ["w"], ["t"], domain="local")], "t"),
    ):
        made = model(
            [delayed("w", [3, 3]), *extra, node("Takes", ["x", given], ["y"], domain="local")],
            X,
            Y,
            initializers=[helper.make_tensor("i", FLOAT, [1], [2.0])],
            functions=[TAKES, TURNS],
        )
        assert called(inline_delayed_functions(made)) == set(), extra


def test_functions_that_are_given_constants_only_stay() -> None:
    made = model(
        [
            delayed("w", [3, 3]),
            node("Transpose", ["i"], ["t"]),
            node("Takes", ["x", "t"], ["h"], domain="local"),
            node("MatMul", ["h", "w"], ["y"]),
        ],
        X,
        Y,
        initializers=[helper.make_tensor("i", FLOAT, [3, 3], [1.0] * 9)],
        functions=[TAKES],
    )
    assert called(inline_delayed_functions(made)) == {"Takes"}


def test_a_call_in_a_body_that_captures_a_weight_is_inlined() -> None:
    nodes = [node("Transpose", ["w"], ["t"]), node("Takes", ["x", "t"], ["o"], domain="local")]
    branch = helper.make_graph(nodes, "b", [], [value("o", None)])
    made = model(
        [delayed("w", [3, 3]), node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)],
        [value("c", [], TensorProto.BOOL), *X],
        Y,
        functions=[TAKES],
    )
    assert called(inline_delayed_functions(made)) == set()


def test_a_bodys_own_input_hides_a_weight_of_the_same_name() -> None:
    body = helper.make_graph(
        [node("Identity", ["go"], ["go_on"]), node("Takes", ["w", "i"], ["n"], domain="local")],
        "body",
        [value("trip", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("w", None)],
        [value("go_on", [], TensorProto.BOOL), value("n", None)],
        [helper.make_tensor("i", FLOAT, [3, 3], [1.0] * 9)],
    )
    made = model(
        [delayed("w", [3, 3]), node("Loop", ["m", "", "x"], ["h"], body=body), node("MatMul", ["h", "w"], ["y"])],
        [value("m", [], TensorProto.INT64), *X],
        Y,
        functions=[TAKES],
    )
    assert called(inline_delayed_functions(made)) == {"Takes"}


def test_large_values_and_foreign_payloads_survive(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    large = np.arange(3 * 5000, dtype=np.float32).reshape(3, 5000)
    # Values that look like the placeholders that large ones are replaced by meanwhile.
    text = b"ort_delayed detached payload 0"
    foreign = helper.make_tensor("foreign", TensorProto.UINT8, [len(text)], text, raw=True)
    made = model(
        [
            node("Layer", ["x"], ["h"], domain="local"),
            node("MatMul", ["h", "large"], ["y"]),
            node("Identity", ["foreign"], ["f"]),
        ],
        X,
        [value("y", ["n", 5000]), value("f", None, TensorProto.UINT8)],
        initializers=[onnx.numpy_helper.from_array(large, "large"), foreign],
        functions=[layer()],
    )
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", made))
    y, kept = session.run(None, {"x": x})
    np.testing.assert_allclose(y, x @ weight @ large, rtol=1e-5)
    assert kept.tobytes() == foreign.raw_data


def test_opsets_of_an_inlined_function_are_imported(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    made = model([node("Layer", ["x"], ["y"], domain="local")], X, Y, functions=[layer()])
    kept = [o for o in made.opset_import if o.domain != "ai.rt"]
    del made.opset_import[:]
    made.opset_import.extend(kept)
    np.testing.assert_allclose(run(made, tmp_path, x=x), x @ weight, rtol=1e-5)


def test_a_function_that_nobody_calls_changes_nothing(tmp_path: Path, x: np.ndarray) -> None:
    made = model([node("Neg", ["x"], ["y"])], X, Y, functions=[layer()])
    assert np.array_equal(run(made, tmp_path, x=x), -x)


def calling(index: int, below: int, times: int) -> onnx.FunctionProto:
    """``F<index>``: the sum of ``times`` calls of ``F<below>``; without calls a delayed node."""
    if not times:
        return function(f"F{index}", [], ["o"], [delayed("o", [3, 3])])
    calls = [node(f"F{below}", [], [f"o{i}"], domain="local") for i in range(times)]
    return function(f"F{index}", [], ["o"], [*calls, node("Sum", [f"o{i}" for i in range(times)], ["o"])])


def test_functions_that_multiply_beyond_all_bounds_are_refused() -> None:
    functions = [calling(i, i - 1, 2 * min(i, 1)) for i in range(40)]
    made = model([node("F39", [], ["y"], domain="local")], [], Y, functions=functions)
    with pytest.raises(DelayedInitializerValueError, match=r"cannot be inlined: .* more than \d+ nodes"):
        inline_delayed_functions(made)


def test_a_call_of_nothing_does_not_hide_how_functions_multiply() -> None:
    functions = [calling(i, i - 1, 2 * min(i, 1)) for i in range(40)]
    for made in functions:
        made.node.append(node("F0", [], ["unused"], domain="local", overload="missing"))
    made = model([node("F39", [], ["y"], domain="local")], [], Y, functions=functions)
    with pytest.raises(DelayedInitializerValueError, match="more than"):
        inline_delayed_functions(made)


CIRCLE = [
    function(f, [], ["o"], [node(g, [], ["a"], domain="local"), delayed("w", [3, 3]), node("Add", ["a", "w"], ["o"])])
    for f, g in (("F", "G"), ("G", "F"))
]


@pytest.mark.parametrize(
    ("functions", "call", "message"),
    [
        (CIRCLE, node("F", [], ["y"], domain="local"), "Cycle"),
        ([layer()], node("Layer", ["x", "x"], ["y"], domain="local"), "cannot exceed"),
        ([layer()], node("Layer", ["x"], ["y", "z"], domain="local"), "cannot exceed"),
        ([layer(), layer()], node("Layer", ["x"], ["y"], domain="local"), "twice"),
        ([layer(opset=13)], node("Layer", ["x"], ["y"], domain="local"), "incompatible opset versions"),
    ],
)
def test_functions_that_cannot_be_inlined_are_typed_errors(
    functions: list[onnx.FunctionProto], call: onnx.NodeProto, message: str
) -> None:
    made = model([call], X, Y, functions=functions)
    with pytest.raises(DelayedInitializerValueError, match=f"'local::.*cannot be inlined: .*{message}"):
        inline_delayed_functions(made)


def test_a_long_chain_of_functions_is_looked_through_at_once() -> None:
    """Listed from caller to called: each pass over the list would find one more."""
    functions = [calling(i, i - 1, min(i, 1)) for i in range(3000)][::-1]
    made = model([node("F2999", [], ["y"], domain="local")], [], Y, functions=functions)
    start = time.process_time()
    deepest = pytest.raises(DelayedInitializerValueError, match="cannot be inlined")
    # Up to onnx 1.19 the inliner takes such a chain.
    with deepest if tuple(map(int, onnx.__version__.split(".")[:2])) > (1, 19) else contextlib.nullcontext():
        inline_delayed_functions(made)
    assert time.process_time() - start < 10


def test_bodies_that_end_up_too_deep_for_a_model_are_a_typed_error() -> None:
    """Each function holds an If around a call of the next; a protobuf message may be nested a hundred times."""
    functions = [function("F0", ["c"], ["o"], [delayed("o", [3, 3])])]
    for i in range(1, 60):
        call = node(f"F{i - 1}", ["c"], [f"then{i}"], domain="local")
        then = helper.make_graph([call], "then", [], [value(f"then{i}", None)])
        other = helper.make_graph([node("Identity", ["c"], [f"else{i}"])], "else", [], [value(f"else{i}", None)])
        choice = node("If", ["c"], ["o"], then_branch=then, else_branch=other)
        functions.append(function(f"F{i}", ["c"], ["o"], [choice]))
    made = model([node("F59", ["x"], ["y"], domain="local")], X, Y, functions=functions)
    with pytest.raises(DelayedInitializerValueError, match="cannot be inlined"):
        inline_delayed_functions(made)


def test_functions_import_what_is_inlined_into_them(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    """One that nobody calls calls one with a delayed node; another calls one that is given a weight elsewhere."""
    write(tmp_path / "w.bin", weight)
    own = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    gelu = helper.make_node("Gelu", ["a"], ["g"], domain="com.microsoft")
    takes = helper.make_function(
        "local",
        "Gelus",
        ["a", "w"],
        ["b"],
        [gelu, node("MatMul", ["g", "w"], ["b"])],
        [*own, helper.make_opsetid("com.microsoft", 1)],
    )
    calls = [node("Layer", ["a"], ["b"], domain="local")]
    uncalled = helper.make_function("local", "Uncalled", ["a"], ["b"], calls, own)
    square = [node("Gelus", ["a", "a"], ["b"], domain="local")]
    squares = helper.make_function("local", "Squares", ["a"], ["b"], square, own)
    nodes = [
        delayed("w", [3, 3]),
        node("Gelus", ["x", "w"], ["h"], domain="local"),
        node("Squares", ["h"], ["y"], domain="local"),
    ]
    made = model(nodes, [value("x", [3, 3])], Y, functions=[layer(), takes, uncalled, squares])
    square_x = np.resize(x, (3, 3))
    found = run(made, tmp_path, x=square_x)
    plain = model(nodes[1:], [value("x", [3, 3]), value("w", [3, 3])], Y, functions=[takes, squares])
    assert np.array_equal(found, run(plain, tmp_path, x=square_x, w=weight))
