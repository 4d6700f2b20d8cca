"""Makes the small models of this directory: each carries delayed initializers and shows one thing.

    python models/make_models.py [directory]

The result is the same bytes every time: values are small fractions computed from positions, not random numbers, and
everything that a newer onnx might choose otherwise (IR version, opset, producer) is fixed here. README.md lists what
each model shows; tests/test_models.py makes them again, compares the bytes and runs them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from ort_delayed.ops import make_node

IR_VERSION = 10
OPSET = 21
DELAYED_OPSET = helper.make_opsetid("ai.rt", 1)
FLOAT = TensorProto.FLOAT

Array = npt.NDArray[np.generic]


@dataclass
class Example:
    """One model and the data files it brings along; several models may share one."""

    name: str
    model: onnx.ModelProto
    data: dict[str, bytes] = field(default_factory=dict)


def values(shape: Sequence[int], seed: int) -> npt.NDArray[np.float32]:
    """Multiples of 1/32 between -15/32 and 15/32: exact in float32, alike everywhere, different for each seed."""
    count = int(np.prod(shape))
    numbers = (np.arange(count) * 37 + seed * 101 + (np.arange(count) // 31) * 7) % 31 - 15
    return (numbers / 32).astype(np.float32).reshape(shape)


def payload(*arrays: Array) -> bytes:
    """The raw little-endian bytes of the arrays, one after the other."""
    return b"".join(a.astype(a.dtype.newbyteorder("<")).tobytes() for a in arrays)


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    *,
    name: str,
    functions: Sequence[onnx.FunctionProto] = (),
    initializers: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, name, inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", OPSET), DELAYED_OPSET]
    if functions:
        opsets.append(helper.make_opsetid("local", 1))
    model = helper.make_model(
        graph, opset_imports=opsets, functions=functions, producer_name="ort-delayed", ir_version=IR_VERSION
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def tensor(name: str, shape: Sequence[int | str], dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


# --- The specification's two examples ---------------------------------------------------------------------------------


def specification_cpu() -> Example:
    """``test_cc_delayedinitializer_cpu``: three numbers, read when the session is constructed."""
    data = "onnx_light_backend_delayedinitializer_cpu.bin"
    node = make_node("y", filename=data, shape=[3], dtype=FLOAT, offset=0, load_device="cpu")
    model = make_model([node], [], [tensor("y", [3])], name="cpu")
    return Example("test_cc_delayedinitializer_cpu", model, {data: payload(np.array([3, 4, 5], np.float32))})


def specification_file() -> Example:
    """``test_cc_delayedinitializer_file``: two numbers at byte 8, read at every run."""
    data = "onnx_light_backend_delayedinitializer_file.bin"
    node = make_node("y", filename=data, shape=[2], dtype=FLOAT, offset=8, load_device="file")
    model = make_model([node], [], [tensor("y", [2])], name="file")
    # What stands before byte 8 must not come out; the specification does not say what it is.
    return Example("test_cc_delayedinitializer_file", model, {data: payload(np.array([-7, -8, 1.5, -2], np.float32))})


# --- One model per element type ---------------------------------------------------------------------------------------

# Values that a detour over another type would change: NaNs with a payload (given by their bits), subnormals, negative
# zero, and integers that no double holds.
TYPE_VALUES: dict[str, Array] = {
    "bool": np.array([True, False, True, True, False]),
    "float16": np.array([0x3C00, 0x8000, 0x0001, 0x7E2A, 0x7C00, 0xFBFF], np.uint16).view(np.float16),
    "float32": np.array([0x3FC00000, 0x80000000, 1, 0x7FC12345, 0x7F800000, 0xFF7FFFFF], np.uint32).view(np.float32),
    "float64": np.array([0x3FF8000000000000, 1 << 63, 1, 0x7FF8000123456789, 0x7FF0000000000000], np.uint64).view(
        np.float64
    ),
    "int8": np.array([0, 1, -1, 127, -128], np.int8),
    "int16": np.array([0, 1, -1, 2**15 - 1, -(2**15)], np.int16),
    "int32": np.array([0, 1, -1, 2**31 - 1, -(2**31)], np.int32),
    "int64": np.array([0, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)], np.int64),
    "uint8": np.array([0, 1, 128, 255], np.uint8),
    "uint16": np.array([0, 1, 2**15, 2**16 - 1], np.uint16),
    "uint32": np.array([0, 1, 2**31, 2**32 - 1], np.uint32),
    "uint64": np.array([0, 2**53 + 1, 2**63 + 1, 2**64 - 1], np.uint64),
    "complex64": np.array([1.5 - 2j, -0.25 + 3j, 0 + 1e-40j], np.complex64),
    "complex128": np.array([1.5 - 2j, -0.25 + 3j, 1e-310 + 0j], np.complex128),
}
TYPES_FILE = "types.bin"


def type_offsets() -> tuple[dict[str, int], bytes]:
    """Where each type's values stand in the file that the type models share. No offset is aligned."""
    offsets: dict[str, int] = {}
    data = b"\xff"
    for name, array in TYPE_VALUES.items():
        offsets[name] = len(data)
        data += payload(array)
        data += b"\xff" * (1 + len(data) % 2)
    return offsets, data


