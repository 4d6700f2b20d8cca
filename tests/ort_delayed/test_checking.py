"""Every fault of a model's or a checkpoint's files, each found without reading a weight."""

from __future__ import annotations

import json
import os
from pathlib import Path

import onnx
import pytest
from onnx import helper
from stand_ins import write_stand_ins

import ort_delayed
from ort_delayed.checking import check_weights
from ort_delayed.inspecting import inspect_weights
from ort_delayed.pack_manifest import MANIFEST_KEY


@pytest.fixture
def files(tmp_path) -> Path:
    return write_stand_ins(tmp_path)


@pytest.mark.parametrize(
    "source", ["model.onnx", "inline.onnx", "artifacts", "artifacts/model.safetensors.index.json", "checkpoint"]
)
def test_what_is_sound_has_no_faults(files, source):
    found = check_weights(files / source)
    assert found
    assert found.faults == found.notes == ()
    assert found.tensors >= 14
    assert all(f.nbytes is not None for f in found.files)


def only_fault(source: Path, **settings: object) -> str:
    found = check_weights(source, **settings)  # type: ignore[arg-type]
    assert not found
    assert len(found.faults) == 1
    return found.faults[0]


def test_a_missing_data_file_is_one_fault_however_many_tensors_need_it(files):
    (files / "model.onnx.data").unlink()
    fault = only_fault(files / "model.onnx")
    assert "model.onnx.data" in fault
    assert "14 tensors" in fault or "tensors (" in fault
    assert "No such file" in fault


def test_a_data_file_that_is_too_short_says_what_is_cut_off(files):
    data = files / "model.onnx.data"
    os.truncate(data, data.stat().st_size - 100)
    fault = only_fault(files / "model.onnx")
    assert "1 of its" in fault
    assert "cut off" in fault


def test_a_data_file_that_is_no_file(files):
    (files / "model.onnx.data").unlink()
    (files / "model.onnx.data").mkdir()
    assert "directory" in only_fault(files / "model.onnx")
    (files / "model.onnx.data").rmdir()
    os.mkfifo(files / "model.onnx.data")
    assert "FIFO" in only_fault(files / "model.onnx")


def test_a_data_file_outside_of_the_directory(files, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "data"
    (files / "model.onnx.data").rename(elsewhere)
    (files / "model.onnx.data").symlink_to(elsewhere)
    assert "leads out of the directory" in only_fault(files / "model.onnx")


def change_external(path: Path, **entries: str) -> None:
    model = onnx.load(path, load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.external_data)
    for entry in tensor.external_data:
        entry.value = entries.get(entry.key, entry.value)
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"location": "/tmp/x"}, "absolute path '/tmp/x'"),
        ({"offset": "-4"}, "'offset' must be a number"),
        ({"length": "3"}, "'length' is 3"),
        ({"offset": str(1 << 40)}, "must have at least"),
    ],
)
def test_external_data_that_contradicts_itself(files, entries, expected):
    change_external(files / "model.onnx", **entries)
    assert expected in only_fault(files / "model.onnx")


def test_several_faults_are_all_found(files):
    change_external(files / "model.onnx", length="3")
    os.truncate(files / "model.onnx.data", 10)
    assert len(check_weights(files / "model.onnx").faults) == 2


def test_inline_values_of_the_wrong_size(files):
    model = onnx.load(files / "inline.onnx")
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-4]
    model.graph.initializer[2].raw_data = b"1234"
    (files / "inline.onnx").write_bytes(model.SerializeToString())
    assert len(check_weights(files / "inline.onnx").faults) == 2


def test_what_is_no_model_is_a_fault(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"\xff" * 9)
    assert "not an ONNX model" in only_fault(tmp_path / "m.onnx")


# --- Delayed nodes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def delayed(files) -> Path:
    ort_delayed.convert_model(files / "inline.onnx", files / "delayed.onnx")
    return files / "delayed.onnx"


def data_file(path: Path) -> Path:
    (found,) = path.parent.glob(f"{path.name}.*.weights")
    return found


def test_a_converted_model_is_sound(delayed):
    found = check_weights(delayed)
    assert found
    assert len(found.files) == 2


