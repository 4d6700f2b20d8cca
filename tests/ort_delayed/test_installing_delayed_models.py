"""Delayed nodes and installed initializers in one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from checkpoints import external_initializer, save_safetensors
from installable_models import graph_model, node, run, value
from onnx import helper
from subprocesses import run_snippet

import ort_delayed
from ort_delayed.ops import make_node

BUDGET = 1 << 30
FEEDS = {"x": np.ones((1, 3), np.float32)}
INSTALLED = np.arange(9, dtype=np.float32).reshape(3, 3)
DELAYED = np.full((3, 3), 2, np.float32)


def mixed(directory: Path, load_device: str = "file", *, in_function: bool = False) -> str:
    """``y = x @ w @ d + big``: ``w`` external, ``d`` delayed."""
    directory.mkdir(exist_ok=True)
    (directory / "w.bin").write_bytes(INSTALLED.tobytes())
    (directory / "d.bin").write_bytes(DELAYED.tobytes())
    delayed = make_node(
        "d", filename="d.bin", shape=[3, 3], dtype=onnx.TensorProto.FLOAT, load_device=load_device, name="the delayed"
    )
    body = [delayed, node("MatMul", ["h", "d"], ["y"])]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.rt", 1)]
    function = helper.make_function("local", "Layer", ["h"], ["y"], body, opsets)
    nodes = [node("MatMul", ["x", "w"], ["h"])]
    nodes += [node("Layer", ["h"], ["y"], domain="local")] if in_function else body
    made = graph_model(
        nodes, [value("x", ["n", 3])], [value("y", None)], [external_initializer("w", INSTALLED, "w.bin", 0)]
    )
    if in_function:
        made.functions.append(function)
        made.opset_import.add(domain="local", version=1)
    (directory / "m.onnx").write_bytes(made.SerializeToString())
    return str(directory / "m.onnx")


@pytest.mark.parametrize("load_device", ["cpu", "file"])
@pytest.mark.parametrize("in_function", [False, True])
def test_both_arrive_in_every_kind_of_session(tmp_path: Path, load_device: str, in_function: bool) -> None:
    path = mixed(tmp_path, load_device, in_function=in_function)
    options = onnxruntime.SessionOptions()
    installed = ort_delayed.stream_install(path, options, ram_budget=BUDGET)
    assert installed.report.tensors_loaded == 1
    expected = (FEEDS["x"] @ INSTALLED @ DELAYED).tolist()
    session = installed.create_session()
    assert session.run(None, FEEDS)[0].tolist() == expected
    assert ort_delayed.InferenceSession(installed.model, options).run(None, FEEDS)[0].tolist() == expected
    assert run(installed.model, options, FEEDS).tolist() == expected
    session.set_providers(["CPUExecutionProvider"])
    assert session.run(None, FEEDS)[0].tolist() == expected


def test_weights_from_elsewhere_beside_delayed_nodes(tmp_path: Path) -> None:
    path = mixed(tmp_path / "model")
    source = save_safetensors(tmp_path / "weights" / "w.safetensors", {"w": INSTALLED * 3})
    options = onnxruntime.SessionOptions()
    installed = ort_delayed.stream_install(path, options, ram_budget=BUDGET, weights=source)
    expected = (FEEDS["x"] @ (INSTALLED * 3) @ DELAYED).tolist()
    assert installed.create_session().run(None, FEEDS)[0].tolist() == expected


def test_a_failing_read_raises_the_typed_error_and_the_session_stays_usable(tmp_path: Path) -> None:
    path = mixed(tmp_path)
    session = ort_delayed.stream_install(path, onnxruntime.SessionOptions(), ram_budget=BUDGET).create_session()
    (tmp_path / "d.bin").rename(tmp_path / "gone.bin")
    with pytest.raises(FileNotFoundError, match="the delayed") as caught:
        session.run(None, FEEDS)
    assert isinstance(caught.value, ort_delayed.DelayedInitializerError)
    (tmp_path / "gone.bin").rename(tmp_path / "d.bin")
    assert session.run(None, FEEDS)[0].tolist() == (FEEDS["x"] @ INSTALLED @ DELAYED).tolist()


def test_payloads_live_as_long_as_the_session(tmp_path: Path) -> None:
    run_snippet(
        """
        import gc, sys
        import numpy as np, onnxruntime, ort_delayed

        def make():
            options = onnxruntime.SessionOptions()
            return ort_delayed.stream_install(sys.argv[1], options, ram_budget=1 << 30).create_session()

        session = make()
        gc.collect()
        junk = [np.full((3, 3), np.nan, np.float32) for _ in range(1000)]
        y = session.run(None, {"x": np.ones((1, 3), np.float32)})[0]
        expected = np.ones((1, 3)) @ np.arange(9).reshape(3, 3) @ np.full((3, 3), 2)
        assert y.tolist() == expected.tolist()
        """,
        mixed(tmp_path, "cpu"),
    )


def test_a_delayed_node_that_cannot_be_used_leaves_the_options_as_they_were(tmp_path: Path) -> None:
    path = mixed(tmp_path, "cpu")
    (tmp_path / "d.bin").rename(tmp_path / "gone.bin")
    options = onnxruntime.SessionOptions()
    with pytest.raises(ort_delayed.DelayedInitializerError):
        ort_delayed.stream_install(path, options, ram_budget=BUDGET)
    (tmp_path / "gone.bin").rename(tmp_path / "d.bin")
    installed = ort_delayed.stream_install(path, options, ram_budget=BUDGET)
    assert installed.create_session().run(None, FEEDS)[0].shape == (1, 3)


def test_the_optimized_model_cannot_be_asked_for(tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    with pytest.raises(ort_delayed.DelayedInitializerError, match="optimized_model_filepath"):
        ort_delayed.stream_install(mixed(tmp_path), options, ram_budget=BUDGET)


def test_cpu_payloads_count_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any) -> None:
        raise AssertionError("a payload was read")

    model = Path(mixed(tmp_path, "cpu")).read_bytes()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ort_delayed.preparing.read_payload", never)
    with pytest.raises(ort_delayed.RamBudgetExceeded) as caught:
        ort_delayed.stream_install(model, onnxruntime.SessionOptions(), ram_budget=71, rss_sampler=lambda: 0)
    assert caught.value.requested_bytes == INSTALLED.nbytes + DELAYED.nbytes


def test_a_prepared_model_means_nothing_on_other_options(tmp_path: Path) -> None:
    installed = ort_delayed.stream_install(mixed(tmp_path), onnxruntime.SessionOptions(), ram_budget=BUDGET)
    with pytest.raises(ort_delayed.DelayedInitializerError, match="prepared"):
        ort_delayed.InferenceSession(installed.model)