def element_type(name: str) -> Example:
    """The values of one element type, delivered once in each mode."""
    array = TYPE_VALUES[name]
    offsets, data = type_offsets()
    dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
    nodes = [
        make_node(
            f"y_{mode}", filename=TYPES_FILE, shape=array.shape, dtype=dtype, offset=offsets[name], load_device=mode
        )
        for mode in ("cpu", "file")
    ]
    outputs = [tensor(f"y_{mode}", array.shape, dtype) for mode in ("cpu", "file")]
    return Example(f"type_{name}", make_model(nodes, [], outputs, name=name), {TYPES_FILE: data})


# --- Weights used more than once --------------------------------------------------------------------------------------


def shared_weight() -> Example:
    """One delayed node with three consumers, one of which reads it through a Transpose."""
    data = "shared_weight.bin"
    nodes = [
        make_node("w", filename=data, shape=[8, 8], dtype=FLOAT, name="weight"),
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("MatMul", ["a", "w"], ["b"]),
        helper.make_node("Transpose", ["w"], ["w_t"], perm=[1, 0]),
        helper.make_node("MatMul", ["b", "w_t"], ["y"]),
    ]
    model = make_model(nodes, [tensor("x", ["n", 8])], [tensor("y", ["n", 8])], name="shared_weight")
    return Example("shared_weight", model, {data: payload(values([8, 8], 1))})


def tied_weights() -> Example:
    """Two delayed nodes on the same bytes: an embedding, and the output projection that is tied to it."""
    data = "tied_weights.bin"
    nodes = [
        make_node("embedding", filename=data, shape=[20, 6], dtype=FLOAT, name="embedding"),
        helper.make_node("Gather", ["embedding", "ids"], ["embedded"], axis=0),
        helper.make_node("Tanh", ["embedded"], ["hidden"]),
        make_node("head", filename=data, shape=[20, 6], dtype=FLOAT, name="head"),
        helper.make_node("Transpose", ["head"], ["head_t"], perm=[1, 0]),
        helper.make_node("MatMul", ["hidden", "head_t"], ["logits"]),
    ]
    inputs = [tensor("ids", ["n"], TensorProto.INT64)]
    model = make_model(nodes, inputs, [tensor("logits", ["n", 20])], name="tied_weights")
    return Example("tied_weights", model, {data: payload(values([20, 6], 2))})


# --- Bodies -----------------------------------------------------------------------------------------------------------


def if_branches() -> Example:
    """A delayed weight in each branch of an If; a run loads only the branch that is taken."""
    data = "if_branches.bin"
    weights = [values([4, 4], 3), values([4, 4], 4)]

    def branch(name: str, offset: int) -> onnx.GraphProto:
        weight = make_node(f"{name}_w", filename=data, shape=[4, 4], dtype=FLOAT, offset=offset, name=f"{name}_weight")
        product = helper.make_node("MatMul", ["x", f"{name}_w"], [f"{name}_y"])
        return helper.make_graph([weight, product], name, [], [tensor(f"{name}_y", ["n", 4])])

    node = helper.make_node(
        "If", ["condition"], ["y"], then_branch=branch("then", 0), else_branch=branch("else", weights[0].nbytes)
    )
    inputs = [tensor("condition", [], TensorProto.BOOL), tensor("x", ["n", 4])]
    return Example(
        "if_branches",
        make_model([node], inputs, [tensor("y", ["n", 4])], name="if_branches"),
        {data: payload(*weights)},
    )


def loop_body() -> Example:
    """A delayed weight in the body of a Loop; it is loaded at each trip."""
    data = "loop_body.bin"
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["condition"], ["go_on"]),
            make_node("w", filename=data, shape=[4, 4], dtype=FLOAT, name="weight"),
            helper.make_node("MatMul", ["state", "w"], ["product"]),
            helper.make_node("Tanh", ["product"], ["next_state"]),
        ],
        "body",
        [tensor("trip", [], TensorProto.INT64), tensor("condition", [], TensorProto.BOOL), tensor("state", ["n", 4])],
        [tensor("go_on", [], TensorProto.BOOL), tensor("next_state", ["n", 4])],
    )
    # Without a condition, which the operator allows, onnx.reference makes no trip at all.
    always = onnx.numpy_helper.from_array(np.array(True), "always")
    node = helper.make_node("Loop", ["trips", "always", "x"], ["y"], body=body)
    inputs = [tensor("trips", [], TensorProto.INT64), tensor("x", ["n", 4])]
    model = make_model([node], inputs, [tensor("y", ["n", 4])], name="loop_body", initializers=[always])
    return Example("loop_body", model, {data: payload(values([4, 4], 5))})


