"""Sessions under a budget on models that have no small weights to tick: convolutions, recurrent layers, packed int8."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from budget_models import MIB
from kind_models import convolutional, int8, lstm

import ort_delayed

BUDGET = 36 * MIB


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("kinds")
    yield made
    for path in made.iterdir():  # hundreds of MiB
        path.unlink()


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "convolutions": (lambda directory: convolutional(6, 512, 3, directory=directory), (1, 512, 3, 3)),
    "recurrent layers": (lambda directory: lstm(8, 512, directory=directory), (3, 1, 512)),
    "int8": (lambda directory: int8(16, 2048, directory=directory), (1, 2048)),
}


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
    session = ort_delayed.InferenceSession(model, ram_budget=BUDGET)
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
