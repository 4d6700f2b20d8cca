"""ort_delayed/packed_source.py: sessions on packed models, here and elsewhere, with and without a budget."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from packable_models import PACKABLE, Packable, random, save_external
from subprocesses import run_snippet

import ort_delayed
from ort_delayed.loader import platform
from ort_delayed.loader.external_data import external_tensor, has_external_data
from ort_delayed.pack_manifest import PackManifest, read_manifest, write_manifest
from ort_delayed.packed_source import PackedModelError, PackedModelWarning, read_ranges
from ort_delayed.packing import pack_model
from ort_delayed.use_order import order_of_use, scoped_initializers

MIB = 1 << 20
needs_paging = pytest.mark.skipif(not platform.can_give_up_pages(), reason="no pages can be given up here")


@pytest.fixture
def chain() -> Packable:
    return PACKABLE["chain"]()


@pytest.fixture
def packed(tmp_path: Path, chain: Packable) -> Path:
    pack_model(save_external(chain.model, tmp_path / "model.onnx"), tmp_path / "packed.onnx")
    return tmp_path / "packed.onnx"


def expected(path: Path, chain: Packable) -> bytes:
    found: bytes = (
        onnxruntime.InferenceSession(str(path.parent / "model.onnx")).run(None, dict(chain.feeds))[0].tobytes()
    )
    return found


def change_manifest(path: Path, **changes: object) -> None:
    model = onnx.load(str(path), load_external_data=False)
    manifest = read_manifest(model)
    assert manifest is not None
    environment = {k: v for k, v in changes.items() if k in ("onnxruntime", "machine", "features")}
    others = {k: v for k, v in changes.items() if k not in environment}
    changed: PackManifest = replace(
        manifest,
        environment=replace(manifest.environment, **environment),  # type: ignore[arg-type]
        **others,  # type: ignore[arg-type]
    )
    write_manifest(model, changed)
    path.write_bytes(model.SerializeToString())


def large_chain(directory: Path) -> tuple[Path, Packable]:
    """12 products of 4 MiB, each behind a scale that ticks: 48 MiB packed."""
    floats = onnx.TensorProto.FLOAT
    weights = {f"w{i}": random(1024, 1024, seed=i) / np.float32(4) for i in range(12)}
    weights |= {f"b{i}": random(1024, seed=100 + i) for i in range(12)}
    nodes, value = [], "x"
    for i in range(12):
        nodes.append(onnx.helper.make_node("Mul", [value, f"b{i}"], [f"s{i}"]))
        nodes.append(onnx.helper.make_node("MatMul", [f"s{i}", f"w{i}"], [f"h{i}" if i < 11 else "y"]))
        value = f"h{i}"
    graph = onnx.helper.make_graph(
        nodes,
        "graph",
        [onnx.helper.make_tensor_value_info("x", floats, ["n", 1024])],
        [onnx.helper.make_tensor_value_info("y", floats, None)],
        [onnx.numpy_helper.from_array(w, n) for n, w in weights.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    return save_external(model, directory / "model.onnx"), Packable(model, {"x": random(3, 1024)})


# --- Without a budget -------------------------------------------------------------------------------------------------


def test_the_callers_options_are_lent_and_given_back(packed: Path, chain: Packable) -> None:
    options = onnxruntime.SessionOptions()
    session = ort_delayed.InferenceSession(packed, options)
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert session.run(None, dict(chain.feeds))[0].tobytes() == expected(packed, chain)
    other = ort_delayed.InferenceSession(packed.parent / "model.onnx", options)
    assert other.run(None, dict(chain.feeds))[0].tobytes() == expected(packed, chain)


def test_options_are_given_back_after_a_failure(packed: Path) -> None:
    options = onnxruntime.SessionOptions()
    model = onnx.load(str(packed), load_external_data=False)
    model.graph.node[0].op_type = "NoSuchOperator"
    packed.write_bytes(model.SerializeToString())
    with pytest.raises(Exception, match="NoSuchOperator"):
        ort_delayed.InferenceSession(packed, options)
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL


def test_a_packed_model_given_as_bytes(packed: Path, chain: Packable, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = expected(packed, chain)
    monkeypatch.chdir(packed.parent)
    session = ort_delayed.InferenceSession(packed.read_bytes())
    assert session.run(None, dict(chain.feeds))[0].tobytes() == wanted


def test_providers_can_be_set_again(packed: Path, chain: Packable) -> None:
    session = ort_delayed.InferenceSession(packed)
    session.set_providers(["CPUExecutionProvider"])
    assert session.run(None, dict(chain.feeds))[0].tobytes() == expected(packed, chain)


def test_another_onnxruntime_runs_it_with_a_warning(packed: Path, chain: Packable) -> None:
    change_manifest(packed, onnxruntime="1.0.0")
    with pytest.warns(PackedModelWarning, match=r"packed with onnxruntime 1\.0\.0.*Pack it again here") as caught:
        session = ort_delayed.InferenceSession(packed)
    assert caught[0].filename == __file__
    assert session.run(None, dict(chain.feeds))[0].tobytes() == expected(packed, chain)


def test_another_processor_runs_it_with_a_warning_unless_its_graph_is_for_that_one(
    packed: Path, chain: Packable
) -> None:
    change_manifest(packed, machine="riscv64")
    with pytest.warns(PackedModelWarning, match="it was packed for riscv64"):
        session = ort_delayed.InferenceSession(packed)
    assert session.run(None, dict(chain.feeds))[0].tobytes() == expected(packed, chain)
    change_manifest(packed, tied_to_processor=True)
    with pytest.raises(PackedModelError, match="cannot be used here: it was packed for riscv64"):
        ort_delayed.InferenceSession(packed)


def test_without_packed_weights_there_is_nothing_to_warn_of(tmp_path: Path, chain: Packable) -> None:
    source = save_external(chain.model, tmp_path / "model.onnx")
    pack_model(source, tmp_path / "packed.onnx", prepack=False)
    change_manifest(tmp_path / "packed.onnx", onnxruntime="1.0.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = ort_delayed.InferenceSession(tmp_path / "packed.onnx")
    assert session.run(None, dict(chain.feeds))[0].tobytes() == expected(tmp_path / "packed.onnx", chain)


def test_a_data_file_that_does_not_belong_to_the_model_is_refused(packed: Path) -> None:
    (data,) = packed.parent.glob("packed.onnx.*.weights")
    os.truncate(data, 1000)
    with pytest.raises(PackedModelError, match="it has 1000: copy it again"):
        ort_delayed.InferenceSession(packed)
    data.unlink()
    with pytest.raises(PackedModelError, match="model and data file go together"):
        ort_delayed.InferenceSession(packed)


def test_renaming_the_model_and_moving_both_is_harmless(packed: Path, chain: Packable, tmp_path: Path) -> None:
    wanted = expected(packed, chain)
    target = tmp_path / "moved"
    target.mkdir()
    (data,) = packed.parent.glob("packed.onnx.*.weights")
    data.rename(target / data.name)
    packed.rename(target / "other name.onnx")
    session = ort_delayed.InferenceSession(target / "other name.onnx")
    assert session.run(None, dict(chain.feeds))[0].tobytes() == wanted


# --- What a run reads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chain", "tied", "recurrent", "branches", "loop"])
def test_a_run_reads_packed_bytes_where_an_operator_packed_them_and_raw_ones_elsewhere(
    tmp_path: Path, name: str
) -> None:
    made = PACKABLE[name]()
    report = pack_model(save_external(made.model, tmp_path / "model.onnx"), tmp_path / "packed.onnx")
    graph = onnx.load(str(tmp_path / "packed.onnx"), load_external_data=False).graph
    initializers = dict(scoped_initializers(graph))
    tensors = {n: external_tensor(t, str(tmp_path)) for n, t in initializers.items() if has_external_data(t)}
    read = read_ranges(order_of_use(graph), tensors, initializers)
    assert all(r.end <= report.manifest.streamed_end for r in read.ranges.values())
    used = list(dict.fromkeys(u.weight for u in read.uses if u.weight in read.ranges))
    streamed = [read.ranges[n].offset for n in used if read.ranges[n].offset >= report.manifest.streamed_start]
    assert len(set(read.ranges) - set(tensors)) == sum(w.packed_bytes > 0 for w in report.weights)
    if name != "tied":  # there the first use of a weight reads rows of it, the next ones its packed form
        assert streamed == sorted(streamed)


# --- With a budget ----------------------------------------------------------------------------------------------------


@needs_paging
def test_packed_weights_stream_within_a_budget(tmp_path: Path) -> None:
    source, made = large_chain(tmp_path)
    pack_model(source, tmp_path / "packed.onnx")
    code = """
    import sys
    import numpy as np, onnxruntime
    import ort_delayed
    x = np.load(sys.argv[3])
    expected = onnxruntime.InferenceSession(sys.argv[1]).run(None, {"x": x})[0]
    # A first session of the process brings the library's own memory with it, which is no weight.
    ort_delayed.InferenceSession(sys.argv[2]).run(None, {"x": x})
    # Again and again: what one session has freed must not be in the way of the next. On a machine that does many other
    # things the watching thread can come too late; then that is said. What may not happen is that it is the rule.
    kept = 0
    for _ in range(8):
        session = None
        try:
            session = ort_delayed.InferenceSession(sys.argv[2], ram_budget=32 << 20)
            assert session.run(None, {"x": x})[0].tobytes() == expected.tobytes()
        except ort_delayed.RamBudgetExceeded:
            continue
        kept += 1
        report, plan = session.memory_report, session.memory_plan
    assert kept >= 5, kept
    assert report.peak_bytes <= 32 << 20, report
    assert report.last_run.dropped_bytes > 0, report
    assert plan.mapped_bytes == 48 << 20, plan
    print("kept")
    """
    np.save(tmp_path / "x.npy", made.feeds["x"])
    assert "kept" in run_snippet(code, source, tmp_path / "packed.onnx", tmp_path / "x.npy")


@needs_paging
@pytest.mark.parametrize("name", [n for n in PACKABLE if n != "small_only"])
def test_outputs_under_a_budget_are_those_of_plain_onnxruntime(tmp_path: Path, name: str) -> None:
    made = PACKABLE[name]()
    source = save_external(made.model, tmp_path / "model.onnx")
    pack_model(source, tmp_path / "packed.onnx")
    wanted = onnxruntime.InferenceSession(str(source)).run(None, dict(made.feeds))
    session = ort_delayed.InferenceSession(tmp_path / "packed.onnx", ram_budget=256 * MIB)
    for _ in range(2):
        found = session.run(None, dict(made.feeds))
        assert [a.tobytes() for a in found] == [b.tobytes() for b in wanted]


@needs_paging
def test_a_budget_on_a_model_packed_elsewhere_pages_raw_weights(packed: Path, chain: Packable) -> None:
    change_manifest(packed, onnxruntime="1.0.0")
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    unpacked = onnxruntime.InferenceSession(str(packed.parent / "model.onnx"), options).run(None, dict(chain.feeds))
    with pytest.warns(PackedModelWarning):
        session = ort_delayed.InferenceSession(packed, ram_budget=256 * MIB)
    np.testing.assert_allclose(session.run(None, dict(chain.feeds))[0], unpacked[0], rtol=1e-5, atol=1e-6)
    assert session.memory_plan is not None
    assert all("+" not in weight.name for weight in session.memory_plan.weights)


@needs_paging
def test_nothing_is_wiped_while_onnxruntime_unmaps_what_it_has_packed(tmp_path: Path) -> None:
    """Pages are given up all the time while sessions are made: what ONNX Runtime allocates meanwhile stays whole."""
    source, made = large_chain(tmp_path)
    pack_model(source, tmp_path / "packed.onnx")
    code = """
    import sys
    import numpy as np, onnxruntime
    import ort_delayed
    from ort_delayed import budget_keeper, construction_relief
    x = np.load(sys.argv[3])
    expected = onnxruntime.InferenceSession(sys.argv[1]).run(None, {"x": x})[0].tobytes()
    look = construction_relief.ConstructionRelief.relieve

    def eager(self):
        self._hard_mark = 0
        look(self)

    construction_relief.ConstructionRelief.relieve = eager
    budget_keeper._SHORTEST_SLEEP = budget_keeper._LONGEST_SLEEP = 0.0001
    whole = 0
    for _ in range(10):
        try:
            session = ort_delayed.InferenceSession(sys.argv[2], ram_budget=64 << 20)
            assert session.run(None, {"x": x})[0].tobytes() == expected
            whole += 1
            del session
        except ort_delayed.RamBudgetExceeded:  # on a busy machine
            pass
    assert whole >= 3, whole
    print("whole")
    """
    np.save(tmp_path / "x.npy", made.feeds["x"])
    assert "whole" in run_snippet(code, source, tmp_path / "packed.onnx", tmp_path / "x.npy")
