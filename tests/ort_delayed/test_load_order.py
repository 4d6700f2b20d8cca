"""At most one loaded weight waits for its use: on generated graphs, with and without ONNX Runtime's optimizations.

``load_order`` says what waiting means and how it is seen.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from delayed_models import FLOAT, delayed, function, model, node, save, value, write
from hypothesis import given, settings
from hypothesis import strategies as st
from load_order import Observed, observe
from onnx import TensorProto, helper
from onnxruntime import GraphOptimizationLevel

import ort_delayed
from ort_delayed import preparing

N = 4
LEVELS = [GraphOptimizationLevel.ORT_DISABLE_ALL, GraphOptimizationLevel.ORT_ENABLE_ALL]
KNOWN = {"always": True, "never": False}
"""Conditions that ONNX Runtime knows beforehand."""


class Build:
    """A graph under construction: names, weights at offsets of their own, and the values made so far."""

    def __init__(self, count: list[int], prefix: str = "", function_domain: bool = False) -> None:
        self.count, self.prefix = count, prefix
        self.nodes: list[onnx.NodeProto] = []

    def name(self, kind: str) -> str:
        self.count[0] += 1
        return f"{self.prefix}{kind}{self.count[0]}"

    def op(self, op_type: str, *inputs: str, **attributes: object) -> str:
        output = self.name(op_type.lower())
        self.nodes.append(node(op_type, list(inputs), [output], name=f"n_{output}", **attributes))
        return output

    def weight(self, *shape: int) -> str:
        output = self.name("w")
        self.nodes.append(delayed(output, shape or [N, N], offset=4 * (self.count[0] % 50)))
        return output


def _gelu(b: Build, m: str) -> str:
    return b.op("Mul", b.op("Mul", m, b.op("Add", b.op("Erf", b.op("Div", m, "root")), "one")), "half")


# --- weight-only expressions: each yields the name of a matrix that hangs on weights alone ----------------------------


def plain(b: Build) -> str:
    return b.weight()


def transposed(b: Build) -> str:
    return b.op("Transpose", b.weight(), perm=[1, 0])


def cast_twice(b: Build) -> str:
    return b.op("Cast", b.op("Cast", b.weight(), to=TensorProto.DOUBLE), to=FLOAT)


def scaled(b: Build) -> str:
    return b.op("Mul", b.weight(), "scale")


def scaled_by_weight(b: Build) -> str:
    return b.op("Mul", b.weight(), b.weight(N))


def transposed_and_scaled(b: Build) -> str:
    return b.op("Mul", b.op("Transpose", b.weight(), perm=[1, 0]), "row")


def scaled_and_transposed(b: Build) -> str:
    return b.op("Transpose", b.op("Mul", b.weight(), "row"), perm=[1, 0])


def product(b: Build) -> str:
    return b.op("MatMul", b.weight(N, 2), b.op("Transpose", b.weight(N, 2), perm=[1, 0]))


def gelu_of_weights(b: Build) -> str:
    return _gelu(b, b.weight())


def half_precision(b: Build) -> str:
    output = b.name("w")
    b.nodes.append(delayed(output, [N, N], offset=4 * (b.count[0] % 50), dtype=TensorProto.FLOAT16))
    return b.op("Cast", b.op("Transpose", b.op("Mul", output, output), perm=[1, 0]), to=FLOAT)


def by_function(b: Build) -> str:
    output = b.name("f")
    b.nodes.append(node("Turn", [b.weight()], [output], name=f"n_{output}", domain="local"))
    return output


MATRICES: list[Callable[[Build], str]] = [
    plain,
    transposed,
    cast_twice,
    scaled,
    scaled_by_weight,
    transposed_and_scaled,
    scaled_and_transposed,
    product,
    gelu_of_weights,
    half_precision,
    by_function,
]

FUSED = [product, gelu_of_weights]
"""What ONNX Runtime fuses among weights alone; see the test of fused weights in parallel branches."""

# --- steps: each takes an activation and yields the next --------------------------------------------------------------


def matmul(b: Build, h: str, matrix: Callable[[Build], str]) -> str:
    return b.op("MatMul", h, matrix(b))


def matmul_add(b: Build, h: str, matrix: Callable[[Build], str]) -> str:
    return b.op("Add", b.op("MatMul", h, matrix(b)), b.weight(N))


def gemm_relu(b: Build, h: str, matrix: Callable[[Build], str]) -> str:
    return b.op("Relu", b.op("Gemm", h, matrix(b), b.weight(N), transB=1))


def gelu(b: Build, h: str, matrix: Callable[[Build], str]) -> str:
    return _gelu(b, b.op("MatMul", h, matrix(b)))


def layer_norm(b: Build, h: str, matrix: Callable[[Build], str]) -> str:
    centred = b.op("Sub", h, b.op("ReduceMean", h, axes=[-1]))
    variance = b.op("ReduceMean", b.op("Pow", centred, "two"), axes=[-1])
    normal = b.op("Div", centred, b.op("Sqrt", b.op("Add", variance, "epsilon")))
    return b.op("Add", b.op("Mul", normal, b.weight(N)), b.weight(N))


def residual(b: Build, h: str, matrix: Callable[[Build], str]) -> str:
    return b.op("Add", b.op("Tanh", b.op("MatMul", h, matrix(b))), h)


def branches(b: Build, h: str, matrix: Callable[[Build], str]) -> str:
    return b.op("Add", b.op("MatMul", h, matrix(b)), b.op("Sigmoid", b.op("MatMul", h, transposed(b))))


def shared(b: Build, h: str, matrix: Callable[[Build], str]) -> str:
    w = matrix(b)
    return b.op("MatMul", b.op("MatMul", h, w), w)


def holding_function(b: Build, h: str, matrix: Callable[[Build], str]) -> str:
    output = b.name("f")
    b.nodes.append(node("Layer", [h], [output], name=f"n_{output}", domain="local"))
    return output


def given_function(b: Build, h: str, matrix: Callable[[Build], str]) -> str:
    output = b.name("f")
    b.nodes.append(node("Dense", [h, matrix(b)], [output], name=f"n_{output}", domain="local"))
    return output


def plain_function(b: Build, h: str, matrix: Callable[[Build], str]) -> str:
    output = b.name("f")
    b.nodes.append(node("Activate", [h], [output], name=f"n_{output}", domain="local"))
    return b.op("MatMul", output, matrix(b))


def branch(b: Build, h: str, matrix: Callable[[Build], str], captured: str | None) -> onnx.GraphProto:
    inner = Build(b.count, prefix="b_")
    middle = inner.op("Tanh", inner.op("MatMul", h, captured or matrix(inner)))
    output = inner.op("MatMul", middle, transposed(inner)) if captured is None else middle
    return helper.make_graph(inner.nodes, inner.name("g"), [], [value(output, None)])


def on_condition(condition: str, captures: bool) -> Callable[[Build, str, Callable[[Build], str]], str]:
    def step(b: Build, h: str, matrix: Callable[[Build], str]) -> str:
        captured = matrix(b) if captures else None
        then, other = (branch(b, h, matrix, captured) for _ in range(2))
        return b.op("If", condition, then_branch=then, else_branch=other)

    step.__name__ = f"if_{condition}_{'captured' if captures else 'inside'}"
    return step


STEPS: list[Callable[[Build, str, Callable[[Build], str]], str]] = [
    matmul,
    matmul_add,
    gemm_relu,
    gelu,
    layer_norm,
    residual,
    branches,
    shared,
    holding_function,
    given_function,
    plain_function,
    *(on_condition(c, captures) for c in ("asked", *KNOWN) for captures in (False, True)),
]

FUNCTIONS = [
    function("Turn", ["w"], ["t"], [node("Transpose", ["w"], ["t"], name="turn")]),
    function(
        "Layer",
        ["a"],
        ["b"],
        [
            delayed("w", [N, N], offset=4),
            node("Transpose", ["w"], ["t"], name="layer_t"),
            node("MatMul", ["a", "t"], ["m"], name="layer_m"),
            node("Tanh", ["m"], ["b"], name="layer_b"),
        ],
    ),
    function(
        "Dense",
        ["a", "w"],
        ["b"],
        [
            node("Transpose", ["w"], ["t"], name="dense_t"),
            node("MatMul", ["a", "t"], ["m"], name="dense_m"),
            node("Relu", ["m"], ["b"], name="dense_b"),
        ],
    ),
    function(
        "Activate",
        ["a"],
        ["b"],
        [node("Neg", ["a"], ["t"], name="activate_t"), node("Tanh", ["t"], ["b"], name="activate_b")],
    ),
]


def build(steps: list[tuple[int, int, bool]]) -> onnx.ModelProto:
    """A model of these steps: which step, which weight expression, and whether an earlier value is added."""
    b, values = Build([0]), ["x"]
    for step, matrix, add_earlier in steps:
        expression = MATRICES[matrix % len(MATRICES)]
        h = STEPS[step](b, values[-1], plain if STEPS[step] is branches and expression in FUSED else expression)
        if add_earlier:
            h = b.op("Add", h, values[(step + matrix) % len(values)])
        values.append(h)
    return whole(b, values[-1])


def whole(b: Build, output: str) -> onnx.ModelProto:
    """The model that yields this value."""
    b.nodes.append(node("Identity", [output], ["y"], name="n_y"))
    constants = {"scale": 2.0, "root": 2**0.5, "one": 1.0, "half": 0.5, "two": 2.0, "epsilon": 1e-5}
    initializers = [helper.make_tensor(n, FLOAT, [], [v]) for n, v in constants.items()]
    initializers += [helper.make_tensor(n, TensorProto.BOOL, [], [v]) for n, v in KNOWN.items()]
    initializers.append(helper.make_tensor("zero", TensorProto.INT8, [], [0]))
    initializers.append(helper.make_tensor("row", FLOAT, [N], [1.0] * N))
    return model(
        b.nodes,
        [value("x", [3, N]), value("asked", [], TensorProto.BOOL)],
        [value("y", None)],
        initializers=initializers,
        functions=FUNCTIONS,
    )


def observe_run(made: onnx.ModelProto, level: GraphOptimizationLevel, dtype: str = "float32") -> Observed:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write(directory / "w.bin", np.linspace(-1, 1, N * N + 100, dtype=np.float32))
        feeds = {"x": np.ones((3, N), dtype), "asked": np.array(True)}
        return observe(save(directory / "m.onnx", made), feeds, level, directory)


def assert_in_order(made: onnx.ModelProto, level: GraphOptimizationLevel) -> int:
    """Run the model and return how many loads there were."""
    observed = observe_run(made, level)
    assert observed.waiting_elsewhere == [], observed.events
    return len(observed.loads)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("step", range(len(STEPS)), ids=[s.__name__ for s in STEPS])
def test_a_chain_of_each_step_with_every_weight_expression(step: int, level: GraphOptimizationLevel) -> None:
    assert assert_in_order(build([(step, matrix, False) for matrix in range(len(MATRICES))]), level) >= len(MATRICES)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=40)
@given(steps=st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 50), st.booleans()), max_size=9))
def test_generated_graphs(steps: list[tuple[int, int, bool]], level: GraphOptimizationLevel) -> None:
    assert_in_order(build(steps), level)


@pytest.mark.parametrize("level", LEVELS)
def test_a_loop_body_loads_at_each_trip_right_before_its_use(level: GraphOptimizationLevel) -> None:
    b = Build([0], prefix="b_")
    out = residual(b, matmul_add(b, "s", transposed), scaled)
    body = helper.make_graph(
        [node("Identity", ["go"], ["go_on"], name="n_go"), *b.nodes],
        "body",
        [value("trip", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("s", [3, N])],
        [value("go_on", [], TensorProto.BOOL), value(out, [3, N])],
    )
    made = model(
        [node("Loop", ["three", "", "x"], ["y"], body=body, name="n_loop")],
        [value("x", [3, N]), value("asked", [], TensorProto.BOOL)],
        [value("y", None)],
        initializers=[
            helper.make_tensor("three", TensorProto.INT64, [], [3]),
            helper.make_tensor("scale", FLOAT, [], [2.0]),
        ],
    )
    assert assert_in_order(made, level) == 9


def test_the_observer_sees_loads_that_come_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without what preparing does about it, ONNX Runtime loads everything first.
    monkeypatch.setattr(preparing, "awaited_activations", lambda nodes, front, known: {})
    # Without what preparing does about it, ONNX Runtime loads everything first.
    monkeypatch.setattr(preparing, "_let_loads_wait", lambda nodes, order, known, context: nodes)
    for level in LEVELS:
        with pytest.raises(AssertionError, match="waited while"):
            assert_in_order(build([(0, 0, False)] * 4), level)


@pytest.mark.parametrize("matrix", FUSED)
def test_fused_weights_in_parallel_branches_wait_for_each_other_only(matrix: Callable[[Build], str]) -> None:
    # Both branches start from one activation, and ONNX Runtime computes what it fused first: the weights of one branch
    # wait while the other runs. How long the model is has no part in it.
    most = []
    for length in (2, 8):
        b, h = Build([0]), "x"
        for _ in range(length):
            h = branches(b, h, matrix)
        most.append(observe_run(whole(b, h), LEVELS[1]).most_waiting_elsewhere)
    assert most[0] == most[1] <= 2


@pytest.mark.parametrize("level", LEVELS)
def test_half_precision_weights_that_onnxruntime_casts(level: GraphOptimizationLevel) -> None:
    # There are no float16 kernels on the CPU: a Cast is put between each weight and its use, last in the node list.
    b, h = Build([0]), "x"
    for _ in range(4):
        weights = [b.name("w"), b.name("w")]
        b.nodes += [delayed(w, [N, N], dtype=TensorProto.FLOAT16) for w in weights]
        h = b.op("MatMul", h, weights[0])
        h = b.op("MatMul", h, b.op("Transpose", weights[1], perm=[1, 0]))
    made = whole(b, h)
    made.graph.input[0].type.tensor_type.elem_type = made.graph.output[0].type.tensor_type.elem_type = 10
    observed = observe_run(made, level, "float16")
    assert len(observed.loads) == 8
    assert observed.waiting_elsewhere == [], observed.events


def optimized_ops(made: onnx.ModelProto) -> Counter[str]:
    """The ops of the graph that ONNX Runtime makes of a model, apart from those that preparing adds."""
    with tempfile.TemporaryDirectory() as scratch:
        options = onnxruntime.SessionOptions()
        prepared = ort_delayed.prepare_model(save(Path(scratch) / "m.onnx", made), options)
        options.optimized_model_filepath = str(Path(scratch) / "optimized.onnx")
        onnxruntime.InferenceSession(prepared, options)
        nodes = onnx.load(options.optimized_model_filepath).graph.node
    return Counter(n.op_type for n in nodes if n.domain != "ai.rt" and n.op_type != "Size")


def quantized(b: Build, h: str) -> str:
    weight = b.name("w")
    b.nodes.append(delayed(weight, [N, N], dtype=TensorProto.INT8))
    activation = b.op("DequantizeLinear", b.op("QuantizeLinear", h, "scale", "zero"), "scale", "zero")
    product = b.op("MatMul", activation, b.op("DequantizeLinear", weight, "scale", "zero"))
    return b.op("DequantizeLinear", b.op("QuantizeLinear", product, "scale", "zero"), "scale", "zero")


def transposed_activation(b: Build, h: str) -> str:
    return b.op("MatMul", b.op("Transpose", h, perm=[1, 0]), b.weight(3, 3))


def normalized_residual(b: Build, h: str) -> str:
    return layer_norm(b, b.op("Add", b.op("Add", b.op("MatMul", h, b.weight()), b.weight(N)), h), plain)


FUSING = [
    (transposed_activation, {"FusedMatMul": 1}),
    (quantized, {"QLinearMatMul": 2}),
    (normalized_residual, {"LayerNormalization": 2}),
    (lambda b, h: gelu(b, matmul_add(b, h, plain), transposed), {"Gelu": 2}),
    (lambda b, h: gemm_relu(b, h, plain), {"FusedGemm": 2}),
]


@pytest.mark.parametrize(("step", "fused"), FUSING)
def test_waiting_prevents_no_fusion(
    step: Callable[[Build, str], str], fused: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ops() -> Counter[str]:
        b = Build([0])
        h = step(b, "x")
        return optimized_ops(whole(b, h if step is transposed_activation else step(b, h)))

    waiting = ops()
    assert {op: waiting[op] for op in fused} == fused
    monkeypatch.setattr(preparing, "awaited_activations", lambda nodes, front, known: {})
    assert ops() == waiting