# --- Functions --------------------------------------------------------------------------------------------------------

CALLS = 6


def function_calls() -> Example:
    """A model-local function with a delayed node in its body, called six times: six loads of the same bytes."""
    data = "function_calls.bin"
    layer = helper.make_function(
        "local",
        "Layer",
        ["x"],
        ["y"],
        [
            make_node("w", filename=data, shape=[8, 8], dtype=FLOAT, name="weight"),
            helper.make_node("MatMul", ["x", "w"], ["product"]),
            helper.make_node("Tanh", ["product"], ["y"]),
        ],
        [helper.make_opsetid("", OPSET), DELAYED_OPSET],
    )
    calls = [
        helper.make_node("Layer", [f"h{i}" if i else "x"], [f"h{i + 1}" if i + 1 < CALLS else "y"], domain="local")
        for i in range(CALLS)
    ]
    model = make_model(
        calls, [tensor("x", ["n", 8])], [tensor("y", ["n", 8])], name="function_calls", functions=[layer]
    )
    return Example("function_calls", model, {data: payload(values([8, 8], 6))})


def function_reference_attributes() -> Example:
    """The same with ``filename`` and ``offset`` given by each call: one node in the body is six different weights."""
    files = ["function_even_layers.bin", "function_odd_layers.bin"]
    weights = [values([8, 8], 10 + i) for i in range(CALLS)]
    weight = make_node("w", filename="given by the call", shape=[8, 8], dtype=FLOAT, name="weight")
    for attribute in weight.attribute:
        if attribute.name in ("filename", "offset"):
            reference = f"weight_{attribute.name}"
            attribute.CopyFrom(onnx.AttributeProto(name=attribute.name, type=attribute.type, ref_attr_name=reference))
    layer = helper.make_function(
        "local",
        "Layer",
        ["x"],
        ["y"],
        [
            weight,
            helper.make_node("MatMul", ["x", "w"], ["product"]),
            helper.make_node("Tanh", ["product"], ["y"]),
        ],
        [helper.make_opsetid("", OPSET), DELAYED_OPSET],
        attributes=["weight_filename", "weight_offset"],
    )
    calls = [
        helper.make_node(
            "Layer",
            [f"h{i}" if i else "x"],
            [f"h{i + 1}" if i + 1 < CALLS else "y"],
            domain="local",
            weight_filename=files[i % 2],
            weight_offset=(i // 2) * weights[i].nbytes,
        )
        for i in range(CALLS)
    ]
    model = make_model(
        calls, [tensor("x", ["n", 8])], [tensor("y", ["n", 8])], name="function_reference_attributes", functions=[layer]
    )
    data = {name: payload(*weights[parity::2]) for parity, name in enumerate(files)}
    return Example("function_reference_attributes", model, data)


# --- A chain ----------------------------------------------------------------------------------------------------------

LINKS = 8


def matmul_chain() -> Example:
    """Eight MatMuls, each weight stored transposed; the nodes stand where a converter puts them, before their use."""
    data = "matmul_chain.bin"
    weights = [values([32, 32], 20 + i) for i in range(LINKS)]
    nodes = []
    for i, weight in enumerate(weights):
        nodes += [
            make_node(
                f"w{i}", filename=data, shape=[32, 32], dtype=FLOAT, offset=i * weight.nbytes, name=f"weight_{i}"
            ),
            helper.make_node("Transpose", [f"w{i}"], [f"w{i}_t"], perm=[1, 0]),
            helper.make_node("MatMul", [f"h{i}" if i else "x", f"w{i}_t"], [f"h{i + 1}" if i + 1 < LINKS else "y"]),
        ]
    model = make_model(nodes, [tensor("x", ["n", 32])], [tensor("y", ["n", 32])], name="matmul_chain")
    return Example("matmul_chain", model, {data: payload(*weights)})


EXAMPLES: list[Callable[[], Example]] = [
    specification_cpu,
    specification_file,
    *(lambda name=name: element_type(name) for name in TYPE_VALUES),
    shared_weight,
    tied_weights,
    if_branches,
    loop_body,
    function_calls,
    function_reference_attributes,
    matmul_chain,
]


def write(directory: Path) -> list[Path]:
    """Write every model and data file into ``directory`` and return their paths."""
    files: dict[str, bytes] = {}
    for make in EXAMPLES:
        example = make()
        files[f"{example.name}.onnx"] = example.model.SerializeToString(deterministic=True)
        files.update(example.data)
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return [directory / name for name in files]


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    written = write(target)
    print(f"{len(written)} files, {sum(p.stat().st_size for p in written):,} bytes in {target}")
