"""Generated models: weights of any type, storage and place, converted, run and restored bit for bit."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from weighted_models import (
    constant,
    external,
    initializer,
    model,
    node,
    run_delayed,
    run_plain,
    same_bits,
    save,
    typed,
    value,
    weights,
)

from ort_delayed import convert_model, restore_model

DTYPES = ["bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint32", "uint64"]
FALSE, SCALAR = np.array(False), value("s", [])


@dataclass(frozen=True)
class Weight:
    dtype: str
    storage: str  # raw, typed, external, Constant
    place: str  # main, branch, function
    elements: int
    seed: int


some_weights = st.builds(
    Weight,
    st.sampled_from(DTYPES),
    st.sampled_from(["raw", "typed", "external", "Constant"]),
    st.sampled_from(["main", "branch", "function"]),
    st.sampled_from([1, 7, 1023, 1024, 5000, 20000]),
    st.integers(0, 3),
)


def summed(name: str, total: str) -> list[onnx.NodeProto]:
    """Nodes that make one number of a weight of any type."""
    return [node("Cast", [name], [f"{name} c"], to=1), node("ReduceSum", [f"{name} c"], [total], keepdims=0)]


def build(chosen: list[Weight], directory: Path) -> onnx.ModelProto:
    nodes: list[onnx.NodeProto] = [node("Identity", ["x"], ["total 0"])]
    tensors, functions = [], []
    external_bytes = b""
    for index, w in enumerate(chosen):
        name, array = f"w{index}", weights(w.elements, seed=w.seed, dtype=np.dtype(w.dtype).type)
        own = constant(name, typed(name, array) if w.storage == "typed" else array)
        stored = {"raw": initializer, "typed": typed}.get(w.storage, initializer)(name, array)
        if w.storage == "external":
            stored = external(name, array, "w.bin", len(external_bytes), array.nbytes if w.seed else None)
            external_bytes += array.tobytes()
        in_node = w.storage == "Constant" or w.place == "function"
        body = [*([own] if in_node else []), *summed(name, "s")]
        if w.place == "branch":
            graph = helper.make_graph(body, f"branch {index}", [], [SCALAR], [] if in_node else [stored])
            nodes.append(node("If", ["flag"], [f"s{index}"], then_branch=graph, else_branch=graph))
        elif w.place == "function":
            opsets = [helper.make_opsetid("", 17)]
            functions.append(helper.make_function("local", f"F{index}", [], ["s"], body, opsets))
            nodes.append(node(f"F{index}", [], [f"s{index}"], domain="local"))
        else:
            nodes += [*([own] if in_node else []), *summed(name, f"s{index}")]
            tensors += [] if in_node else [stored]
        nodes.append(node("Add", [f"total {index}", f"s{index}"], [f"total {index + 1}"]))
    (directory / "w.bin").write_bytes(external_bytes)
    inputs = [value("x", []), value("flag", [], TensorProto.BOOL)]
    return model(nodes, inputs, [value(f"total {len(chosen)}", [])], tensors, functions)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(some_weights, min_size=1, max_size=6),
    st.sampled_from([1, 1024, 4096]),
    st.booleans(),
    st.sampled_from(["source", "source/below", "beside"]),
    st.sampled_from(["file", "cpu"]),
)
def test_any_model_converts_runs_and_restores_to_the_same_bits(chosen, min_bytes, copy, place, load_device):
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "source" / "below").mkdir(parents=True)
        (directory / "beside").mkdir()
        source = save(build(chosen, directory / "source"), directory / "source" / "m.onnx")
        inputs = {"x": np.array(0.5, np.float32), "flag": FALSE}
        expected = run_plain(source, inputs)
        converted = directory / place / "converted.onnx"
        report = convert_model(source, converted, min_bytes=min_bytes, copy=copy, load_device=load_device)
        # A bool is a byte, a float64 eight: what is large enough is delayed, wherever it stands.
        sizes = [w.elements * np.dtype(w.dtype).itemsize for w in chosen]
        moved = [t for t in report.tensors if t.action in ("written", "referenced")]
        assert len({t.name for t in moved}) == sum(size >= min_bytes for size in sizes)
        assert same_bits(run_delayed(converted, inputs), expected)
        onnx.checker.check_model(onnx.load(converted, load_external_data=False), full_check=True)
        for restored in (converted.with_name("restored.onnx"), directory / "beside" / "restored again.onnx"):
            restore_model(converted, restored)
            assert same_bits(run_plain(restored, inputs), expected)
            onnx.load(restored)
