"""The clock: which weights may tick, that they tick in order, and that results stay the same bytes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from delayed_models import model, node, value
from onnx import helper, numpy_helper

import ort_delayed
from ort_delayed.clock import install_clock
from ort_delayed.ops.kernel import Binding
from ort_delayed.pacing import Pace, possible_paces, possible_ticks
from ort_delayed.use_order import order_of_use

WIDTH = 16


def weight(name: str, *shape: int, dtype: Any = np.float32) -> onnx.TensorProto:
    values = np.random.default_rng(len(name)).standard_normal(shape).astype(dtype)
    return numpy_helper.from_array(values, name)


def stack(layers: int = 4) -> onnx.ModelProto:
    nodes, weights, current = [], [], "x"
    for i in range(layers):
        weights += [weight(f"bias{i}", WIDTH), weight(f"weight{i}", WIDTH, WIDTH)]
        nodes.append(node("Add", [current, f"bias{i}"], [f"sum{i}"], name=f"add{i}"))
        nodes.append(node("MatMul", [f"sum{i}", f"weight{i}"], [f"product{i}"], name=f"matmul{i}"))
        nodes.append(node("Tanh", [f"product{i}"], [f"out{i}"], name=f"tanh{i}"))
        current = f"out{i}"
    nodes[-1].output[0] = "y"
    return model(nodes, [value("x", [None, WIDTH])], [value("y", [None, WIDTH])], initializers=weights)


def paces_of(made: onnx.ModelProto, **known: bool) -> dict[str, Pace]:
    return possible_paces(made, {t.name for t in made.graph.initializer}, **known)


def run(made: onnx.ModelProto, level: str = "ORT_ENABLE_ALL", shape: tuple[int, ...] = (3, WIDTH)) -> bytes:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.add_session_config_entry("session.disable_prepacking", "1")
    ort_delayed.register_custom_ops(options)
    session = onnxruntime.InferenceSession(made.SerializeToString(), options)
    feed = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    result: bytes = session.run(None, {"x": feed})[0].tobytes()
    return result


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
@pytest.mark.parametrize("kind", ["bias", "weight"])
def test_each_delivery_comes_right_before_its_use(kind: str, level: str) -> None:
    expected = run(stack(), level)
    made, ticked, binding = stack(), [], Binding()
    install_clock(made, {f"{kind}{i}": lambda i=i: ticked.append(i) for i in range(4)}, binding, None, paces_of(made))
    assert run(made, level) == expected
    assert ticked == [0, 1, 2, 3]
    binding.close()


def test_a_tick_that_raises_stops_the_run() -> None:
    def refuse() -> None:
        raise MemoryError("no more")

    for name in ("bias2", "weight2"):
        made, binding = stack(), Binding()
        install_clock(made, {name: refuse}, binding, None, paces_of(made))
        with pytest.raises(Exception, match="ort_delayed guard"):
            run(made)
        binding.close()


def test_vectors_that_are_added_or_multiplied_may_tick() -> None:
    assert possible_ticks(stack().graph) == {f"bias{i}" for i in range(4)}


def test_only_weights_of_one_product_may_be_paced() -> None:
    made = stack()
    made.graph.node.append(node("Mul", ["weight1", "weight1"], ["other"]))
    assert set(paces_of(made)) == {"weight0", "weight2", "weight3"}


def images(layers: int = 4, between: str = "Relu", kind: str = "Conv") -> onnx.ModelProto:
    """Convolutions, between each and the next a node; every second output is added to what comes two later."""
    nodes, weights, current = [], [], "x"
    for i in range(layers):
        weights += [weight(f"weight{i}", 4, 4, 3, 3), weight(f"bias{i}", 4)]
        nodes.append(node(kind, [current, f"weight{i}", f"bias{i}"], [f"conv{i}"], name=f"conv{i}", pads=[1] * 4))
        nodes.append(node(between, [f"conv{i}"], [f"out{i}"], name=f"between{i}"))
        current = f"out{i}"
        if i % 2:
            nodes.append(node("Add", [f"out{i}", f"out{i - 1}"], [f"sum{i}"], name=f"sum{i}"))
            current = f"sum{i}"
    nodes.append(node("Identity", [current], ["y"]))
    return model(nodes, [value("x", [None, 4, 5, 5])], [value("y", [None] * 4)], initializers=weights)


def recurrent(layers: int = 4, kind: str = "LSTM") -> onnx.ModelProto:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    nodes, weights, current = [], [numpy_helper.from_array(np.array([1]), "axis")], "x"
    for i in range(layers):
        weights += [weight(f"weight{i}", 1, gates * 4, 4), weight(f"recurrence{i}", 1, gates * 4, 4)]
        weights.append(weight(f"bias{i}", 1, gates * 8))
        inputs = [current, f"weight{i}", f"recurrence{i}", f"bias{i}"]
        nodes.append(node(kind, inputs, [f"all{i}"], name=f"rnn{i}", hidden_size=4))
        nodes.append(node("Squeeze", [f"all{i}", "axis"], [f"out{i}"], name=f"squeeze{i}"))
        current = f"out{i}"
    nodes.append(node("Identity", [current], ["y"]))
    return model(nodes, [value("x", [None, 2, 4])], [value("y", [None] * 3)], initializers=weights)


def optimized(layers: int = 4) -> onnx.ModelProto:
    """What an optimizer leaves: no small vectors, and no shapes of values."""
    made = stack(layers)
    for i in range(layers):
        made.graph.node[3 * i].op_type, made.graph.node[3 * i].input[1] = "Add", made.graph.node[3 * i].input[0]
    return made


EXTENDED, NONE = "ORT_ENABLE_EXTENDED", "ORT_DISABLE_ALL"


@pytest.mark.parametrize(
    ("made", "shape", "level", "known"),
    [
        (images(), (2, 4, 5, 5), EXTENDED, {"at_most_extended": True}),
        (images(between="LeakyRelu"), (0, 4, 5, 5), EXTENDED, {"at_most_extended": True}),
        (images(kind="ConvTranspose"), (2, 4, 5, 5), EXTENDED, {"at_most_extended": True}),
        (images(between="Tanh"), (2, 4, 5, 5), NONE, {"is_optimized": True}),
        (recurrent(), (3, 2, 4), EXTENDED, {}),
        (recurrent(kind="GRU"), (3, 2, 4), "ORT_ENABLE_ALL", {}),
        (recurrent(kind="RNN"), (3, 2, 4), NONE, {}),
        (optimized(), (3, WIDTH), NONE, {"is_optimized": True}),
        (optimized(), (0, WIDTH), NONE, {"is_optimized": True}),
    ],
    ids=["conv", "no images", "transposed", "optimized conv", "lstm", "gru", "rnn", "optimized", "no rows"],
)
def test_each_large_weight_of_other_operators_can_be_announced(
    made: onnx.ModelProto, shape: tuple[int, ...], level: str, known: dict[str, bool]
) -> None:
    expected, ticked, binding = run(made, level, shape), [], Binding()
    paces = paces_of(made, **known)
    assert set(paces) == {f"weight{i}" for i in range(4)}
    install_clock(made, {f"weight{i}": lambda i=i: ticked.append(i) for i in range(4)}, binding, None, paces)
    onnx.checker.check_model(stripped(made))
    assert run(made, level, shape) == expected
    assert ticked == [0, 1, 2, 3]
    binding.close()


def stripped(made: onnx.ModelProto) -> onnx.ModelProto:
    """With graph inputs in place of the kernels, which onnx does not know."""
    plain = onnx.ModelProto()
    plain.CopyFrom(made)
    kernels = [n for n in plain.graph.node if n.domain == "ai.rt"]
    for kernel in kernels:
        plain.graph.node.remove(kernel)
        plain.graph.input.append(helper.make_tensor_value_info(kernel.output[0], onnx.TensorProto.INT64, [None]))
    return plain


def test_an_announcement_that_raises_stops_the_run() -> None:
    def refuse() -> None:
        raise MemoryError("no more")

    made, binding = images(), Binding()
    install_clock(made, {"weight2": refuse}, binding, None, paces_of(made, at_most_extended=True))
    with pytest.raises(Exception, match="ort_delayed guard of the shape of 'weight2', which paces the run"):
        run(made, EXTENDED, (2, 4, 5, 5))
    binding.close()


def folded(op_type: str, *constants: onnx.TensorProto, kind: str = "Conv") -> onnx.ModelProto:
    """A product of a constant weight, and what is folded into the weight."""
    names = [c.name for c in constants]
    big, shape = (weight("big", 4, 4, 3, 3), [None, 4, 5, 5]) if kind == "Conv" else (weight("big", 4, 4), [None, 4])
    nodes = [node(kind, ["x", "big"], ["product"]), node(op_type, ["product", *names], ["y"])]
    return model(nodes, [value("x", shape)], [value("y", [None] * len(shape))], initializers=[big, *constants])


NORM = [numpy_helper.from_array(np.full(4, 0.5, np.float32), name) for name in ("scale", "shift", "mean", "variance")]


@pytest.mark.parametrize(
    "made",
    [
        folded("BatchNormalization", *NORM),
        folded("Add", weight("constant", 4, 1, 1)),
        folded("Mul", weight("constant", 4, 1, 1)),
        folded("BatchNormalization", *NORM, kind="MatMul"),
    ],
    ids=["conv norm", "conv add", "conv mul", "product norm"],
)
def test_weights_that_optimizers_fold_something_into_stay_constants(made: onnx.ModelProto) -> None:
    assert paces_of(made, at_most_extended=True) == {}
    assert "big" in paces_of(made, is_optimized=True)


def test_convolutions_of_other_types_stay_as_they_are() -> None:
    made = images()
    for tensor in made.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    assert paces_of(made, at_most_extended=True) == {}


def test_what_follows_a_convolution_keeps_its_shapes_and_with_them_its_fusions() -> None:
    """MatMul and Add become a Gemm only where the rank of what comes in is known."""
    made = images()
    made.graph.node.pop()
    made.graph.initializer.extend([weight("fc", 4, 8), weight("b", 8)])
    last = made.graph.node[-1].output[0]
    made.graph.node.append(node("ReduceMean", [last], ["m"], axes=[2, 3], keepdims=0))
    made.graph.node.extend([node("MatMul", ["m", "fc"], ["p"]), node("Add", ["p", "b"], ["y"])])
    made.graph.output[0].CopyFrom(value("y", [None, 8]))
    expected, binding = run(made, EXTENDED, (2, 4, 5, 5)), Binding()
    paces = {name: p for name, p in paces_of(made, at_most_extended=True).items() if name != "fc"}
    install_clock(made, dict.fromkeys(paces, lambda: None), binding, None, paces)
    assert len(paces) == 4
    assert run(made, EXTENDED, (2, 4, 5, 5)) == expected
    binding.close()


def test_what_is_computed_last_is_what_waits() -> None:
    """An encoder yields the first state of an LSTM that stands on another input; and a shortcut listed first."""
    nodes, weights, current = [], [weight("W", 1, 16, 4), weight("R", 1, 16, 4)], "s"
    for i in range(3):
        weights.append(weight(f"enc{i}", 4, 4))
        nodes += [node("MatMul", [current, f"enc{i}"], [f"e{i}"]), node("Tanh", [f"e{i}"], [f"t{i}"])]
        current = f"t{i}"
    weights.append(numpy_helper.from_array(np.array([0]), "axis"))
    nodes += [node("Unsqueeze", [current, "axis"], ["h"]), node("Tanh", ["x"], ["xt"])]
    nodes.append(node("LSTM", ["xt", "W", "R", "", "", "h", "h"], ["y"], hidden_size=4))
    nodes.insert(0, node("Slice", ["x", "zero", "one", "zero"], ["cut"]))
    nodes.insert(1, node("Squeeze", ["cut", "axis"], ["s"]))
    weights += [numpy_helper.from_array(np.array([i]), n) for i, n in enumerate(("zero", "one"))]
    recurrent_last = model(nodes, [value("x", [3, 2, 4])], [value("y", None)], initializers=weights)
    nodes = [node("Conv", ["x", "shortcut"], ["s"], pads=[1] * 4), node("Conv", ["x", "first"], ["a"], pads=[1] * 4)]
    nodes += [node("Relu", ["a"], ["r"])]
    second = node("FusedConv", ["r", "second", "bias", "s"], ["y"], activation="Relu", pads=[1] * 4)
    second.domain = "com.microsoft"
    weights = [weight(name, 4, 4, 3, 3) for name in ("shortcut", "first", "second")] + [weight("bias", 4)]
    residual = model([*nodes, second], [value("x", [None, 4, 5, 5])], [value("y", None)], initializers=weights)
    residual.opset_import.add(domain="com.microsoft", version=1)
    for made, shape in ((recurrent_last, (3, 2, 4)), (residual, (2, 4, 5, 5))):
        expected, ticked, binding = run(made, NONE, shape), [], Binding()
        paces = paces_of(made, is_optimized=True)
        order = [use.weight for use in order_of_use(made.graph) if use.weight in paces]
        install_clock(made, {n: functools.partial(ticked.append, n) for n in paces}, binding, None, paces)
        assert run(made, NONE, shape) == expected
        assert ticked == order
        assert len(order) >= 3
        binding.close()


def test_calls_of_functions_are_not_paced() -> None:
    made = optimized()
    made.functions.add(domain="local", name="F", input=["a", "b"], output=["c"])
    made.graph.node[1].domain, made.graph.node[1].op_type = "local", "F"
    assert set(paces_of(made, is_optimized=True)) == {"weight1", "weight2", "weight3"}


def test_convolutions_are_not_paced_where_their_layout_changes() -> None:
    assert paces_of(images()) == {}


def test_no_operator_set_without_a_reshape_to_an_input_is_paced() -> None:
    made = stack()
    next(o for o in made.opset_import if not o.domain).version = 6
    assert paces_of(made) == {}
    assert paces_of(made, is_optimized=True) == {}


def test_what_is_no_tensor_is_not_paced() -> None:
    made = optimized()
    element = onnx.TypeProto(optional_type=onnx.TypeProto.Optional(elem_type=made.graph.input[0].type))
    made.graph.value_info.append(onnx.ValueInfoProto(name="sum1", type=element))
    assert set(paces_of(made, is_optimized=True)) == {"weight0", "weight2", "weight3"}


def graph_with(nodes: list[onnx.NodeProto], *weights: onnx.TensorProto, **settings: Any) -> onnx.GraphProto:
    return helper.make_graph(nodes, "g", [], settings.pop("outputs", []), list(weights))


@pytest.mark.parametrize(
    "graph",
    [
        graph_with([node("Conv", ["x", "k", "b"], ["y"])], weight("b", WIDTH)),
        graph_with([node("Conv", ["x", "k"], ["c"]), node("Add", ["c", "b"], ["y"])], weight("b", WIDTH)),
        # Fused to a Gemm it comes before the MatMul's weight, else behind it: it tells nothing of the place of a run.
        graph_with([node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "b"], ["y"])], weight("b", WIDTH)),
        graph_with([node("DequantizeLinear", ["x", "b"], ["y"])], weight("b", WIDTH)),
        graph_with([node("Reshape", ["x", "b"], ["y"])], weight("b", WIDTH, dtype=np.int64)),
        graph_with([node("Add", ["x", "b"], ["y"])], weight("b", 2)),
        graph_with([node("Add", ["x", "b"], ["y"])], weight("b", WIDTH, 2)),
        graph_with([node("Add", ["x", "b"], ["y"])], weight("b", WIDTH), outputs=[value("b", [WIDTH])]),
        graph_with(
            [node("If", ["c"], ["y"], then_branch=graph_with([node("Neg", ["b"], ["n"])], outputs=[value("n", None)]))],
            weight("b", WIDTH),
        ),
    ],
    ids=[
        "conv bias",
        "fused bias",
        "bias of a product",
        "scale",
        "shape",
        "too small",
        "matrix",
        "graph output",
        "captured by a body",
    ],
)
def test_what_optimizers_want_constant_does_not_tick(graph: onnx.GraphProto) -> None:
    assert possible_ticks(graph) == set()
