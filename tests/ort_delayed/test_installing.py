"""stream_install: what arrives in a session, from where, and what a failure leaves behind."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from checkpoints import bits, classifier_weights, decode_spans, external_initializer, save_safetensors
from installable_models import (
    chain,
    chain_weights,
    classifier_graph,
    feed,
    graph_model,
    node,
    run,
    save_external,
    value,
)
from onnx import TensorProto, helper
from subprocesses import run_snippet

import ort_delayed
from ort_delayed.install_errors import InstallError, OptionsInUseError, OptionsSpoiledError, WeightMismatchError
from ort_delayed.installed_values import can_carry
from ort_delayed.loader.element_types import element_type_from_onnx
from ort_delayed.loader.external_data import ExternalDataError

BUDGET = 1 << 30
CPU = ["CPUExecutionProvider"]


def options() -> onnxruntime.SessionOptions:
    return onnxruntime.SessionOptions()


def entry(sess_options: onnxruntime.SessionOptions, key: str) -> str | None:
    try:
        return sess_options.get_session_config_entry(key)
    except RuntimeError:
        return None


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    return chain_weights()


@pytest.fixture
def model(tmp_path: Path, weights: dict[str, np.ndarray]) -> str:
    return save_external(tmp_path / "model.onnx", chain(weights), weights)


# --- What arrives ---


def test_outputs_equal_those_of_plain_onnxruntime(model: str) -> None:
    expected = run(model)
    sess_options = options()
    installed = ort_delayed.stream_install(model, sess_options, ram_budget=BUDGET)
    made = [
        installed.create_session(providers=CPU),
        ort_delayed.InferenceSession(installed.model, sess_options, providers=CPU),
        onnxruntime.InferenceSession(installed.model, sess_options, providers=CPU),
    ]
    for session in made:
        assert session.run(None, feed())[0].tobytes() == expected.tobytes()


def test_a_session_does_not_need_the_files_once_it_is_made(model: str) -> None:
    expected = run(model)
    session = ort_delayed.stream_install(model, options(), ram_budget=BUDGET).create_session()
    data = Path(model).with_name("weights.bin")
    with data.open("r+b") as file:  # in place: what is mapped would change
        file.write(bytes(data.stat().st_size))
    assert session.run(None, feed())[0].tobytes() == expected.tobytes()


def test_the_report_counts_groups_tensors_and_bytes(model: str, weights: dict[str, np.ndarray]) -> None:
    nbytes = sum(w.nbytes for w in weights.values())
    seen: list[Any] = []
    installed = ort_delayed.stream_install(
        model, options(), ram_budget=BUDGET, layers_per_group=3, progress=seen.append
    )
    report = installed.report
    assert (report.source, report.groups_loaded, report.tensors_loaded) == (Path(model), 2, len(weights))
    assert (report.bytes_copied, report.tensors_inlined) == (nbytes, 0)
    assert report.peak_ram.within_budget
    assert report.peak_ram.budget_bytes == BUDGET
    assert report.peak_ram_with_session is None
    assert [p.group.name for p in seen] == ["layer-0000..layer-0002", "layer-0003"]
    assert [(p.groups_done, p.groups_total) for p in seen] == [(1, 2), (2, 2)]
    assert seen[-1].bytes_done == seen[-1].bytes_total == nbytes
    assert seen[-1].peak_rss_bytes >= seen[-1].current_rss_bytes > 0
    installed.create_session()
    assert installed.report.peak_ram_with_session is not None


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]
FLOATS = ["float16", "float32", "float64"]
# They leave a session as float32, which holds each of their values: numpy does not have them.
NARROW_FLOATS = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS + NARROW_FLOATS)
def test_every_element_type_arrives_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    stored = bits(dtype, (5, 3))
    leaving = TensorProto.FLOAT if dtype in NARROW_FLOATS else helper.np_dtype_to_tensor_dtype(stored.dtype)
    how = node("Cast", ["w"], ["y"], to=leaving) if dtype in NARROW_FLOATS else node("Identity", ["w"], ["y"])
    path = save_external(tmp_path / "m.onnx", graph_model([how], [], [value("y", None, leaving)]), {"w": stored})
    expected = run(path, feeds={})
    sess_options = options()
    installed = ort_delayed.stream_install(path, sess_options, ram_budget=BUDGET)
    assert installed.report.tensors_loaded == 1
    found = run(installed.model, sess_options, feeds={})
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()
    if dtype not in NARROW_FLOATS:
        assert found.tobytes() == stored.tobytes()


@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.UINT4])
def test_values_below_a_byte_arrive_with_their_logical_shape(tmp_path: Path, kind: int) -> None:
    packed = bits("uint8", (23,))
    tensor = external_initializer("q", packed, "weights.bin", 0)
    tensor.data_type = kind
    tensor.dims[:] = [15, 3]
    (tmp_path / "weights.bin").write_bytes(packed.tobytes())
    nodes = [node("DequantizeLinear", ["q", "scale"], ["y"])]
    scale = helper.make_tensor("scale", TensorProto.FLOAT, [], [0.5])
    made = graph_model(nodes, [], [value("y", None)], [tensor, scale])
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    sess_options = options()
    element_type = element_type_from_onnx(kind)
    assert element_type is not None
    if not can_carry(element_type):  # old releases: refused, never with half the elements
        with pytest.raises(WeightMismatchError, match="newer"):
            ort_delayed.stream_install(tmp_path / "m.onnx", sess_options, ram_budget=BUDGET)
        return
    installed = ort_delayed.stream_install(tmp_path / "m.onnx", sess_options, ram_budget=BUDGET)
    expected = run(str(tmp_path / "m.onnx"), feeds={})
    assert expected.shape == (15, 3)
    assert installed.report.tensors_loaded == 1
    assert run(installed.model, sess_options, feeds={}).tobytes() == expected.tobytes()


def test_scalars_and_empty_weights_arrive(tmp_path: Path) -> None:
    stored = {
        "scalar": np.array(3, np.float32),
        "empty": np.empty((0, 4), np.float32),
        "w": np.ones((2, 4), np.float32),
    }
    nodes = [node("Concat", ["w", "empty"], ["joined"], axis=0), node("Mul", ["joined", "scalar"], ["y"])]
    path = save_external(tmp_path / "m.onnx", graph_model(nodes, [], [value("y", None)]), stored)
    sess_options = options()
    installed = ort_delayed.stream_install(path, sess_options, ram_budget=BUDGET)
    assert run(installed.model, sess_options, feeds={}).tolist() == np.full((2, 4), 3).tolist()


def test_tied_weights_are_held_once(tmp_path: Path) -> None:
    stored = chain_weights(1)
    made = chain({"a": stored["encoder.layer.0.weight"], "b": stored["encoder.layer.0.weight"]})
    for name in ("a", "b"):
        made.graph.initializer.append(external_initializer(name, stored["encoder.layer.0.weight"], "weights.bin", 0))
    path = save_external(tmp_path / "m.onnx", made, {})
    (tmp_path / "weights.bin").write_bytes(stored["encoder.layer.0.weight"].tobytes())
    sess_options = options()
    installed = ort_delayed.stream_install(path, sess_options, ram_budget=BUDGET)
    assert (installed.report.tensors_loaded, installed.report.bytes_copied) == (2, 16 * 16 * 4)
    assert run(installed.model, sess_options).tobytes() == run(path).tobytes()


def test_what_onnxruntime_reads_while_loading_goes_inline(tmp_path: Path) -> None:
    stored = {"shape": np.array([2, -1], np.int64), "w": np.ones((4, 4), np.float32)}
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Reshape", ["h", "shape"], ["y"])]
    path = save_external(tmp_path / "m.onnx", graph_model(nodes, [value("x", [4, 4])], [value("y", None)]), stored)
    with pytest.raises(Exception, match="Cannot parse data from external tensors"):
        run(path, feeds=feed(4, 4))
    sess_options = options()
    installed = ort_delayed.stream_install(path, sess_options, ram_budget=BUDGET)
    assert (installed.report.tensors_inlined, installed.report.tensors_loaded) == (1, 1)
    assert run(installed.model, sess_options, feeds=feed(4, 4)).shape == (2, 8)


def test_an_initializer_that_is_a_graph_input_can_still_be_fed(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    made = chain(weights)
    name = "encoder.layer.0.weight"
    made.graph.input.append(value(name, [16, 16]))
    path = save_external(tmp_path / "m.onnx", made, weights)
    session = ort_delayed.stream_install(path, options(), ram_budget=BUDGET).create_session()
    assert session.run(None, feed())[0].tobytes() == run(path).tobytes()
    zeros = np.zeros((16, 16), np.float32)
    assert not session.run(None, {**feed(), name: zeros})[0].any()


# --- Same names ---


def _branch(name: str, array: np.ndarray, data: bytearray, operator: str) -> onnx.GraphProto:
    tensor = external_initializer("w", array, "weights.bin", len(data))
    data += array.tobytes()
    return helper.make_graph([node(operator, ["x", "w"], [name])], name, [], [value(name, None)], [tensor])


def test_same_named_initializers_in_two_branches_are_not_mixed_up(tmp_path: Path) -> None:
    data = bytearray()
    first, second = (np.full((3, 3), v, np.float32) for v in (2, 5))
    branches = {
        "then_branch": _branch("a", first, data, "Add"),
        "else_branch": _branch("b", second, data, "Add"),
    }
    choose = node("If", ["condition"], ["y"], **branches)
    made = graph_model([choose], [value("condition", [], TensorProto.BOOL), value("x", [3, 3])], [value("y", None)])
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    (tmp_path / "weights.bin").write_bytes(data)
    sess_options = options()
    installed = ort_delayed.stream_install(tmp_path / "m.onnx", sess_options, ram_budget=BUDGET)
    assert installed.report.tensors_loaded == 2
    zeros = np.zeros((3, 3), np.float32)
    for condition, expected in ((True, first), (False, second)):
        found = run(installed.model, sess_options, feeds={"condition": np.array(condition), "x": zeros})
        assert found.tolist() == expected.tolist()


def test_a_constant_in_a_branch_keeps_its_value_beside_a_weight_of_that_name(tmp_path: Path) -> None:
    # A Constant node becomes an initializer of its output's name, which add_initializer would override.
    inner = np.full((3, 3), 7, np.float32)
    constant = node("Constant", [], ["w"], value=onnx.numpy_helper.from_array(inner))
    then = helper.make_graph([constant, node("Add", ["x", "w"], ["a"])], "then", [], [value("a", None)])
    other = helper.make_graph([node("Identity", ["x"], ["b"])], "else", [], [value("b", None)])
    choose = node("If", ["condition"], ["chosen"], then_branch=then, else_branch=other)
    nodes = [choose, node("Add", ["chosen", "w"], ["y"])]
    inputs = [value("condition", [], TensorProto.BOOL), value("x", [3, 3])]
    path = save_external(
        tmp_path / "m.onnx", graph_model(nodes, inputs, [value("y", None)]), {"w": np.full((3, 3), 100, np.float32)}
    )
    sess_options = options()
    installed = ort_delayed.stream_install(path, sess_options, ram_budget=BUDGET)
    feeds = {"condition": np.array(True), "x": np.zeros((3, 3), np.float32)}
    assert run(installed.model, sess_options, feeds=feeds).tolist() == np.full((3, 3), 107).tolist()


# --- Where the bytes lie ---


def test_files_below_the_model_and_safetensors_shards_as_external_data(tmp_path: Path) -> None:
    stored = chain_weights(2)
    first, second = stored.values()
    shard = save_safetensors(tmp_path / "shards" / "a.safetensors", {"other": np.ones(3, np.float32), "w": second})
    offset = shard.stat().st_size - second.nbytes
    made = chain({"w0": first, "w1": second})
    made.graph.initializer.append(external_initializer("w1", second, "shards/a.safetensors", offset))
    path = save_external(tmp_path / "m.onnx", made, {"w0": first}, location="deep/er/w.bin")
    sess_options = options()
    installed = ort_delayed.stream_install(path, sess_options, ram_budget=BUDGET)
    assert run(installed.model, sess_options).tobytes() == run(path).tobytes()


def test_a_directory_whose_name_is_hard_to_write(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    directory = tmp_path / "Gewichte für 模型 %20 'x'"
    directory.mkdir()
    path = save_external(directory / "m.onnx", chain(weights), weights, location="w ü.bin")
    sess_options = options()
    installed = ort_delayed.stream_install(path, sess_options, ram_budget=BUDGET)
    assert run(installed.model, sess_options).tobytes() == run(path).tobytes()


def test_a_directory_that_onnxruntime_refuses_leaves_the_options_free(
    model: str,
) -> None:
    # An entry has a greatest length, 8192 bytes here, which a path that the system takes may reach elsewhere.
    sess_options = options()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ort_delayed.install_preparing.point_at_files", lambda *_: "x" * 10_000)
        with pytest.raises(RuntimeError, match="length"):
            ort_delayed.stream_install(model, sess_options, ram_budget=BUDGET)
    _as_they_were(sess_options, model, run(model))


def test_a_hub_cache_whose_links_lead_to_its_blobs(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    path = save_external(tmp_path / "model.onnx", chain(weights), weights)
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, blob in (("model.onnx", "1"), ("weights.bin", "2")):
        shutil.copyfile(tmp_path / name, blobs / blob)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    sess_options = options()
    installed = ort_delayed.stream_install(snapshot / "model.onnx", sess_options, ram_budget=BUDGET)
    assert run(installed.model, sess_options).tobytes() == run(path).tobytes()


def test_a_link_out_of_the_models_directory_is_refused(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    path = save_external(inside / "model.onnx", chain(weights), weights)
    (inside / "weights.bin").rename(tmp_path / "outside.bin")
    (inside / "weights.bin").symlink_to(tmp_path / "outside.bin")
    with pytest.raises(ort_delayed.LocalWeightsRequired, match="outside"):
        ort_delayed.stream_install(path, options(), ram_budget=BUDGET)


def test_a_model_given_as_bytes(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = Path(model).read_bytes()
    named = options()
    named.add_session_config_entry("session.model_external_initializers_file_folder_path", str(tmp_path))
    installed = ort_delayed.stream_install(data, named, ram_budget=BUDGET)
    assert installed.report.source is None
    assert run(installed.model, named).tobytes() == run(model).tobytes()
    monkeypatch.chdir(tmp_path)
    from_here = options()
    installed = ort_delayed.stream_install(data, from_here, ram_budget=BUDGET)
    monkeypatch.chdir("/")
    assert run(installed.model, from_here).tobytes() == run(model).tobytes()


def test_external_data_that_is_not_installed_keeps_its_place(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    other = np.full((16, 16), 2, np.float32)
    directory = tmp_path / "model"  # beside the weights: the directory that both have in common is another
    directory.mkdir()
    (directory / "other.bin").write_bytes(other.tobytes())
    made = chain(weights)
    constant = node("Constant", [], ["c"], value=external_initializer("c", other, "other.bin", 0))
    made.graph.node[-1].output[0] = "product"
    made.graph.node.extend([constant, node("MatMul", ["product", "c"], ["y"])])
    path = save_external(directory / "m.onnx", made, weights)
    source = save_safetensors(tmp_path / "elsewhere" / "w.safetensors", weights)
    sess_options = options()
    installed = ort_delayed.stream_install(path, sess_options, ram_budget=BUDGET, weights=source)
    assert run(installed.model, sess_options).tobytes() == run(path).tobytes()


# --- Weights from elsewhere ---


def test_optimizers_read_what_was_installed(tmp_path: Path) -> None:
    # A Mul of a weight is folded, Conv and BatchNormalization are fused: both from the TensorProto's own bytes.
    rng = np.random.default_rng(0)

    def tensors() -> dict[str, np.ndarray]:
        shapes = {"conv": (4, 3, 3, 3), "scale": (4,), "shift": (4,), "mean": (4,), "var": (4,), "w": (4, 4)}
        return {n: rng.random(s, np.float32) + np.float32(0.1) for n, s in shapes.items()}

    nodes = [
        node("Conv", ["x", "conv"], ["c"]),
        node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["b"]),
        node("Constant", [], ["two"], value=helper.make_tensor("two", 1, [], [2.0])),
        node("Mul", ["w", "two"], ["w2"]),
        node("MatMul", ["b", "w2"], ["y"]),
    ]
    old, new = tensors(), tensors()
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    inputs, outputs = [value("x", [1, 3, 6, 6])], [value("y", None)]
    path = save_external(tmp_path / "old" / "m.onnx", graph_model(nodes, inputs, outputs), old)
    expected = save_external(tmp_path / "new" / "m.onnx", graph_model(nodes, inputs, outputs), new)
    source = save_safetensors(tmp_path / "checkpoint" / "model.safetensors", new)
    feeds = {"x": rng.random((1, 3, 6, 6), np.float32)}
    sess_options = options()
    installed = ort_delayed.stream_install(path, sess_options, ram_budget=BUDGET, weights=source)
    assert run(installed.model, sess_options, feeds).tobytes() == run(expected, feeds=feeds).tobytes()
    assert installed.create_session().run(None, feeds)[0].tobytes() == run(expected, feeds=feeds).tobytes()


def test_decoded_spans_are_the_same_at_once_and_installed(tmp_path: Path) -> None:
    weights = {n: np.asarray(w, np.float32) for n, w in classifier_weights().items()}
    note = np.random.default_rng(3).integers(0, 16, 40)
    expected = decode_spans(weights, note)
    assert len(expected) > 3
    blank = {n: np.zeros_like(w) for n, w in weights.items()}
    path = save_external(tmp_path / "m.onnx", classifier_graph(weights), blank)
    source = save_safetensors(tmp_path / "c" / "model.safetensors", weights)
    session = ort_delayed.stream_install(path, options(), ram_budget=BUDGET, weights=source).create_session()
    tags = session.run(None, {"tokens": note})[0]
    changes = [0, *(np.flatnonzero(np.diff(tags)) + 1), len(tags)]
    spans = [(int(a), int(b), int(tags[a])) for a, b in itertools.pairwise(changes) if tags[a]]
    assert spans == expected


def test_an_inline_weight_that_the_checkpoint_knows_is_taken_from_it(tmp_path: Path) -> None:
    stored = {"w": np.ones((16, 16), np.float32)}
    bias = onnx.numpy_helper.from_array(np.zeros(16, np.float32), "bias")
    large = onnx.numpy_helper.from_array(np.zeros((256, 256), np.float32), "large")
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Add", ["h", "bias"], ["s"]),
        node("ReduceSum", ["large"], ["total"], keepdims=0),
        node("Add", ["s", "total"], ["y"]),
    ]
    made = graph_model(nodes, [value("x", ["n", 16])], [value("y", None)], [bias, large])
    path = save_external(tmp_path / "m.onnx", made, {"w": np.zeros((16, 16), np.float32)})
    stored |= {"bias": np.full(16, 3, np.float32), "large": np.full((256, 256), 1, np.float32)}
    source = save_safetensors(tmp_path / "c" / "w.safetensors", stored)
    sess_options = options()
    installed = ort_delayed.stream_install(path, sess_options, ram_budget=BUDGET, weights=source)
    assert (installed.report.tensors_loaded, installed.report.tensors_inlined) == (2, 1)
    found = run(installed.model, sess_options, {"x": np.ones((1, 16), np.float32)})
    assert found.tolist() == np.full((1, 16), 16 + 3 + 65536).tolist()


@pytest.mark.parametrize("as_callable", [True, False])
def test_a_name_map_takes_tensors_by_other_names(tmp_path: Path, model: str, as_callable: bool) -> None:
    new = chain_weights(seed=9)
    source = save_safetensors(tmp_path / "c" / "w.safetensors", {f"model.{n}": w for n, w in new.items()})
    mapping = {n: f"model.{n}" for n in new}
    sess_options = options()
    installed = ort_delayed.stream_install(
        model, sess_options, ram_budget=BUDGET, weights=source, name_map=mapping.__getitem__ if as_callable else mapping
    )
    (tmp_path / "expected").mkdir()
    expected = save_external(tmp_path / "expected" / "m.onnx", chain(new), new)
    assert run(installed.model, sess_options).tobytes() == run(expected).tobytes()


def test_none_in_a_name_map_leaves_the_models_own_bytes(tmp_path: Path, model: str) -> None:
    new, name = chain_weights(seed=9), "encoder.layer.2.weight"
    source = save_safetensors(tmp_path / "c" / "w.safetensors", {n: w for n, w in new.items() if n != name})
    sess_options = options()
    installed = ort_delayed.stream_install(
        model, sess_options, ram_budget=BUDGET, weights=source, name_map={name: None}
    )
    (tmp_path / "expected").mkdir()
    mixed = {**new, name: chain_weights()[name]}
    expected = save_external(tmp_path / "expected" / "m.onnx", chain(mixed), mixed)
    assert run(installed.model, sess_options).tobytes() == run(expected).tobytes()


# --- Failing ---


def _as_they_were(sess_options: onnxruntime.SessionOptions, model: str, expected: np.ndarray) -> None:
    for key in ("session.disable_prepacking", "session.model_external_initializers_file_folder_path"):
        assert not entry(sess_options, key)
    # Nothing has been added: every name can be, and a session made from the options has the model's own weights.
    sess_options.add_session_config_entry("session.disable_prepacking", "1")
    assert run(model, sess_options).tobytes() == expected.tobytes()
    installed = ort_delayed.stream_install(model, sess_options, ram_budget=BUDGET)
    assert run(installed.model, sess_options).tobytes() == expected.tobytes()


def test_a_callback_that_raises_leaves_the_options_as_they_were(model: str) -> None:
    expected, sess_options, mine = run(model), options(), RuntimeError("enough")

    def progress(done: Any) -> None:
        if done.groups_done == done.groups_total:
            raise mine

    with pytest.raises(RuntimeError) as caught:
        ort_delayed.stream_install(model, sess_options, ram_budget=BUDGET, progress=progress)
    assert caught.value is mine
    _as_they_were(sess_options, model, expected)


def test_a_file_that_changes_while_it_is_copied_is_noticed(model: str) -> None:
    sess_options, data = options(), Path(model).with_name("weights.bin")

    def progress(done: Any) -> None:
        if done.groups_done == done.groups_total:
            os.utime(data, ns=(1, 1))

    with pytest.raises(ort_delayed.ShardFormatError, match="changed"):
        ort_delayed.stream_install(model, sess_options, ram_budget=BUDGET, progress=progress)
    _as_they_were(sess_options, model, run(model))


@pytest.mark.parametrize("how", ["rewritten", "replaced", "removed"])
def test_a_file_that_changes_before_a_session_is_made_is_noticed(model: str, how: str) -> None:
    sess_options, data = options(), Path(model).with_name("weights.bin")
    installed = ort_delayed.stream_install(model, sess_options, ram_budget=BUDGET)
    content, times = data.read_bytes(), data.stat()
    if how == "rewritten":
        data.write_bytes(bytes(len(content)))
        os.utime(data, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    else:
        data.rename(data.with_suffix(".old"))
        if how == "replaced":
            data.write_bytes(content)
    for make in (installed.create_session, lambda: ort_delayed.InferenceSession(installed.model, sess_options)):
        with pytest.raises(ort_delayed.ShardFormatError, match=r"weights\.bin"):
            make()


def test_what_is_wrong_with_the_files_is_said_before_anything_is_copied(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ort_delayed.weight_copying.read_into", _never)
    data = Path(model).with_name("weights.bin")
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    with pytest.raises(ort_delayed.ShardFormatError, match=r"encoder\.layer\.3\.weight.*needs 1024 bytes"):
        ort_delayed.stream_install(model, options(), ram_budget=BUDGET)
    data.unlink()
    with pytest.raises(FileNotFoundError, match="not there"):
        ort_delayed.stream_install(model, options(), ram_budget=BUDGET)


def _never(*arguments: Any) -> None:
    raise AssertionError("weights were read")


def test_weights_that_stand_inline_are_refused_for_that_however_small_the_budget(tmp_path: Path) -> None:
    inline = onnx.numpy_helper.from_array(np.zeros(1 << 20, np.float32), "w")
    made = graph_model([node("Identity", ["w"], ["y"])], [], [value("y", None)], [inline])
    onnx.save(made, tmp_path / "m.onnx")
    for budget in (1 << 20, BUDGET):
        with pytest.raises(InstallError, match="save_as_external_data"):
            ort_delayed.stream_install(tmp_path / "m.onnx", options(), ram_budget=budget)
    made.graph.initializer.append(external_initializer("v", np.ones(4, np.float32), "v.bin", 0))
    onnx.save(made, tmp_path / "m.onnx")
    with pytest.raises(ort_delayed.RamBudgetExceeded):
        ort_delayed.stream_install(tmp_path / "m.onnx", options(), ram_budget=1 << 20)


def test_sources_that_are_no_models_or_no_weights(tmp_path: Path, model: str) -> None:
    (tmp_path / "garbage.onnx").write_bytes(b"\x08garbage")
    for source in (tmp_path / "garbage.onnx", b"\x08garbage"):
        with pytest.raises(ort_delayed.ShardFormatError, match="not an ONNX model"):
            ort_delayed.stream_install(source, options(), ram_budget=BUDGET)
    with pytest.raises(FileNotFoundError):
        ort_delayed.stream_install(tmp_path / "none.onnx", options(), ram_budget=BUDGET)
    with pytest.raises(ort_delayed.LocalWeightsRequired, match="download"):
        ort_delayed.stream_install(model, options(), ram_budget=BUDGET, weights="https://example.org/a.safetensors")
    inline = graph_model([node("Identity", ["x"], ["y"])], [value("x", [1])], [value("y", [1])])
    with pytest.raises(InstallError, match="save_as_external_data"):
        ort_delayed.stream_install(inline.SerializeToString(), options(), ram_budget=BUDGET)
    absolute = chain(chain_weights(1))
    absolute.graph.initializer.append(
        external_initializer("encoder.layer.0.weight", np.ones((16, 16), np.float32), "/etc/passwd", 0)
    )
    with pytest.raises(ort_delayed.LocalWeightsRequired, match="relative"):
        ort_delayed.stream_install(absolute.SerializeToString(), options(), ram_budget=BUDGET)
    absolute.graph.initializer[0].external_data[0].value = ""
    with pytest.raises(ExternalDataError, match="location"):
        ort_delayed.stream_install(absolute.SerializeToString(), options(), ram_budget=BUDGET)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"ram_budget": 0}, ValueError, "positive"),
        ({"ram_budget": True}, ValueError, "positive"),
        ({"layers_per_group": 0}, ValueError, "layers_per_group"),
        ({"name_map": {}}, ValueError, "weights="),
        ({"name_map": 3, "weights": "w"}, TypeError, "name_map"),
        ({"progress": 3}, TypeError, "progress"),
    ],
)
def test_arguments_that_are_refused(model: str, arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ort_delayed.stream_install(model, options(), **{"ram_budget": BUDGET, **arguments})
    with pytest.raises(TypeError, match="SessionOptions"):
        ort_delayed.stream_install(model, None, ram_budget=BUDGET)
    with pytest.raises(TypeError, match="file name"):
        ort_delayed.stream_install(3, options(), ram_budget=BUDGET)  # type: ignore[arg-type]


# --- Options ---


def test_options_belong_to_one_model(model: str, tmp_path: Path) -> None:
    sess_options = options()
    installed = ort_delayed.stream_install(model, sess_options, ram_budget=BUDGET)
    (tmp_path / "other").mkdir()
    fewer = chain_weights(3)
    other = save_external(tmp_path / "other" / "m.onnx", chain(fewer), fewer)
    for use in (
        lambda: ort_delayed.stream_install(other, sess_options, ram_budget=BUDGET),
        lambda: ort_delayed.stream_install(model, sess_options, ram_budget=BUDGET),
        lambda: ort_delayed.InferenceSession(other, sess_options),
        lambda: ort_delayed.InferenceSession(model, sess_options),
        lambda: ort_delayed.InferenceSession(Path(other).read_bytes(), sess_options),
        lambda: ort_delayed.prepare_model(other, sess_options),
    ):
        with pytest.raises(OptionsInUseError, match="new SessionOptions"):
            use()
    assert installed.create_session().run(None, feed())[0].tobytes() == run(model).tobytes()


def test_what_cannot_apply_to_installed_weights_is_refused(model: str, tmp_path: Path) -> None:
    installed = ort_delayed.stream_install(model, options(), ram_budget=BUDGET)
    for argument in ({"ram_budget": BUDGET}, {"weights_dir": tmp_path}):
        with pytest.raises(InstallError, match="stay resident"):
            ort_delayed.InferenceSession(installed.model, installed.sess_options, **argument)


def test_options_cannot_be_used_while_they_are_being_filled(model: str) -> None:
    sess_options = options()

    def progress(done: Any) -> None:
        with pytest.raises(OptionsInUseError):
            ort_delayed.stream_install(model, sess_options, ram_budget=BUDGET)
        with pytest.raises(OptionsInUseError, match="being installed"):
            ort_delayed.InferenceSession(model, sess_options)

    ort_delayed.stream_install(model, sess_options, ram_budget=BUDGET, progress=progress)


def test_prepacking_is_disabled_unless_the_caller_said_otherwise(model: str) -> None:
    sess_options = options()
    installed = ort_delayed.stream_install(model, sess_options, ram_budget=BUDGET)
    assert installed.report.prepacking_disabled
    assert entry(sess_options, "session.disable_prepacking") == "1"
    wanted = options()
    wanted.add_session_config_entry("session.disable_prepacking", "0")
    installed = ort_delayed.stream_install(model, wanted, ram_budget=BUDGET)
    assert not installed.report.prepacking_disabled
    assert entry(wanted, "session.disable_prepacking") == "0"
    np.testing.assert_allclose(installed.create_session().run(None, feed())[0], run(model), rtol=1e-4)


def test_a_name_that_the_caller_has_added_before(model: str, weights: dict[str, np.ndarray]) -> None:
    names = list(weights)
    held = [onnxruntime.OrtValue.ortvalue_from_numpy(w) for w in weights.values()]
    first, last = options(), options()
    first.add_initializer(names[0], held[0])
    with pytest.raises(InstallError, match=names[0]):
        ort_delayed.stream_install(model, first, ram_budget=BUDGET)
    assert run(model, first, feed()).shape == (3, 16)  # as they were
    last.add_initializer(names[-1], held[-1])
    with pytest.raises(OptionsSpoiledError, match=names[-1]):
        ort_delayed.stream_install(model, last, ram_budget=BUDGET)
    with pytest.raises(OptionsInUseError):
        ort_delayed.InferenceSession(model, last)
    assert run(model, last, feed()).shape == (3, 16)  # what has been added stays valid


def test_two_sessions_on_the_same_options(model: str) -> None:
    installed = ort_delayed.stream_install(model, options(), ram_budget=BUDGET)
    first, second = installed.create_session(), installed.create_session()
    first.set_providers(CPU)
    for session in (first, second):
        assert session.run(None, feed())[0].tobytes() == run(model).tobytes()


# --- Lifetime ---


@pytest.mark.parametrize("way", ["create_session", "ort_delayed", "plain", "bare"])
def test_values_live_as_long_as_the_session(model: str, way: str) -> None:
    expected = run(model)
    np.save(Path(model).with_name("expected.npy"), expected)
    run_snippet(
        """
        import gc, sys
        import numpy as np, onnxruntime, ort_delayed
        from installable_models import feed
        path, way = sys.argv[1:]

        def make():
            options = onnxruntime.SessionOptions()
            installed = ort_delayed.stream_install(path, options, ram_budget=1 << 30)
            if way == "create_session":
                return installed.create_session()
            if way == "ort_delayed":
                return ort_delayed.InferenceSession(installed.model, options)
            session = onnxruntime.InferenceSession(installed.model, options)
            return session._sess if way == "bare" else session  # the C++ session alone

        session = make()
        gc.collect()
        junk = [np.full((16, 16), np.nan, np.float32) for _ in range(1000)]
        expected = np.load(path.replace("model.onnx", "expected.npy"))
        arguments = (["y"], feed(), None)
        assert session.run(*arguments)[0].tobytes() == expected.tobytes()
        """,
        model,
        way,
    )


def test_values_go_with_the_options_and_the_session(tmp_path: Path) -> None:
    weights = chain_weights(4, 512)
    path = save_external(tmp_path / "model.onnx", chain(weights), weights)
    printed = run_snippet(
        """
        import gc, sys
        import onnxruntime, ort_delayed

        def cycle():
            installed = ort_delayed.stream_install(sys.argv[1], onnxruntime.SessionOptions(), ram_budget=1 << 30)
            installed.create_session()

        cycle()
        before = ort_delayed.loader.current_rss_bytes()
        for _ in range(20):
            cycle()
        gc.collect()
        print(ort_delayed.loader.current_rss_bytes() - before)
        """,
        path,
    )
    assert int(printed) < 12 << 20  # one installation takes 4 MiB


# --- Prepacked forms ---


def test_prepacked_forms_stay_with_the_bytes_that_they_are_of(tmp_path: Path) -> None:
    stored = chain_weights(1)
    (name,) = stored
    made = chain(stored)
    path = Path(save_external(tmp_path / "m.onnx", made, stored))
    made.graph.initializer[0].external_data.add(key="prepacked_0", value="key|0;4;0")
    path.write_bytes(made.SerializeToString())
    source = save_safetensors(tmp_path / "c" / "w.safetensors", stored)
    for weights, expected in ((None, ["prepacked_0"]), (source, [])):
        installed = ort_delayed.stream_install(path, options(), ram_budget=BUDGET, weights=weights)
        (tensor,) = onnx.ModelProto.FromString(installed.model).graph.initializer
        keys = [e.key for e in tensor.external_data]
        assert tensor.name == name
        assert keys == ["location", "offset", "length", *expected]
