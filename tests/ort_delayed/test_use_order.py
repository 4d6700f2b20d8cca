"""The order of use: what ONNX Runtime really does, and names of weights in bodies."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from delayed_models import FLOAT, model, node, value
from onnx import helper, numpy_helper

from ort_delayed.use_order import execution_order, order_of_use, scoped_initializers

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from model_makers import DecoderSize, decoder


def weight(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


def executed(path: Path, feeds: dict[str, np.ndarray], directory: Path) -> list[str]:
    """Node names in the order in which ONNX Runtime runs them."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling = True
    options.profile_file_prefix = str(directory / "profile")
    session = onnxruntime.InferenceSession(str(path), options)
    session.run(None, feeds)
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    return [e["name"].removesuffix("_kernel_time") for e in sorted(ran, key=lambda e: e["ts"])]


def test_the_order_is_that_of_onnxruntime(tmp_path: Path) -> None:
    path = decoder(DecoderSize(2, 32, 2, 48, 64, 16), directory=tmp_path)
    found = executed(path, {"ids": np.arange(5, dtype=np.int64)[None]}, tmp_path)
    graph = onnx.load(path, load_external_data=False).graph
    assert [graph.node[i].name for i in execution_order(graph.node)] == found
    weights = [use.weight for use in order_of_use(graph)]
    assert weights.index("layers.0.self_attn.k_proj.weight") < weights.index("layers.0.self_attn.o_proj.weight")
    assert weights[-1] == "lm_head.weight"


def test_embeddings_are_read_by_rows(tmp_path: Path) -> None:
    path = decoder(DecoderSize(1, 32, 2, 48, 64, 16), directory=tmp_path)
    by_rows = {use.weight: use.by_rows for use in order_of_use(onnx.load(path, load_external_data=False).graph)}
    assert by_rows["embed_tokens.weight"]
    assert not by_rows["lm_head.weight"]


@pytest.fixture
def branching() -> onnx.ModelProto:
    def branch(name: str) -> onnx.GraphProto:
        product = node("Mul", ["x", "w"], [f"{name}_y"], name=f"{name}_mul")
        total = node("Add", [f"{name}_y", "outer"], [name], name=f"{name}_add")
        return helper.make_graph([product, total], name, [], [value(name, [2])], [weight("w", 2)])

    chosen = node("If", ["c"], ["z"], name="choose", then_branch=branch("yes"), else_branch=branch("no"))
    last = node("Mul", ["z", "w"], ["y"], name="last")
    return model(
        [chosen, last],
        [value("x", [2]), value("c", [], onnx.TensorProto.BOOL)],
        [value("y", [2], FLOAT)],
        initializers=[weight("outer", 2), weight("w", 2)],
    )


def test_weights_of_bodies_have_names_of_their_own(branching: onnx.ModelProto) -> None:
    names = [name for name, _ in scoped_initializers(branching.graph)]
    assert names == ["outer", "w", "choose/0/w", "choose/1/w"]


def test_uses_of_bodies_stand_where_their_node_runs(branching: onnx.ModelProto) -> None:
    used = [(use.weight, use.consumer) for use in order_of_use(branching.graph)]
    # onnx's make_node puts attributes in the order of their names: else_branch comes first.
    assert used == [
        ("choose/0/w", "no_mul"),
        ("outer", "no_add"),
        ("choose/1/w", "yes_mul"),
        ("outer", "yes_add"),
        ("w", "last"),
    ]


def test_what_a_graph_computes_hides_an_outer_weight() -> None:
    body = helper.make_graph(
        [node("Neg", ["x"], ["w"]), node("Mul", ["w", "x"], ["r"])], "body", [], [value("r", [2])], []
    )
    chosen = node("If", ["c"], ["y"], name="choose", then_branch=body, else_branch=body)
    made = model(
        [chosen],
        [value("x", [2]), value("c", [], onnx.TensorProto.BOOL)],
        [value("y", [2])],
        initializers=[weight("w", 2)],
    )
    assert order_of_use(made.graph) == ()
