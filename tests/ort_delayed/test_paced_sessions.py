"""Sessions under a budget on models that have no small weights to tick: convolutions, recurrent layers, packed int8."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from budget_models import MIB
from kind_models import convolutional, int8, lstm

import ort_delayed
from ort_delayed import budgeted_source
from ort_delayed.pager import Pager

BUDGET = 52 * MIB


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("kinds")
    yield made
    for path in made.iterdir():  # hundreds of MiB
        path.unlink()


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "convolutions": (lambda directory: convolutional(8, 512, 3, directory=directory), (1, 512, 3, 3)),
    "recurrent layers": (lambda directory: lstm(10, 512, directory=directory), (3, 1, 512)),
    "int8": (lambda directory: int8(20, 2048, directory=directory), (1, 2048)),
}


def constructed(model: str | Path) -> ort_delayed.InferenceSession:
    """ONNX Runtime packs every packed weight again, and on a busy machine what it frees can be seen to too late."""
    for _ in range(4):
        with contextlib.suppress(ort_delayed.RamBudgetExceeded):
            return ort_delayed.InferenceSession(model, ram_budget=BUDGET)
    return ort_delayed.InferenceSession(model, ram_budget=BUDGET)


def unprepacked(level: str) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.add_session_config_entry("session.disable_prepacking", "1")
    return options


@pytest.mark.parametrize(
    ("kind", "packed"),
    [
        ("convolutions", False),
        ("convolutions", True),
        ("recurrent layers", False),
        ("recurrent layers", True),
        ("int8", True),
    ],
)
def test_weights_stream_from_tick_to_tick_and_not_page_by_page(kind: str, packed: bool, directory: Path) -> None:
    make, shape = MODELS[kind]
    model = make(directory)
    feeds = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    if packed:
        expected = onnxruntime.InferenceSession(model).run(None, feeds)[0]
        model, source = directory / f"packed-{kind}.onnx", model
        ort_delayed.pack_model(source, model)
    else:
        # What changes the layout of images is left out under a budget.
        expected = onnxruntime.InferenceSession(model, unprepacked("ORT_ENABLE_EXTENDED")).run(None, feeds)[0]
    session = constructed(model)
    plan = session.memory_plan
    assert plan is not None
    assert plan.mapped_bytes > BUDGET
    assert not plan.by_page
    assert max(g.nbytes for g in plan.groups) <= 20 * MIB
    for _ in range(2):
        assert session.run(None, feeds)[0].tobytes() == expected.tobytes()
    report = session.memory_report
    assert report is not None
    assert report.last_run is not None
    assert report.last_run.ticks == len(plan.groups) - 1 >= 2
    assert report.last_run.dropped_bytes > 0
    assert report.peak_bytes <= BUDGET


def test_a_weight_of_several_buffers_is_announced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention packs what makes queries, keys and values into a buffer each; a node can wait for one tick only."""
    ticked: list[int] = []
    tick = Pager.tick
    monkeypatch.setattr(Pager, "tick", lambda self, group: ticked.append(group) or tick(self, group))
    monkeypatch.setattr(budgeted_source, "sizes_of_groups", lambda budget, mapped: (1, 0))
    rng, side = np.random.default_rng(0), 128
    nodes, weights, current = [], [], "x"
    for i in range(3):
        weights.append(onnx.numpy_helper.from_array(rng.standard_normal((side, 3 * side)).astype(np.float32), f"w{i}"))
        weights.append(onnx.numpy_helper.from_array(rng.standard_normal(3 * side).astype(np.float32), f"b{i}"))
        inputs, output = [current, f"w{i}", f"b{i}"], f"a{i}" if i < 2 else "y"
        nodes.append(onnx.helper.make_node("Attention", inputs, [output], domain="com.microsoft", num_heads=4))
        current = output
    ends = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [None, None, side]) for n in "xy"]
    graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    made = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.save_model(made, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin")
    ort_delayed.pack_model(tmp_path / "m.onnx", tmp_path / "packed.onnx")
    feeds = {"x": rng.standard_normal((1, 4, side)).astype(np.float32)}
    session = ort_delayed.InferenceSession(tmp_path / "packed.onnx", ram_budget=256 * MIB)
    assert session.memory_plan is not None
    assert len(session.memory_plan.weights) == 9
    ticked.clear()
    result = session.run(None, feeds)[0]
    assert ticked == list(range(1, len(session.memory_plan.groups)))
    assert len(ticked) >= 2
    expected = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, feeds)[0]
    assert result.tobytes() == expected.tobytes()