def test_a_missing_payload_file(delayed):
    data_file(delayed).unlink()
    assert "cannot be opened" in only_fault(delayed)


def test_a_payload_that_is_cut_off(delayed):
    os.truncate(data_file(delayed), 5000)
    assert "cut off" in only_fault(delayed)


def test_a_missing_attribute(delayed):
    model = onnx.load(delayed)
    node = next(n for n in model.graph.node if n.op_type == "DelayedInitializer")
    del node.attribute[0]
    delayed.write_bytes(model.SerializeToString())
    assert "lacks the required attribute" in only_fault(delayed)


def test_an_absolute_path_is_a_note_and_outside_of_weights_dir_a_fault(delayed, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    ort_delayed.convert_model(delayed, elsewhere / "moved.onnx")
    found = check_weights(elsewhere / "moved.onnx")
    assert found
    assert "absolute path" in found.notes[0]
    assert "leads out of the directory" in only_fault(elsewhere / "moved.onnx", weights_dir=elsewhere)
    assert check_weights(elsewhere / "moved.onnx", weights_dir=delayed.parent)


def test_a_node_whose_attributes_each_call_gives_is_left_to_the_calls():
    path = Path(__file__).parents[2] / "models" / "function_reference_attributes.onnx"
    assert check_weights(path)


# --- Checkpoints ------------------------------------------------------------------------------------------------------


def test_a_missing_and_a_damaged_shard_are_two_faults(files):
    shards = sorted((files / "artifacts").glob("*.safetensors"))
    shards[0].unlink()
    os.truncate(shards[1], 500)
    found = check_weights(files / "artifacts")
    assert len(found.faults) == 2
    assert [f.nbytes for f in found.files] == [None, None]


def test_a_stale_index(files):
    index = files / "artifacts" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["metadata"]["total_size"] += 4
    index.write_text(json.dumps(content))
    assert "stale" in only_fault(index)


def test_an_index_that_is_none(files):
    index = files / "artifacts" / "model.safetensors.index.json"
    index.write_text("{}")
    assert "weight_map" in only_fault(index)


def test_a_missing_numbered_shard_without_an_index(files):
    (files / "artifacts" / "model.safetensors.index.json").unlink()
    (files / "artifacts" / "model-00002-of-00002.safetensors").unlink()
    assert "00002-of-00002" in only_fault(files / "artifacts")


def test_a_safetensors_file_as_external_data_must_have_a_sound_header(files):
    data = files / "model.onnx.data"
    data.rename(files / "model.safetensors")
    model = onnx.load(files / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "model.safetensors"
    (files / "model.onnx").write_bytes(model.SerializeToString())
    assert "valid safetensors file" in only_fault(files / "model.onnx")


# --- Packed models ----------------------------------------------------------------------------------------------------


def test_a_packed_model_and_one_from_elsewhere(files):
    from ort_delayed.packing import pack_model

    path = files / "packed.onnx"
    pack_model(files / "model.onnx", path)
    assert check_weights(path)
    model = onnx.load(path, load_external_data=False)
    (entry,) = (p for p in model.metadata_props if p.key == MANIFEST_KEY)
    values = json.loads(entry.value)
    values["environment"]["onnxruntime"] = "1.0"
    entry.value = json.dumps(values)
    path.write_bytes(model.SerializeToString())
    assert "packed with onnxruntime 1.0" in only_fault(path)
    entry.value = "{}"
    path.write_bytes(model.SerializeToString())
    assert "damaged" in only_fault(path)
    data_file(path).unlink()
    helper.set_model_props(model, {MANIFEST_KEY: json.dumps(values)})
    path.write_bytes(model.SerializeToString())
    assert any("cannot be opened" in fault for fault in check_weights(path).faults)


def test_a_key_of_the_metadata_that_is_no_text(files):
    model = onnx.load(files / "inline.onnx")
    model.metadata_props.add(key="a key", value="x")
    (files / "key.onnx").write_bytes(model.SerializeToString().replace(b"a key", b"a k\xff\xfe"))
    assert check_weights(files / "key.onnx")
    assert not inspect_weights(files / "key.onnx").is_packed
