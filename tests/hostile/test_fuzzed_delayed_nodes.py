"""Delayed nodes whose attributes are anything, in graphs that are anything: the right values, or a typed error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from delayed_models import FLOAT, function, model, node, value
from fuzzing import fuzz, lengths
from hypothesis import strategies as st
from mutations import INTERESTING_INTEGERS, INTERESTING_TEXTS
from onnx import AttributeProto, TensorProto, helper
from trial_worker import TrialWorker

ELEMENTS = 64  # of float32 in the file that all nodes name
NAMES = ["dtype", "shape", "filename", "offset", "load_device", "runtime_device"]

integers = st.sampled_from(INTERESTING_INTEGERS).map(lambda n: min(max(n, -(2**63)), 2**63 - 1))
sensible: dict[str, st.SearchStrategy[Any]] = {
    "dtype": st.sampled_from([FLOAT, FLOAT, FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.BFLOAT16, 0, 99]),
    "shape": st.lists(st.sampled_from([0, 1, 2, 4, 4]), max_size=4) | st.lists(integers, max_size=9),
    "filename": st.sampled_from(["w.bin"] * 4 + ["./w.bin", "sub/../w.bin", "link.bin", "empty.bin", "sub", "absent"]),
    "offset": st.sampled_from([0, 0, 0, 4, 1, 252, 255, 256, 257]) | integers,
    "load_device": st.sampled_from(["file", "cpu", "file", "cpu", "cuda", ""]),
    "runtime_device": st.sampled_from(["cpu", "cpu", "cpu", "cuda", "CPU"]),
}
anything = (
    integers
    | st.sampled_from(INTERESTING_TEXTS)
    | st.sampled_from([b"\xff\xfe", b"\0", b""])
    | st.floats(width=32)
    | st.lists(integers, max_size=3)
    | st.lists(st.sampled_from(INTERESTING_TEXTS), min_size=1, max_size=2)
)


def _attribute(name: str, value: Any) -> AttributeProto:
    return helper.make_attribute(name, value, attr_type=AttributeProto.INTS if value == [] else None)


@st.composite
def attributes(draw: st.DrawFn) -> list[AttributeProto]:
    """Those of a delayed node, most of them as they should be."""
    made = []
    for name in NAMES:
        if draw(st.integers(0, 40)) == 0:
            continue
        wanted = draw(anything if draw(st.integers(0, 20)) == 0 else sensible[name])
        made.append(_attribute(name, wanted))
        if draw(st.integers(0, 60)) == 0:
            made[-1].ref_attr_name = draw(st.sampled_from(["shape", "nothing"]))
        if draw(st.integers(0, 60)) == 0:
            made[-1].type = draw(st.sampled_from([AttributeProto.UNDEFINED, AttributeProto.INT, AttributeProto.GRAPH]))
    if draw(st.integers(0, 30)) == 0:
        made.append(_attribute(draw(st.sampled_from([*NAMES, "more", "handle"])), draw(anything)))
    return draw(st.permutations(made)) if draw(st.booleans()) else made


@st.composite
def delayed_nodes(draw: st.DrawFn, output: str) -> onnx.NodeProto:
    odd = draw(st.integers(0, 30))
    kind = "DelayedInitializer_after_float32" if odd == 0 else "DelayedInitializer"
    outputs = {1: [], 2: [output, "more"], 3: [""], 4: ["x"]}.get(odd, [output])
    inputs = {5: ["x"], 6: [""], 7: ["unknown"]}.get(odd, [])
    made = helper.make_node(kind, inputs, outputs, name=draw(st.sampled_from([output, "", "n"])), domain="ai.rt")
    made.attribute.extend(draw(attributes()))
    return made


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    """Up to three delayed nodes: in the main graph, in an If, in a function, used once or never, chained or not."""
    nodes: list[onnx.NodeProto] = []
    functions = []
    outputs = []
    for number in range(draw(st.integers(1, 3))):
        name = f"w{number}"
        delayed = draw(delayed_nodes(name))
        place = draw(st.sampled_from(["main", "main", "branch", "function", "loop"]))
        result = f"r{number}"
        if place == "main":
            nodes += [delayed, node(draw(st.sampled_from(["Identity", "Shape", "Size"])), [name], [result])]
        elif place == "branch":
            body = helper.make_graph([delayed], f"b{number}", [], [value(name, None)])
            nodes.append(node("If", ["flag"], [result], then_branch=body, else_branch=body))
        elif place == "function":
            functions.append(function(f"F{number}", [], [name], [delayed]))
            nodes.append(node(f"F{number}", [], [result], domain="local"))
        else:
            body = helper.make_graph(
                [node("Identity", ["go"], ["on"]), delayed],
                f"l{number}",
                [value("i", [], TensorProto.INT64), value("go", [], TensorProto.BOOL)],
                [value("on", [], TensorProto.BOOL), value(name, None)],
            )
            nodes.append(node("Loop", ["trips", "flag"], [result], body=body))
        outputs.append(value(result, None, draw(st.sampled_from([FLOAT, FLOAT, TensorProto.INT64]))))
    inputs = [value("x", [2]), value("flag", [], TensorProto.BOOL), value("trips", [], TensorProto.INT64)]
    return model(nodes, inputs, outputs, functions=functions)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("delayed")
    (made / "w.bin").write_bytes(np.linspace(-1, 1, ELEMENTS, dtype=np.float32).tobytes())
    (made / "empty.bin").write_bytes(b"")
    (made / "sub").mkdir()
    (made / "link.bin").symlink_to("w.bin")
    return made


@lengths(90, 8000)
def test_sessions_on_any_delayed_nodes(worker: TrialWorker, directory: Path, examples: int) -> None:
    def trial(made: onnx.ModelProto) -> None:
        path = directory / "case.onnx"
        path.write_bytes(made.SerializeToString())
        worker.run("run_model", path)

    fuzz(examples, graphs(), trial)


@lengths(60, 8000)
def test_reading_and_converting_any_delayed_nodes(worker: TrialWorker, directory: Path, examples: int) -> None:
    def trial(made: onnx.ModelProto) -> None:
        path = directory / "case.onnx"
        path.write_bytes(made.SerializeToString())
        worker.run("read_model", path)

    fuzz(examples, graphs(), trial)
