"""The budget of stream_install and create_session: what exceeds it is refused, stopped, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from checkpoints import save_safetensors
from installable_models import chain, chain_weights, feed, graph_model, node, run, save_external, value
from subprocesses import run_snippet

import ort_delayed

MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> str:
    weights = chain_weights()
    return save_external(tmp_path / "model.onnx", chain(weights), weights)


def assert_free(options: onnxruntime.SessionOptions, model: str) -> None:
    expected = run(model)
    installed = ort_delayed.stream_install(model, options, ram_budget=1 << 30)
    assert installed.create_session().run(None, feed())[0].tobytes() == expected.tobytes()


def test_what_cannot_fit_is_refused_before_a_weight_is_read(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any) -> None:
        raise AssertionError("weights were read")

    options = onnxruntime.SessionOptions()
    with monkeypatch.context() as patched:
        patched.setattr("ort_delayed.weight_copying.read_into", never)
        with pytest.raises(ort_delayed.RamBudgetExceeded, match="planning to install 4 weights") as caught:
            ort_delayed.stream_install(model, options, ram_budget=4095, rss_sampler=lambda: 1000)
    assert (caught.value.requested_bytes, caught.value.needed_bytes) == (4096, 4096)
    assert_free(options, model)
    # The least budget that the message names would do.
    ort_delayed.stream_install(
        model, onnxruntime.SessionOptions(), ram_budget=caught.value.needed_bytes, rss_sampler=lambda: 1000
    )


def test_a_group_that_does_not_fit_any_more_is_not_copied(model: str) -> None:
    readings = {"rss": 0}

    def progress(done: Any) -> None:
        readings["rss"] = 4096 - 1024 + 1  # somebody else's, or ONNX Runtime's

    options = onnxruntime.SessionOptions()
    with pytest.raises(ort_delayed.RamBudgetExceeded, match="copying layer group 'layer-0001'"):
        ort_delayed.stream_install(
            model, options, ram_budget=4096, rss_sampler=lambda: readings["rss"], progress=progress
        )
    assert_free(options, model)


def test_an_observed_spike_stops_the_installation(model: str) -> None:
    options, done = onnxruntime.SessionOptions(), []
    readings = {"rss": 0}

    def progress(report: Any) -> None:
        done.append(report.group.name)
        readings["rss"] = 5000

    with pytest.raises(ort_delayed.RamBudgetExceeded) as caught:
        ort_delayed.stream_install(
            model, options, ram_budget=4096, rss_sampler=lambda: readings["rss"], progress=progress
        )
    assert caught.value.observed_bytes == 5000
    assert done == ["layer-0000"]
    assert_free(options, model)


def test_a_peak_between_two_checks_counts(model: str) -> None:
    def progress(report: Any) -> None:
        np.ones(64 * MIB, np.uint8)  # gone again before anybody looks

    options = onnxruntime.SessionOptions()
    with pytest.raises(ort_delayed.RamBudgetExceeded, match="layer-0000"):
        ort_delayed.stream_install(model, options, ram_budget=32 * MIB, progress=progress)
    assert_free(options, model)


def test_memory_that_cannot_be_measured_means_no_installation(model: str) -> None:
    options = onnxruntime.SessionOptions()
    with pytest.raises(ort_delayed.RamProbeUnavailable):
        ort_delayed.stream_install(model, options, ram_budget=1 << 30, rss_sampler=lambda: None)
    assert_free(options, model)


def test_a_checkpoints_header_has_to_fit_the_budget(tmp_path: Path, model: str) -> None:
    tensors = {**chain_weights(), **{f"unused.{'x' * 200}.{i}": np.ones(1, np.float32) for i in range(500)}}
    source = save_safetensors(tmp_path / "c" / "w.safetensors", tensors)
    with pytest.raises(ort_delayed.RamBudgetExceeded, match="header"):
        ort_delayed.stream_install(
            model, onnxruntime.SessionOptions(), ram_budget=50_000, weights=source, rss_sampler=lambda: 0
        )


def test_a_build_that_exceeds_the_budget_is_cancelled_and_the_options_stay_usable(tmp_path: Path) -> None:
    # Folding the Transposes makes a second copy of every weight in anonymous memory.
    count, side = 12, 1024
    weights = {f"w{i}": np.full((side, side), 1 / side, np.float32) for i in range(count)}
    nodes = []
    for i in range(count):
        nodes.append(node("Transpose", [f"w{i}"], [f"t{i}"]))
        nodes.append(node("MatMul", [f"h{i}" if i else "x", f"t{i}"], [f"h{i + 1}" if i + 1 < count else "y"]))
    path = save_external(
        tmp_path / "m.onnx", graph_model(nodes, [value("x", ["n", side])], [value("y", None)]), weights
    )
    run_snippet(
        """
        import gc, sys
        import numpy as np, onnxruntime, ort_delayed
        mib = 1 << 20
        gc.disable()  # what was refused must go at once: collected later, it would hide what the next build takes
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.add_session_config_entry("session.disable_prepacking", "1")
        # MatMul takes a Transpose into its own if that is allowed: only folding is wanted here.
        disabled = ["MatmulTransposeFusion", "GemmTransposeFusion"]
        installed = ort_delayed.stream_install(sys.argv[1], options, ram_budget=60 * mib)
        for _ in range(4):  # what one build leaves in the heap must not hide the next one's
            try:
                installed.create_session(disabled_optimizers=disabled)
            except ort_delayed.RamBudgetExceeded as error:
                assert error.operation == "building a session", error
                assert error.budget_bytes == 60 * mib
            else:
                raise AssertionError("the budget was not kept")
            assert installed.report.peak_ram_with_session is None
            assert not any(isinstance(o, onnxruntime.InferenceSession) for o in gc.get_objects())
        # The flag is cleared: the same options make a session that nobody limits.
        session = onnxruntime.InferenceSession(
            installed.model, options, disabled_optimizers=disabled, enable_fallback=0
        )
        y = session.run(None, {"x": np.ones((1, 1024), np.float32)})[0]
        np.testing.assert_allclose(y, np.ones((1, 1024)), rtol=1e-3)
        """,
        path,
    )


def test_a_build_that_fits_is_reported(model: str) -> None:
    installed = ort_delayed.stream_install(model, onnxruntime.SessionOptions(), ram_budget=64 * MIB)
    installed.create_session()
    report = installed.report.peak_ram_with_session
    assert report is not None
    assert report.within_budget
    assert report.budget_bytes == 64 * MIB


def test_what_was_installed_counts_while_a_session_is_built(model: str) -> None:
    readings = {"rss": 0, "growth": 0}

    def rss() -> int:
        readings["rss"] += readings["growth"]
        return readings["rss"]

    def progress(done: Any) -> None:
        readings["rss"] += 1024

    options = onnxruntime.SessionOptions()
    installed = ort_delayed.stream_install(model, options, ram_budget=5000, rss_sampler=rss, progress=progress)
    installed.create_session()
    readings["growth"] = 1000
    with pytest.raises(ort_delayed.RamBudgetExceeded, match="building a session") as caught:
        installed.create_session()
    assert 5000 < caught.value.observed_bytes < 6200
    readings["growth"] = 0
    readings["rss"] = 4096
    assert installed.create_session().run(None, feed())[0].tobytes() == run(model).tobytes()
