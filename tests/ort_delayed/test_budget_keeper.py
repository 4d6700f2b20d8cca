"""Sessions under a RAM budget: the bound, the bytes, the errors, and what they leave behind."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from budget_models import MIB, SIDE, feed, plain, small_chain, small_decoder, small_dense_stack
from subprocesses import run_snippet

import ort_delayed
from ort_delayed.budgeted_source import ModelNotSuitedError
from ort_delayed.loader import platform
from ort_delayed.loader.mapped_ranges import MappedFileChanged
from ort_delayed.ops import make_node

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a session keeps to a budget on Linux only")
BUDGET = 40 * MIB


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("budget")


@pytest.fixture(scope="module")
def chain(models: Path) -> str:
    return small_chain(models)


@pytest.fixture(scope="module")
def bare(models: Path) -> str:
    return small_chain(models, biases=False)


@pytest.fixture(scope="module")
def dense(models: Path) -> str:
    return small_dense_stack(models)


@pytest.fixture(scope="module")
def decoder(models: Path) -> str:
    return small_decoder(models)


def session_of(model: str, budget: int = BUDGET, **settings: Any) -> ort_delayed.InferenceSession:
    return ort_delayed.InferenceSession(model, ram_budget=budget, **settings)


BOUND = """
import numpy as np, ort_delayed
from budget_models import *
model, budget, rows = sys.argv[1], int(sys.argv[2]) * MIB, int(sys.argv[3])
without_first_costs()
feeds = feed(model, rows)
with memory_of(budget):
    session = ort_delayed.InferenceSession(model, ram_budget=budget)
    for _ in range(3):
        result = session.run(None, feeds)[0]
