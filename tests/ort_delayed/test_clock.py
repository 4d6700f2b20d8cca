"""The clock: which weights may tick, that they tick in order, and that results stay the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from delayed_models import model, node, value
from onnx import helper, numpy_helper

import ort_delayed
from ort_delayed.clock import install_clock, possible_paces, possible_ticks
from ort_delayed.ops.kernel import Binding

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


def run(made: onnx.ModelProto, level: str = "ORT_ENABLE_ALL") -> bytes:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.add_session_config_entry("session.disable_prepacking", "1")
    ort_delayed.register_custom_ops(options)
    session = onnxruntime.InferenceSession(made.SerializeToString(), options)
    feed = np.random.default_rng(0).standard_normal((3, WIDTH)).astype(np.float32)
    result: bytes = session.run(None, {"x": feed})[0].tobytes()
    return result


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
@pytest.mark.parametrize("kind", ["bias", "weight"])
def test_each_delivery_comes_right_before_its_use(kind: str, level: str) -> None:
    expected = run(stack(), level)
    made, ticked, binding = stack(), [], Binding()
    install_clock(made, {f"{kind}{i}": lambda i=i: ticked.append(i) for i in range(4)}, binding, None)
    assert run(made, level) == expected
    assert ticked == [0, 1, 2, 3]
    binding.close()


def test_a_tick_that_raises_stops_the_run() -> None:
    def refuse() -> None:
        raise MemoryError("no more")

    for name in ("bias2", "weight2"):
        made, binding = stack(), Binding()
        install_clock(made, {name: refuse}, binding, None)
        with pytest.raises(Exception, match="ort_delayed guard"):
            run(made)
        binding.close()


def test_vectors_that_are_added_or_multiplied_may_tick() -> None:
    assert possible_ticks(stack().graph) == {f"bias{i}" for i in range(4)}


def test_only_weights_of_one_product_may_be_paced() -> None:
    made = stack()
    made.graph.node.append(node("Mul", ["weight1", "weight1"], ["other"]))
    assert possible_paces(made.graph) == {"weight0", "weight2", "weight3"}


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
