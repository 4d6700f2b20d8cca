"""Generated models: random graphs of common operators, with If and Loop bodies, functions, and weights of many types.

All values have three rows, so that any of them can be an input of any operator that takes its type. Nothing depends on
the last bit of a float (no rounding to integers, no comparison), so that implementations can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

__all__ = ["GeneratedModel", "generated_models"]

Array = npt.NDArray[np.generic]
ROWS = 3
OPSET = 19  # the first whose DequantizeLinear onnx.reference has
_ARITHMETIC = ("float32", "float64", "float16", "int32", "int64")
_OTHERS = ("int8", "uint8", "int16", "uint16", "uint32", "uint64", "bool")
_FUNCTION_COLUMNS = 8


@dataclass(frozen=True)
class GeneratedModel:
    """A model, the bytes of the file ``weights.bin`` that it names, and inputs for it."""

    model: onnx.ModelProto
    data: bytes
    feeds: Mapping[str, Array]


@dataclass(frozen=True)
class _Value:
    name: str
    dtype: str
    columns: int


@dataclass
class _Shared:
    """What all graphs of one model have in common."""

    draw: st.DrawFn
    data: bytearray = field(default_factory=bytearray)
    functions: list[onnx.FunctionProto] = field(default_factory=list)
    number: int = 0

    def name(self, kind: str) -> str:
        self.number += 1
        return f"{kind}{self.number}"


@dataclass
class _Graph:
    """A graph that is being made: its nodes and initializers. A function has no initializers."""

    shared: _Shared
    in_function: bool = False
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)

    def add(self, op_type: str, inputs: list[str], dtype: str, columns: int, **attributes: object) -> _Value:
        output = self.shared.name("v")
        domain = str(attributes.pop("domain", ""))
        made = helper.make_node(op_type, inputs, [output], name=f"n_{output}", domain=domain, **attributes)
        self.nodes.append(made)
        return _Value(output, dtype, columns)

    def weight(self, dtype: str, *shape: int, scale: float = 0.5) -> str:
        """A weight of these elements, stored in one of the ways that there are; its name."""
        draw = self.shared.draw
        # Few seeds, so that some weights are equal.
        generator = np.random.default_rng([draw(st.integers(0, 4)), *shape])
        if dtype == "bool":
            array: Array = generator.integers(0, 2, shape).astype(bool)
        elif dtype.startswith("float"):
            array = (generator.standard_normal(shape) * scale).astype(dtype)
        else:
            array = generator.integers(0, 5, shape).astype(dtype)
        return self.constant(array, draw(st.sampled_from(["raw", "external", "external", "external", "typed", "node"])))

    def constant(self, array: Array, storage: str = "raw") -> str:
        name = self.shared.name("w")
        tensor = numpy_helper.from_array(array, name)
        if self.in_function or storage == "node":
            self.nodes.append(helper.make_node("Constant", [], [name], name=f"n_{name}", value=tensor))
            return name
        if storage == "external":
            data = self.shared.data
            data += bytes(-len(data) % self.shared.draw(st.sampled_from([1, 64, 4096])))
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", "weights.bin"), ("offset", len(data)), ("length", array.nbytes)):
                tensor.external_data.add(key=key, value=str(value))
            data += array.tobytes()
        elif storage == "typed" and array.dtype != np.float16:
            tensor = helper.make_tensor(name, tensor.data_type, array.shape, array.ravel().tolist())
        self.initializers.append(tensor)
        return name


def _of_same_type(graph: _Graph, v: _Value) -> _Value:
    """An operator that yields what it is given: the same element type, as many columns."""
    draw = graph.shared.draw
    if v.dtype == "bool":
        kind = draw(st.sampled_from(["And", "Or", "Xor", "Not"]))
        inputs = [v.name] if kind == "Not" else [v.name, graph.weight("bool", *_operand_shape(draw, v))]
        return graph.add(kind, inputs, v.dtype, v.columns)
    kind = draw(st.sampled_from(["arithmetic", "arithmetic", "arithmetic", "Transpose", "Identity", "float", "float"]))
    if kind == "float" and v.dtype == "float32":
        return _of_floats(graph, v)
    if kind == "Transpose":
        turned = graph.add("Transpose", [v.name], v.dtype, v.columns, perm=[1, 0])
        return graph.add("Transpose", [turned.name], v.dtype, v.columns, perm=[1, 0])
    if kind != "Identity" and v.dtype in _ARITHMETIC:
        operator = draw(st.sampled_from(["Add", "Sub", "Mul"]))
        inputs = [v.name, graph.weight(v.dtype, *_operand_shape(draw, v))]
        return graph.add(operator, inputs if draw(st.booleans()) else inputs[::-1], v.dtype, v.columns)
    return graph.add("Identity", [v.name], v.dtype, v.columns)


def _operand_shape(draw: st.DrawFn, v: _Value) -> list[int]:
    return draw(st.sampled_from([[], [1], [v.columns], [1, v.columns], [ROWS, 1], [ROWS, v.columns]]))


def _of_floats(graph: _Graph, v: _Value) -> _Value:
    kind = graph.shared.draw(
        st.sampled_from(["Tanh", "Sigmoid", "Relu", "Softmax", "norm", "square", "bias", "Conv", "int8"])
    )
    if kind == "norm":
        weights = [graph.weight("float32", v.columns), graph.weight("float32", v.columns)]
        return graph.add("LayerNormalization", [v.name, *weights], v.dtype, v.columns)
    if kind in ("square", "bias"):
        product = graph.add(
            "MatMul", [v.name, graph.weight("float32", v.columns, v.columns, scale=0.2)], v.dtype, v.columns
        )
        if kind == "square":
            return product
        return graph.add("Add", [product.name, graph.weight("float32", v.columns)], v.dtype, v.columns)
    if kind == "int8":
        # Not into a MatMul: default onnxruntime computes that one in integers.
        stored = graph.weight("int8", *_operand_shape(graph.shared.draw, v))
        scale = graph.constant(np.array(0.05, np.float32))
        dequantized = graph.add("DequantizeLinear", [stored, scale], v.dtype, v.columns)
        return graph.add("Add", [v.name, dequantized.name], v.dtype, v.columns)
    if kind == "Conv":
        shape = graph.constant(np.array([1, ROWS, v.columns]))
        reshaped = graph.add("Reshape", [v.name, shape], v.dtype, v.columns)
        weights = [graph.weight("float32", ROWS, ROWS, 3), graph.weight("float32", ROWS)]
        convolved = graph.add("Conv", [reshaped.name, *weights], v.dtype, v.columns, kernel_shape=[3], pads=[1, 1])
        back = graph.constant(np.array([ROWS, v.columns]))
        return graph.add("Reshape", [convolved.name, back], v.dtype, v.columns)
    return graph.add(kind, [v.name], v.dtype, v.columns)


def _widened(graph: _Graph, v: _Value) -> _Value:
    """A product with a matrix, through one of the operators for it."""
    draw = graph.shared.draw
    columns = draw(st.sampled_from([8, 16, 64]))
    kind = draw(st.sampled_from(["MatMul", "Gemm", "transposed", "half"]))
    if kind == "Gemm":
        inputs = [v.name, graph.weight("float32", columns, v.columns, scale=0.2), graph.weight("float32", columns)]
        return graph.add("Gemm", inputs, "float32", columns, transB=1, alpha=0.5)
    if kind == "transposed":
        stored = graph.weight("float32", columns, v.columns, scale=0.2)
        matrix = graph.add("Transpose", [stored], "float32", columns, perm=[1, 0]).name
    elif kind == "half":
        stored = graph.weight("float16", v.columns, columns, scale=0.2)
        matrix = graph.add("Cast", [stored], "float32", columns, to=TensorProto.FLOAT).name
    else:
        matrix = graph.weight("float32", v.columns, columns, scale=0.2)
    return graph.add("MatMul", [v.name, matrix], "float32", columns)


def _looked_up(graph: _Graph) -> _Value:
    """An embedding, summed over the positions."""
    columns = graph.shared.draw(st.sampled_from([8, 32]))
    dtype = graph.shared.draw(st.sampled_from(["float32", "float64", "int64", "int32"]))
    rows = graph.add("Gather", [graph.weight(dtype, 16, columns), "ids"], dtype, columns, axis=0)
    axes = graph.constant(np.array([1]))
    return graph.add("ReduceSum", [rows.name, axes], dtype, columns, keepdims=0)


def _cast(graph: _Graph, v: _Value) -> _Value:
    """To a type that holds all values of this one, or to float32."""
    targets = {"float32": ["float64", "float16"], "int32": ["int64", "float64"]}.get(v.dtype, [])
    target = graph.shared.draw(st.sampled_from(["float32", *targets]))
    to = helper.np_dtype_to_tensor_dtype(np.dtype(target))
    return graph.add("Cast", [v.name], target, v.columns, to=to)


def _joined(graph: _Graph, v: _Value) -> _Value:
    if v.columns > 64:
        return _of_same_type(graph, v)
    columns = graph.shared.draw(st.sampled_from([1, 8]))
    inputs = [v.name, graph.weight(v.dtype, ROWS, columns)]
    return graph.add("Concat", inputs, v.dtype, v.columns + columns, axis=1)


def _body(graph: _Graph, v: _Value, depth: int) -> tuple[_Graph, _Value]:
    """A graph that makes of ``v``, a value from outside or its input, another one like it."""
    body = _Graph(graph.shared, graph.in_function)
    result = v
    for _ in range(graph.shared.draw(st.integers(1, 2))):
        result = _of_same_type(body, result)
    if depth and graph.shared.draw(st.integers(0, 2)) == 0:
        result = _branched(body, result, depth - 1)
    # A graph must not yield what stands outside of it.
    return body, body.add("Identity", [result.name], v.dtype, v.columns)


def _branched(graph: _Graph, v: _Value, depth: int) -> _Value:
    draw = graph.shared.draw
    if graph.in_function:
        condition = graph.constant(np.array(draw(st.booleans())))
    else:
        condition = draw(st.sampled_from(["flag", "raw", "node"]))
        if condition != "flag":
            # Not external: onnxruntime 1.32 looks for that one in the working directory.
            condition = graph.constant(np.array(draw(st.booleans())), condition)
    branches = {}
    for key in ("then_branch", "else_branch"):
        body, result = _body(graph, v, depth)
        output = helper.make_tensor_value_info(result.name, _onnx(v.dtype), [ROWS, v.columns])
        branches[key] = helper.make_graph(body.nodes, graph.shared.name("g"), [], [output], body.initializers)
    return graph.add("If", [condition], v.dtype, v.columns, **branches)


def _looped(graph: _Graph, v: _Value, depth: int) -> _Value:
    shared = graph.shared
    state = _Value(shared.name("s"), v.dtype, v.columns)
    body, result = _body(graph, state, depth)
    index, go, on = shared.name("i"), shared.name("c"), shared.name("c")
    body.nodes.append(helper.make_node("Identity", [go], [on]))
    made = helper.make_graph(
        body.nodes,
        shared.name("g"),
        [
            helper.make_tensor_value_info(index, TensorProto.INT64, []),
            helper.make_tensor_value_info(go, TensorProto.BOOL, []),
            helper.make_tensor_value_info(state.name, _onnx(v.dtype), [ROWS, v.columns]),
        ],
        [
            helper.make_tensor_value_info(on, TensorProto.BOOL, []),
            helper.make_tensor_value_info(result.name, _onnx(v.dtype), [ROWS, v.columns]),
        ],
        body.initializers,
    )
    trips = graph.constant(np.array(shared.draw(st.integers(0, 3))))
    go_on = graph.constant(np.array(True))  # onnx.reference runs no trip of a Loop without a condition
    return graph.add("Loop", [trips, go_on, v.name], v.dtype, v.columns, body=made)


def _function(shared: _Shared) -> None:
    """Add a function of one float32 value; it may call the one before it."""
    made = _Graph(shared, in_function=True)
    value = _Value("a", "float32", _FUNCTION_COLUMNS)
    if shared.functions and shared.draw(st.booleans()):
        value = made.add(shared.functions[-1].name, [value.name], value.dtype, value.columns, domain="local")
    for _ in range(shared.draw(st.integers(1, 3))):
        value = _of_same_type(made, value)
    if shared.draw(st.integers(0, 2)) == 0:
        value = _branched(made, value, 0)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("local", 1)]
    name = f"F{len(shared.functions)}"
    shared.functions.append(helper.make_function("local", name, ["a"], [value.name], made.nodes, opsets))


def _step(graph: _Graph, v: _Value) -> _Value:
    draw = graph.shared.draw
    kinds = ["same", "same", "same", "If", "Loop", "join", "cast", "look up"]
    if v.dtype == "float32":
        kinds += ["widen", "widen", "widen"]
        if v.columns == _FUNCTION_COLUMNS and graph.shared.functions:
            kinds += ["call", "call"]
    kind = draw(st.sampled_from(kinds))
    if kind == "If":
        return _branched(graph, v, 1)
    if kind == "Loop":
        return _looped(graph, v, 1)
    if kind == "join":
        return _joined(graph, v)
    if kind == "cast":
        return _cast(graph, v)
    if kind == "look up":
        return _looked_up(graph)
    if kind == "widen":
        return _widened(graph, v)
    if kind == "call":
        function = draw(st.sampled_from(graph.shared.functions))
        return graph.add(function.name, [v.name], v.dtype, v.columns, domain="local")
    return _of_same_type(graph, v)


@st.composite
def generated_models(draw: st.DrawFn, *, most_steps: int = 9) -> GeneratedModel:
    """Models that run, each with inputs."""
    shared = _Shared(draw)
    for _ in range(draw(st.integers(0, 2))):
        _function(shared)
    graph = _Graph(shared)
    inputs = [_Value("x", "float32", 8), _Value("z", draw(st.sampled_from([*_ARITHMETIC, *_OTHERS])), 8)]
    values = list(inputs)
    for _ in range(draw(st.integers(1, most_steps))):
        # Mostly the newest value, so that graphs are deep as well as wide.
        chosen = values[-1] if draw(st.integers(0, 2)) else draw(st.sampled_from(values))
        values.append(_step(graph, chosen))
    results = [values[-1], *draw(st.lists(st.sampled_from(values[2:]), max_size=2, unique=True))]
    results = list(dict.fromkeys(results))
    declared = [helper.make_tensor_value_info(v.name, _onnx(v.dtype), [ROWS, v.columns]) for v in inputs]
    declared.append(helper.make_tensor_value_info("ids", TensorProto.INT64, [ROWS, "n"]))
    declared.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    outputs = [helper.make_tensor_value_info(v.name, _onnx(v.dtype), [ROWS, v.columns]) for v in results]
    made = helper.make_graph(graph.nodes, "graph", declared, outputs, graph.initializers)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("local", 1)]
    model = helper.make_model(made, opset_imports=opsets, functions=shared.functions, ir_version=9)
    generator = np.random.default_rng(draw(st.integers(0, 3)))
    feeds: dict[str, Array] = {
        "x": generator.standard_normal((ROWS, 8)).astype(np.float32),
        "z": generator.integers(0, 2, (ROWS, 8)).astype(inputs[1].dtype),
        "ids": generator.integers(0, 16, (ROWS, 4)),
        "flag": np.array(draw(st.booleans())),
    }
    return GeneratedModel(model, bytes(shared.data), feeds)


def _onnx(dtype: str) -> int:
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