report, plan = session.memory_report, session.memory_plan
assert report.peak_source == "kernel-high-water-mark"
assert report.peak_bytes <= budget and report.runs == 3
assert report.last_run.dropped_bytes > 0
assert plan.headroom_bytes <= max(48 * MIB, budget * 15 // 100)
with open(sys.argv[4], "wb") as file:
    file.write(result.tobytes())
"""


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("kind", ["chain", "bare", "dense", "decoder"])
def test_the_bound_holds_and_the_bytes_are_the_same(
    kind: str, rows: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = request.getfixturevalue(kind)
    run_snippet(BOUND, model, "32", str(rows), tmp_path / "result")
    assert (tmp_path / "result").read_bytes() == plain(model, rows)


def test_a_weight_larger_than_the_budget_streams(decoder: str, tmp_path: Path) -> None:
    # The output projection takes 16 MiB. Within one operator only the watching thread can hold the bound, and on a
    # machine that does many other things it can come too late; then that is said (the snippet fails with it).
    for attempt in range(5):
        try:
            run_snippet(BOUND, decoder, "18", "1", tmp_path / "result")
            break
        except AssertionError as error:
            if attempt == 4 or "RamBudgetExceeded: RAM budget exceeded while running" not in str(error):
                raise
    assert (tmp_path / "result").read_bytes() == plain(decoder)


def test_with_room_for_everything_nothing_is_dropped(chain: str) -> None:
    session = session_of(chain, 200 * MIB)
    for _ in range(2):
        session.run(None, feed(chain))
    report = session.memory_report
    assert report is not None
    assert report.last_run is not None
    assert report.last_run.dropped_bytes == report.last_run.refetched_bytes == 0


def test_memory_is_looked_at_as_often_as_it_can_grow_by_surprise(
    chain: str, decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    paced = session_of(chain, 40 * MIB)
    paced.run(None, feed(chain))
    streaming = session_of(decoder, 20 * MIB)  # a weight of 16 MiB does not fit
    keepers = [paced._budget, streaming._budget]
    assert all(keeper is not None for keeper in keepers)
    # A core clears 4 GiB a second at most: with megabytes left there is time.
    assert keepers[0] is not None
    assert keepers[0].look() >= 0.001
    assert keepers[1] is not None
    monkeypatch.setattr(keepers[1]._use, "now", lambda: keepers[1]._mark - MIB)
    monkeypatch.setattr(keepers[1]._weights.pager, "_used_bytes", lambda: keepers[1]._mark - MIB)
    assert keepers[1].look() == 0.0005


def test_the_plan_and_the_report_agree(chain: str) -> None:
    session = session_of(chain)
    for _ in range(3):
        session.run(None, feed(chain))
    plan, report = session.memory_plan, session.memory_report
    assert plan is not None
    assert report is not None
    assert report.last_run is not None
    assert plan.mapped_bytes == 64 * MIB
    assert report.last_run.ticks == sum(g.tick is not None for g in plan.groups)
    assert 0 < report.last_run.dropped_bytes <= plan.refetched_bytes_per_run
    assert report.construction_peak_bytes < report.peak_bytes <= report.budget_bytes
    assert "least budget" in str(plan)


def test_without_a_budget_there_is_no_plan(chain: str) -> None:
    session = ort_delayed.InferenceSession(chain)
    assert session.memory_plan is None
    assert session.memory_report is None


def test_every_way_to_run_gives_the_same_bytes(chain: str) -> None:
    expected, feeds = plain(chain), feed(chain)
    session = session_of(chain)
    assert session.run(["y"], feeds, onnxruntime.RunOptions())[0].tobytes() == expected
    value = onnxruntime.OrtValue.ortvalue_from_numpy(feeds["x"])
    assert session.run_with_ort_values(["y"], {"x": value})[0].numpy().tobytes() == expected
    binding = session.io_binding()
    binding.bind_cpu_input("x", feeds["x"])
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    assert binding.copy_outputs_to_cpu()[0].tobytes() == expected
    done, got = threading.Event(), []

    def callback(results: Any, user_data: Any, message: str) -> None:
        got.append((results[0].tobytes(), message))
        done.set()

    session.run_async(["y"], feeds, callback, None)
    assert done.wait(60)
    assert got == [(expected, "")]
    report = session.memory_report
    assert report is not None
    assert report.runs == 4


def test_eight_threads_on_one_session(chain: str) -> None:
    expected, results = plain(chain), []
    session = session_of(chain, 60 * MIB)

    def work() -> None:
        for _ in range(3):
            results.append(session.run(None, feed(chain))[0].tobytes() == expected)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 24


def test_the_callers_options_are_left_as_they_were(chain: str, bare: str) -> None:
    options = onnxruntime.SessionOptions()
    session_of(chain, sess_options=options)
    assert options.enable_mem_pattern
    assert options.get_session_config_entry("session.disable_prepacking") in ("", "0")
    with pytest.raises(ort_delayed.RamBudgetExceeded):
        session_of(chain, MIB, sess_options=options)
    # Prepacked by default, so not the bytes of `plain`.
    result = onnxruntime.InferenceSession(bare, options).run(None, feed(bare))[0]
    np.testing.assert_allclose(result, np.frombuffer(plain(bare), np.float32).reshape(1, SIDE), rtol=1e-4, atol=1e-5)


# --- Models as people have them ---------------------------------------------------------------------------------------


def test_inline_weights_stay_in_the_model_file(chain: str, tmp_path: Path) -> None:
    inline = tmp_path / "inline.onnx"
    onnx.save(onnx.load(chain), inline)
    session = session_of(str(inline))
    assert session.run(None, feed(chain))[0].tobytes() == plain(chain)
    plan = session.memory_plan
    assert plan is not None
    assert plan.mapped_bytes == 64 * MIB


def test_a_link_to_a_model_file_with_inline_weights(chain: str, tmp_path: Path) -> None:
    for name in ("elsewhere", "here"):
        (tmp_path / name).mkdir()
    onnx.save(onnx.load(chain), tmp_path / "elsewhere" / "inline.onnx")
    (tmp_path / "here" / "link.onnx").symlink_to(tmp_path / "elsewhere" / "inline.onnx")
    session = session_of(str(tmp_path / "here" / "link.onnx"))
    assert session.run(None, feed(chain))[0].tobytes() == plain(chain)


def test_a_model_of_too_many_bytes_is_refused(chain: str) -> None:
    data = onnx.load(chain).SerializeToString()
    with pytest.raises(ModelNotSuitedError, match="Give it by its path"):
        ort_delayed.InferenceSession(data, ram_budget=BUDGET)


def test_bytes_with_external_data(chain: str) -> None:
    session = ort_delayed.InferenceSession(
        Path(chain).read_bytes(), ram_budget=BUDGET, weights_dir=os.path.dirname(chain)
    )
    assert session.run(None, feed(chain))[0].tobytes() == plain(chain)


def test_a_hub_caches_layout(chain: str, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "repo" / "blobs", tmp_path / "repo" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate([Path(chain), Path(chain).with_suffix(".bin")]):
        shutil.copy(path, blobs / f"{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    session = session_of(str(snapshot / Path(chain).name))
    assert session.run(None, feed(chain))[0].tobytes() == plain(chain)
    plan = session.memory_plan
    assert plan is not None
    assert plan.mapped_bytes == 64 * MIB


def test_a_safetensors_file_as_external_data(chain: str, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    model = onnx.load(chain)
    tensors = {t.name: onnx.numpy_helper.to_array(t).copy() for t in model.graph.initializer if "weight" in t.name}
    path = tmp_path / "weights.safetensors"
    save_file(tensors, path)
    import json

    header = path.read_bytes()
    length = int.from_bytes(header[:8], "little")
    places = json.loads(header[8 : 8 + length])
    from ort_delayed.loader.external_data import set_external_data

    for tensor in model.graph.initializer:
        if tensor.name in tensors:
            start, end = places[tensor.name]["data_offsets"]
            set_external_data(tensor, path.name, 8 + length + start, end - start)
    saved = tmp_path / "model.onnx"
    saved.write_bytes(model.SerializeToString())
    assert session_of(str(saved)).run(None, feed(chain))[0].tobytes() == plain(chain)


def test_delayed_nodes_keep_their_meaning(chain: str, tmp_path: Path) -> None:
    converted = tmp_path / "delayed.onnx"
    ort_delayed.convert_model(chain, str(converted), select=lambda name, _: name.endswith(("_0", "_1")))
    assert session_of(str(converted)).run(None, feed(chain))[0].tobytes() == plain(chain)


def test_tied_and_shared_weights(chain: str, tmp_path: Path) -> None:
    model = onnx.load(chain, load_external_data=False)
    shutil.copy(Path(chain).with_suffix(".bin"), tmp_path)
    # weight_3 takes the bytes of weight_2; matmul 5 uses weight_4 as well.
    by_name = {t.name: t for t in model.graph.initializer}
    del by_name["weight_3"].external_data[:]
    by_name["weight_3"].external_data.extend(by_name["weight_2"].external_data)
    for node in model.graph.node:
        if "weight_5" in node.input:
            node.input[1] = "weight_4"
    saved = tmp_path / "tied.onnx"
    saved.write_bytes(model.SerializeToString())
    session = session_of(str(saved))
    for _ in range(3):
        assert session.run(None, feed(chain))[0].tobytes() == plain(str(saved))


def test_weights_of_if_branches(chain: str, tmp_path: Path) -> None:
    model = onnx.load(chain, load_external_data=False)
    shutil.copy(Path(chain).with_suffix(".bin"), tmp_path)
    weights = {t.name: t for t in model.graph.initializer}

    def branch(name: str, source: str) -> onnx.GraphProto:
        own = onnx.TensorProto()
        own.CopyFrom(weights[source])
        own.name = "w"
        made = [onnx.helper.make_node("MatMul", ["x", "w"], [name])]
        return onnx.helper.make_graph(made, name, [], [onnx.helper.make_tensor_value_info(name, 1, None)], [own])

    chosen = onnx.helper.make_node(
        "If", ["c"], ["y"], then_branch=branch("yes", "weight_0"), else_branch=branch("no", "weight_1")
    )
    condition = onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])
    graph = onnx.helper.make_graph([chosen], "g", [model.graph.input[0], condition], [model.graph.output[0]])
    saved = tmp_path / "if.onnx"
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    saved.write_bytes(made.SerializeToString())
    session, plainly = session_of(str(saved)), onnxruntime.InferenceSession(str(saved))
    for condition_value in (True, False, True):
        feeds = feed(chain) | {"c": np.array(condition_value)}
        np.testing.assert_allclose(session.run(None, feeds)[0], plainly.run(None, feeds)[0], rtol=1e-4, atol=1e-5)


def test_optimizers_that_would_copy_weights_are_left_out(chain: str, tmp_path: Path) -> None:
    model = onnx.load(chain, load_external_data=False)
    shutil.copy(Path(chain).with_suffix(".bin"), tmp_path)
    for number, node in enumerate([n for n in model.graph.node if n.op_type == "MatMul"]):
        turned = onnx.helper.make_node("Transpose", [node.input[1]], [f"turned_{number}"], perm=[1, 0])
        node.input[1] = f"turned_{number}"
        model.graph.node.insert(0, turned)
    saved = tmp_path / "transposed.onnx"
    saved.write_bytes(model.SerializeToString())
    session = session_of(str(saved))
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    expected = onnxruntime.InferenceSession(str(saved), options).run(None, feed(chain))[0]
    assert session.run(None, feed(chain))[0].tobytes() == expected.tobytes()
    for _ in range(2):
        plan = session.memory_plan
        assert plan is not None
        assert plan.mapped_bytes == 64 * MIB
        assert plan.session_bytes < 8 * MIB
        session.set_providers(["CPUExecutionProvider"])
        assert session.run(None, feed(chain))[0].tobytes() == expected.tobytes()


def test_dequantized_weights_are_made_one_at_a_time(tmp_path: Path) -> None:
    from ort_delayed.loader.external_data import set_external_data

    weights = np.random.default_rng(0).integers(-9, 9, (16, SIDE, SIDE)).astype(np.int8)
    weights.tofile(tmp_path / "w.bin")
    nodes, initializers, current = [], [onnx.numpy_helper.from_array(np.float32(0.01), "scale")], "x"
    for i in range(16):
        tensor = onnx.TensorProto(name=f"w{i}", data_type=onnx.TensorProto.INT8, dims=[SIDE, SIDE])
        set_external_data(tensor, "w.bin", i * SIDE * SIDE, SIDE * SIDE)
        initializers.append(tensor)
        nodes.append(onnx.helper.make_node("DequantizeLinear", [f"w{i}", "scale"], [f"d{i}"]))
        nodes.append(onnx.helper.make_node("MatMul", [current, f"d{i}"], [f"y{i}" if i < 15 else "y"]))
        current = f"y{i}"
    ends = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1, SIDE]) for n in "xy"]
    graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], initializers)
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    model = tmp_path / "quantized.onnx"
    model.write_bytes(made.SerializeToString())
    # As float32 all of them take 64 MiB.
    session = session_of(str(model), 36 * MIB)
    feeds = {"x": np.random.default_rng(1).standard_normal((1, SIDE)).astype(np.float32)}
    expected = onnxruntime.InferenceSession(str(model)).run(None, feeds)[0]
    np.testing.assert_allclose(session.run(None, feeds)[0], expected, rtol=1e-3, atol=1e-3)
    plan = session.memory_plan
    assert plan is not None
    assert plan.mapped_bytes == 16 * MIB


# --- What cannot be kept ----------------------------------------------------------------------------------------------


def test_a_budget_that_construction_cannot_keep(chain: str) -> None:
    with pytest.raises(ort_delayed.RamBudgetExceeded, match="constructing the session") as caught:
        session_of(chain, MIB)
    assert caught.value.needed_bytes > MIB


EXCEEDING = """
import numpy as np, ort_delayed
from budget_models import *
model, budget = sys.argv[1], 40 * MIB
without_first_costs()
session = ort_delayed.InferenceSession(model, ram_budget=budget)
expected = session.run(None, feed(model))[0].tobytes()
many = {"x": np.ones((6000, 1024), np.float32)}
memory = PeakMemory()
try:
    session.run(None, many)
except ort_delayed.RamBudgetExceeded as error:
    assert error.needed_bytes > budget and "running the model" in str(error), error
else:
    raise AssertionError("not refused")
assert memory.peak() < 120 * MIB, memory.peak()  # the run was stopped: 6000 rows take 24 MiB an activation
del many
assert session.run(None, feed(model))[0].tobytes() == expected
print(session.memory_report)
"""


def test_a_run_whose_activations_do_not_fit_is_stopped_and_the_session_stays_usable(chain: str) -> None:
    run_snippet(EXCEEDING, chain)


@pytest.mark.parametrize("what", ["rewritten", "truncated", "replaced", "removed"])
def test_a_changed_file_is_an_error_before_the_run(what: str, chain: str, tmp_path: Path) -> None:
    for path in (Path(chain), Path(chain).with_suffix(".bin")):
        shutil.copy(path, tmp_path)
    session = session_of(str(tmp_path / Path(chain).name))
    session.run(None, feed(chain))
    data = tmp_path / Path(chain).with_suffix(".bin").name
    if what == "rewritten":
        with open(data, "r+b") as file:
            file.write(b"\1")
        os.utime(data, ns=(1, 1))
    elif what == "truncated":
        os.truncate(data, MIB)
    elif what == "replaced":
        shutil.copy(data, tmp_path / "new")
        (tmp_path / "new").replace(data)
    else:
        data.unlink()
    with pytest.raises(MappedFileChanged, match=str(data)):
        session.run(None, feed(chain))


@pytest.mark.parametrize("what", ["rewritten", "replaced"])
def test_a_file_that_changes_during_a_run(
    what: str, chain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewritten in place it mixes old and new weights: the run fails. One that took its place is not what is mapped."""
    for path in (Path(chain), Path(chain).with_suffix(".bin")):
        shutil.copy(path, tmp_path)
    session = session_of(str(tmp_path / Path(chain).name))
    expected = session.run(None, feed(chain))[0].tobytes()
    data = tmp_path / Path(chain).with_suffix(".bin").name
    shutil.copy(data, tmp_path / "new")
    keeper = session._budget
    assert keeper is not None
    tick = type(keeper)._on_tick

    def change_then_tick(of: Any, group: int) -> None:
        monkeypatch.setattr(type(keeper), "_on_tick", tick)
        if what == "replaced":
            (tmp_path / "new").replace(data)
        else:
            with open(data, "r+b") as file:
                file.write(b"\1")
            os.utime(data, ns=(1, 1))
        tick(of, group)

    monkeypatch.setattr(type(keeper), "_on_tick", change_then_tick)
    if what == "replaced":
        assert session.run(None, feed(chain))[0].tobytes() == expected
    else:
        with pytest.raises(MappedFileChanged, match=str(data)):
            session.run(None, feed(chain))


def test_only_the_cpu_provider(chain: str) -> None:
    with pytest.raises(ValueError, match="CPUExecutionProvider"):
        session_of(chain, providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    session_of(chain, providers=["CPUExecutionProvider"]).run(None, feed(chain))


@pytest.mark.parametrize("budget", [0, -1, True, 1.5, "1GB"])
def test_what_is_no_budget(budget: Any, chain: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        session_of(chain, budget)


def test_without_a_measure_of_memory_no_session(chain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "resident_bytes", lambda: None)
    with pytest.raises(ort_delayed.RamProbeUnavailable):
        session_of(chain)


def test_where_pages_cannot_be_given_up_no_session(chain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "can_give_up_pages", lambda: False)
    with pytest.raises(ort_delayed.RamProbeUnavailable, match="Linux"):
        session_of(chain)


# --- What is left behind ----------------------------------------------------------------------------------------------


LEFT = """
import gc, os, threading
import numpy as np, ort_delayed
from ort_delayed.loader import platform
from budget_models import *
model = sys.argv[1]
def state():
    gc.collect()
    files = {os.path.realpath(model.replace(".onnx", ".bin"))}
    return len(os.listdir("/proc/self/fd")), len(platform.file_mappings(files)), threading.active_count()
def work():
    session = ort_delayed.InferenceSession(model, ram_budget=40 * MIB)
    session.run(None, feed(model))
    try:
        ort_delayed.InferenceSession(model, ram_budget=MIB)
    except ort_delayed.RamBudgetExceeded:
        pass
    else:
        raise AssertionError("not refused")
work()
before = state()
for _ in range(10):
    work()
assert state() == before, (before, state())
"""


def test_a_dropped_session_leaves_no_mapping_no_descriptor_and_no_thread(chain: str) -> None:
    run_snippet(LEFT, chain)


def test_set_providers_makes_the_session_again(chain: str) -> None:
    session = session_of(chain)
    expected = session.run(None, feed(chain))[0].tobytes()
    session.set_providers(["CPUExecutionProvider"])
    assert session.run(None, feed(chain))[0].tobytes() == expected
    plan = session.memory_plan
    assert plan is not None
    assert plan.mapped_bytes == 64 * MIB


FORKED = """
import os
import numpy as np, ort_delayed
from budget_models import *
model = sys.argv[1]
session = ort_delayed.InferenceSession(model, ram_budget=40 * MIB)
expected = session.run(None, feed(model))[0].tobytes()
child = os.fork()
if child == 0:
    same = all(session.run(None, feed(model))[0].tobytes() == expected for _ in range(3))
    report = session.memory_report
    os._exit(0 if same and report.last_run.dropped_bytes > 0 else 1)
assert os.waitpid(child, 0)[1] == 0
assert session.run(None, feed(model))[0].tobytes() == expected
"""


def test_a_forked_child_goes_on(chain: str) -> None:
    run_snippet(FORKED, chain)


PARALLEL = """
import os
import numpy as np, onnxruntime, ort_delayed
from budget_models import *
model = sys.argv[1]
options = onnxruntime.SessionOptions()
options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
session = ort_delayed.InferenceSession(model, options, ram_budget=40 * MIB)
expected = session.run(None, feed(model))[0].tobytes()
assert session.run(None, feed(model))[0].tobytes() == expected
assert session.memory_report.last_run.dropped_bytes > 0
child = os.fork()
if child == 0:
    try:
        session.run(None, feed(model))
    except RuntimeError as error:
        os._exit(0 if "ORT_PARALLEL" in str(error) else 2)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_in_parallel_mode_a_forked_child_is_refused(chain: str) -> None:
    run_snippet(PARALLEL, chain)


TWO = """
import threading
import numpy as np, ort_delayed
from budget_models import *
without_first_costs()
models, budget = sys.argv[1:3], 40 * MIB
with memory_of(2 * budget):
    sessions = [ort_delayed.InferenceSession(m, ram_budget=budget) for m in models]
    expected = [s.run(None, feed(m))[0].tobytes() for s, m in zip(sessions, models)]
    for _ in range(2):
        for s, m, e in zip(sessions, models, expected):
            assert s.run(None, feed(m))[0].tobytes() == e
    failed = []
    def work(s, m, e):
        try:
            for _ in range(5):
                assert s.run(None, feed(m))[0].tobytes() == e
        except BaseException as error:
            failed.append(repr(error))
    threads = [threading.Thread(target=work, args=a) for a in zip(sessions, models, expected)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failed, failed
"""


def test_two_sessions_each_with_its_own_budget(chain: str, bare: str) -> None:
    run_snippet(TWO, chain, bare)


def test_what_the_process_gains_between_runs_is_not_the_sessions(chain: str) -> None:
    session = session_of(chain)
    session.run(None, feed(chain))
    block = np.ones(60 * MIB, np.uint8)
    session.run(None, feed(chain))
    del block
    session.run(None, feed(chain))


UNWATCHED = """
import numpy as np, ort_delayed, threading
from ort_delayed import budget_keeper
from budget_models import *
model, budget = sys.argv[1], 40 * MIB
look, looked, fails = budget_keeper.BudgetKeeper.look, threading.Event(), threading.Event()
def look_or_fail(keeper):
    looked.set()
    if fails.is_set():
        raise OSError(5, "no measure")
    return look(keeper)
budget_keeper.BudgetKeeper.look = look_or_fail
session = ort_delayed.InferenceSession(model, ram_budget=budget)
expected = session.run(None, feed(model))[0].tobytes()
fails.set()
tick = budget_keeper.BudgetKeeper._on_tick
def slow_tick(keeper, group):
    assert looked.wait(10)
    threading.Event().wait(0.01)
    tick(keeper, group)
def slow_end(session):
    assert looked.wait(10)
    threading.Event().wait(0.1)
budget_keeper.BudgetKeeper._on_tick = slow_tick
end = ort_delayed.InferenceSession._forget_bytes
ort_delayed.InferenceSession._forget_bytes = slow_end
for what, work in (
    ("running the model", lambda: session.run(None, feed(model))),
    ("constructing the session", lambda: ort_delayed.InferenceSession(model, ram_budget=budget)),
):
    looked.clear()
    try:
        work()
    except ort_delayed.RamProbeUnavailable as error:
        assert what in str(error) and "OSError: [Errno 5] no measure" in str(error), error
        assert isinstance(error.__cause__, OSError)
    else:
        raise AssertionError("not refused")
fails.clear()
ort_delayed.InferenceSession._forget_bytes = end
assert session.run(None, feed(model))[0].tobytes() == expected
ort_delayed.InferenceSession(model, ram_budget=budget).run(None, feed(model))
print("Exception" in open(sys.argv[2]).read())
"""


def test_a_watcher_that_fails_ends_what_is_under_way(chain: str, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    redirect = "import os\nos.dup2(os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY), 2)\n"
    assert run_snippet(redirect + UNWATCHED, chain, errors).strip() == "False"


NO_THREAD = """
import threading
import numpy as np, ort_delayed
from budget_models import *
model = sys.argv[1]
start = threading.Thread.start
def fail(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = fail
try:
    ort_delayed.InferenceSession(model, ram_budget=40 * MIB)
except ort_delayed.RamProbeUnavailable as error:
    assert "cannot be started" in str(error), error
else:
    raise AssertionError("not refused")
threading.Thread.start = start
ort_delayed.InferenceSession(model, ram_budget=40 * MIB).run(None, feed(model))
"""


def test_without_a_watching_thread_no_session(chain: str) -> None:
    run_snippet(NO_THREAD, chain)


REFUSED = """
import gc, weakref
import numpy as np, ort_delayed
from ort_delayed import budget_keeper
from budget_models import *
model = sys.argv[1]
gc.collect()
gc.disable()
before = len(budget_keeper._keepers)
for _ in range(2):
    try:
        ort_delayed.InferenceSession(model, ram_budget=MIB)
    except ort_delayed.RamBudgetExceeded:
        pass
assert len(budget_keeper._keepers) == before
assert not any(model in line or ".weights" in line or ".data" in line for line in open("/proc/self/maps"))
"""


def test_a_refused_session_goes_at_once_and_not_with_the_garbage(chain: str) -> None:
    run_snippet(REFUSED, chain)


OVERLAPPING = """
import threading
import numpy as np, ort_delayed
from budget_models import *
without_first_costs()
model, budget = sys.argv[1], 32 * MIB
feeds = [{"x": np.random.default_rng(i).standard_normal((4, 1024)).astype(np.float32)} for i in range(4)]
session = ort_delayed.InferenceSession(model, ram_budget=budget)
expected = [session.run(None, f)[0].tobytes() for f in feeds]
activations = session.memory_plan.activations_bytes
right, failed = [], []
def work(i):
    for _ in range(10):
        try:
            right.append(session.run(None, feeds[i])[0].tobytes() == expected[i])
        except Exception as error:
            failed.append(repr(error))
threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not failed, failed
assert right == [True] * 40
assert session.memory_plan.activations_bytes <= activations + 4 * MIB, session.memory_plan
for f, e in zip(feeds, expected):
    assert session.run(None, f)[0].tobytes() == e
"""


def test_runs_of_one_session_on_several_threads_take_turns(chain: str) -> None:
    run_snippet(OVERLAPPING, chain)


WAITING = """
import os, signal, threading
import numpy as np, ort_delayed
from ort_delayed import budget_keeper
from budget_models import *
model = sys.argv[1]
inside, may_go_on = threading.Event(), threading.Event()
nested, tick = [], budget_keeper.BudgetKeeper._on_tick
def slow_tick(keeper, group):
    if not inside.is_set():  # on the thread of an operator
        try:
            session.run(None, feed(model))
        except RuntimeError as error:
            nested.append(str(error))
        inside.set()
        assert may_go_on.wait(30)
    tick(keeper, group)
budget_keeper.BudgetKeeper._on_tick = slow_tick
session = ort_delayed.InferenceSession(model, ram_budget=40 * MIB)
results = []
first = threading.Thread(target=lambda: results.append(session.run(None, feed(model))[0].tobytes()))
first.start()
assert inside.wait(30)
assert len(nested) == 1 and "from inside a run" in nested[0], nested
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    session.run(None, feed(model))
except KeyboardInterrupt:
    pass
else:
    raise AssertionError("not interrupted")
child = os.fork()  # while a run is under way, on a thread that the child does not have
if child == 0:
    os._exit(0 if len(session.run(None, feed(model))) == 1 else 1)
assert os.waitpid(child, 0)[1] == 0
may_go_on.set()
first.join()
assert session.run(None, feed(model))[0].tobytes() == results[0]
"""


def test_waiting_for_a_turn_is_interruptible_refused_inside_a_run_and_forgotten_by_a_fork(chain: str) -> None:
    run_snippet(WAITING, chain)


QUIET = """
import numpy as np, ort_delayed
from budget_models import *
session = ort_delayed.InferenceSession(sys.argv[1], ram_budget=40 * MIB)
expected = session.run(None, feed(sys.argv[1]))[0].tobytes()
session.set_providers(["CPUExecutionProvider"])
assert session.run(None, feed(sys.argv[1]))[0].tobytes() == expected
"""


def test_a_session_with_options_of_its_own_prints_nothing(chain: str, tmp_path: Path) -> None:
    redirect = "import os\nos.dup2(os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY), 2)\n"
    run_snippet(redirect + QUIET, chain, tmp_path / "errors")
    assert (tmp_path / "errors").read_text() == ""


def test_what_a_delayed_weight_is_loaded_into_has_room_in_the_plan(chain: str, tmp_path: Path) -> None:
    """A ``file`` payload of 12 MiB is read into a buffer, of which ONNX Runtime takes a copy: 24 MiB at once."""
    model = onnx.load(chain, load_external_data=False)
    (tmp_path / "late.bin").write_bytes(bytes(12 * MIB))
    late = make_node(
        "late", filename=str(tmp_path / "late.bin"), offset=0, dtype=1, shape=[3 * MIB], load_device="file"
    )
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                shutil.copy(os.path.join(os.path.dirname(chain), entry.value), tmp_path)
                break
    last = model.graph.node[-1].output[0]
    total = onnx.helper.make_node("ReduceSum", ["late"], ["sum"], keepdims=0)
    added = onnx.helper.make_node("Add", [last, "sum"], ["y_and_late"])
    model.graph.node.extend([late, total, added])
    model.graph.output[0].name = "y_and_late"
    model.opset_import.append(onnx.helper.make_opsetid("ai.rt", 1))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ort_delayed.RamBudgetExceeded, match="constructing"):
        session_of(str(tmp_path / "model.onnx"), 22 * MIB)
    session = session_of(str(tmp_path / "model.onnx"), 80 * MIB)
    for _ in range(3):
        assert session.run(None, feed(chain))[0].tobytes() == plain(chain)
    plan, report = session.memory_plan, session.memory_report
    assert plan is not None
    assert report is not None
    assert plan.load_bytes == 24 * MIB
    assert plan.room_bytes <= 80 * MIB - 24 * MIB
    assert report.last_run is not None
    assert report.last_run.reliefs == 0  # the pager had made room before


REPLACED = """
import numpy as np, ort_delayed
from ort_delayed.loader import platform
from budget_models import *
without_first_costs()
model, budget = sys.argv[1], 32 * MIB
expected, resident = None, []
for _ in range(6):
    session = ort_delayed.InferenceSession(model, ram_budget=budget)  # the one before goes when this one is there
    for _ in range(2):
        found = session.run(None, feed(model))[0].tobytes()
        assert expected in (None, found)
        expected = found
    assert session.memory_report.last_run.dropped_bytes > 0, session.memory_report
    resident.append(platform.resident_bytes())
assert max(resident[1:]) - resident[0] < 8 * MIB, resident
"""


def test_a_session_that_takes_anothers_place_does_not_inherit_its_memory(chain: str) -> None:
    run_snippet(REPLACED, chain)


def test_a_data_file_that_is_cut_is_refused_with_its_name_and_a_tensors(chain: str, tmp_path: Path) -> None:
    for file in Path(chain).parent.iterdir():
        shutil.copy(file, tmp_path)
    model = tmp_path / Path(chain).name
    location = next(
        e.value
        for t in onnx.load(model, load_external_data=False).graph.initializer
        for e in t.external_data
        if e.key == "location"
    )
    os.truncate(tmp_path / location, 20 * MIB)
    with pytest.raises(
        ValueError, match=rf"{location}' has {20 * MIB} bytes and must have at least .* cut off, such as"
    ):
        session_of(str(model))


HELD = """
import ort_delayed
from budget_models import *
from ort_delayed import memory_use
try:
    ort_delayed.InferenceSession(sys.argv[1], ram_budget=MIB)
except ort_delayed.RamBudgetExceeded as error:
    held = error
assert all(not use._peaks for use in memory_use._all_uses)
session = ort_delayed.InferenceSession(sys.argv[1], ram_budget=40 * MIB)
session.run(None, feed(sys.argv[1]))
"""


def test_a_refused_session_whose_error_is_held_is_not_beside_others(chain: str) -> None:
    run_snippet(HELD, chain)
