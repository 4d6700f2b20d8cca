"""convert_model: from every storage to the data file, or referenced where it stands."""

import os

import numpy as np
import onnx
import pytest
import safetensors.numpy
from conversions import N, X, check_runs, converted_nodes, vector_model
from onnx import TensorProto, helper
from weighted_models import (
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

import ort_delayed
from ort_delayed import convert_model


def test_raw_and_typed_values_go_to_one_page_aligned_data_file_in_order_of_first_use(tmp_path):
    first, second, third = (weights(N, seed=i) for i in range(3))
    made = vector_model(typed("w0", first), initializer("w1", second), typed("w2", third))
    made.graph.initializer.reverse()
    source = save(made, tmp_path / "m.onnx")
    before = source.read_bytes()
    report = check_runs(source, tmp_path)
    nodes = converted_nodes(tmp_path / "converted.onnx")
    assert list(nodes) == ["w0", "w1", "w2"]
    assert [a.offset for a in nodes.values()] == [0, 8192, 16384]
    data = np.memmap(report.data_file, np.uint8, "r")
    for a, array in zip(nodes.values(), (first, second, third), strict=True):
        assert data[a.offset : a.offset + a.nbytes].tobytes() == array.tobytes()
    assert os.path.getsize(report.data_file) == report.data_bytes == 16384 + 4 * N
    assert source.read_bytes() == before
    graph = onnx.load(tmp_path / "converted.onnx").graph
    assert [n.op_type for n in graph.node] == ["DelayedInitializer"] * 3 + ["Add"] * 3
    assert not graph.initializer


NARROW = ["bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64"]
NARROW += ["uint8", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize("store", [initializer, typed], ids=["raw", "typed"])
@pytest.mark.parametrize("dtype", NARROW)
def test_every_type_keeps_its_bytes(tmp_path, dtype, store):
    array = weights(5000, dtype=np.dtype(dtype).type)
    made = model(
        [node("Identity", ["w"], ["y"])], [], [value("y", [5000], helper.np_dtype_to_tensor_dtype(array.dtype))]
    )
    made.graph.initializer.append(store("w", array))
    source = save(made, tmp_path / "m.onnx")
    report = check_runs(source, tmp_path, {})
    assert report.tensor("w").action == "written"
    assert np.fromfile(report.data_file, array.dtype).tobytes() == array.tobytes()


def test_external_payloads_are_referenced_in_place(tmp_path):
    arrays = [weights(N, seed=i) for i in range(3)]
    (tmp_path / "a.bin").write_bytes(b"pad!" + arrays[0].tobytes())
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.bin").write_bytes(arrays[1].tobytes() + arrays[2].tobytes())
    tensors = [external("w0", arrays[0], "a.bin", 4), external("w1", arrays[1], "sub/b.bin", 0, 4 * N)]
    tensors += [external("w2", arrays[2], "sub/b.bin", 4 * N, 0), external("w3", arrays[1], "sub/b.bin", 0, 4 * N)]
    report = check_runs(save(vector_model(*tensors), tmp_path / "m.onnx"), tmp_path)
    nodes = converted_nodes(tmp_path / "converted.onnx")
    assert [(a.filename, a.offset) for a in nodes.values()] == [
        ("a.bin", 4),
        ("sub/b.bin", 0),
        ("sub/b.bin", 4 * N),
        ("sub/b.bin", 0),
    ]
    assert report.data_file is None
    assert report.count("referenced") == 4
    assert report.absolute_paths == ()


def test_a_safetensors_file_is_referenced_in_place(tmp_path):
    array = weights(N, seed=1)
    safetensors.numpy.save_file({"other": weights(7), "w": array}, tmp_path / "w.safetensors")
    data = (tmp_path / "w.safetensors").read_bytes()
    offset = data.index(array.tobytes())
    made = vector_model(external("w0", array, "w.safetensors", offset, 4 * N))
    check_runs(save(made, tmp_path / "m.onnx"), tmp_path)
    assert converted_nodes(tmp_path / "converted.onnx")["w0"].filename == "w.safetensors"


def test_copy_brings_external_payloads_into_the_data_file_and_the_same_bytes_once(tmp_path):
    arrays = [weights(N, seed=i) for i in range(2)]
    (tmp_path / "w.bin").write_bytes(arrays[0].tobytes() + arrays[1].tobytes())
    tensors = [
        external("w0", arrays[0], "w.bin"),
        external("w1", arrays[1], "w.bin", 4 * N),
        external("w2", arrays[0], "w.bin"),
    ]
    source = save(vector_model(*tensors), tmp_path / "m.onnx")
    expected = run_plain(source, X)
    (tmp_path / "out").mkdir()
    report = convert_model(source, tmp_path / "out" / "m.onnx", copy=True)
    assert [a.offset for a in converted_nodes(tmp_path / "out" / "m.onnx").values()] == [0, 8192, 0]
    assert report.data_bytes == 8192 + 4 * N
    os.unlink(tmp_path / "w.bin")
    assert same_bits(run_delayed(tmp_path / "out" / "m.onnx", X), expected)


def test_paths_are_relative_below_the_destination_and_absolute_otherwise_and_the_report_says_so(tmp_path):
    array = weights(N)
    (tmp_path / "far").mkdir()
    (tmp_path / "near" / "deep").mkdir(parents=True)
    (tmp_path / "near" / "deep" / "w.bin").write_bytes(array.tobytes())
    source = save(vector_model(external("w0", array, "w.bin")), tmp_path / "near" / "deep" / "m.onnx")
    expected = run_plain(source, X)
    report = convert_model(source, tmp_path / "near" / "m.onnx")
    assert converted_nodes(tmp_path / "near" / "m.onnx")["w0"].filename == "deep/w.bin"
    assert report.absolute_paths == ()
    report = convert_model(source, tmp_path / "far" / "m.onnx")
    path = str(tmp_path / "near" / "deep" / "w.bin")
    assert converted_nodes(tmp_path / "far" / "m.onnx")["w0"].filename == path
    assert report.absolute_paths == (path,)
    assert f"absolute paths, so the model needs them where they are: {path}" in str(report)
    assert same_bits(run_delayed(tmp_path / "far" / "m.onnx", X), expected)


def test_a_location_with_a_parent_behind_a_link_means_what_the_system_takes_it_for(tmp_path):
    array = weights(N)
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "link").symlink_to(tmp_path / "real" / "inner")
    (tmp_path / "real" / "w.bin").write_bytes(array.tobytes())
    source = save(vector_model(external("w0", array, "link/../w.bin")), tmp_path / "model" / "m.onnx")
    convert_model(source, tmp_path / "model" / "converted.onnx")
    assert converted_nodes(tmp_path / "model" / "converted.onnx")["w0"].filename == str(tmp_path / "real" / "w.bin")


def test_a_hub_cache_keeps_naming_its_links(tmp_path):
    array = weights(N)
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_bytes(vector_model(external("w0", array, "m.onnx_data")).SerializeToString())
    (blobs / "2").write_bytes(array.tobytes())
    (snapshot / "m.onnx").symlink_to("../../blobs/1")
    (snapshot / "m.onnx_data").symlink_to("../../blobs/2")
    convert_model(snapshot / "m.onnx", snapshot / "converted.onnx")
    assert converted_nodes(snapshot / "converted.onnx")["w0"].filename == "m.onnx_data"
    assert same_bits(run_delayed(snapshot / "converted.onnx", X), [X["x"] + array])


@pytest.mark.parametrize(
    ("content", "kind", "text"),
    [
        (None, FileNotFoundError, "does not exist"),
        (bytes(4 * N - 1), EOFError, rf"too short.*{4 * N} bytes needed, {4 * N - 1} found"),
    ],
)
@pytest.mark.parametrize("copy", [False, True])
def test_external_payloads_that_are_not_there_are_refused_before_anything_is_written(
    tmp_path, content, kind, text, copy
):
    if content is not None:
        (tmp_path / "w.bin").write_bytes(content)
    source = save(vector_model(external("w0", weights(N), "w.bin")), tmp_path / "m.onnx")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(kind, match=text) as caught:
        convert_model(source, tmp_path / "converted.onnx", copy=copy)
    assert isinstance(caught.value, ort_delayed.DelayedInitializerError)
    assert "'w0'" in str(caught.value)
    assert str(tmp_path / "w.bin") in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_malformed_tensor_is_refused_by_name(tmp_path):
    bad = TensorProto(name="w0", data_type=1, dims=[N], raw_data=bytes(4 * N + 4))
    with pytest.raises(ValueError, match=f"'w0' .* holds {4 * N + 4} bytes of values, {4 * N} are needed"):
        convert_model(save(vector_model(bad), tmp_path / "m.onnx"), tmp_path / "converted.onnx")


def test_external_tensors_that_are_kept_in_place_are_reported_as_the_model_names_them(tmp_path):
    (tmp_path / "w.bin").write_bytes(weights(N).tobytes())
    source = save(vector_model(external("w0", weights(N), "w.bin")), tmp_path / "m.onnx")
    report = convert_model(source, tmp_path / "converted.onnx", select=["nothing*", "w*", "w1", "nothing*"])
    assert report.unmatched == ("nothing*", "w1")
    report = convert_model(source, tmp_path / "converted.onnx", select=["nothing*"], overwrite=True)
    assert (report.tensor("w0").action, report.tensor("w0").path, report.tensor("w0").offset) == ("kept", "w.bin", 0)
    assert report.absolute_paths == ()
    assert "no tensor has a name like 'nothing*', so that pattern selects nothing" in str(report)
    assert convert_model(source, tmp_path / "converted.onnx", overwrite=True).unmatched == ()
