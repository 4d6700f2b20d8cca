"""What a model or a checkpoint holds, and where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import save_safetensors
from onnx import helper
from stand_ins import encoder_weights, write_stand_ins
from weighted_models import initializer, model, node, save, value, weights

import ort_delayed
from ort_delayed.inspecting import inspect_weights, model_values
from ort_delayed.skeletons import NotAModelError

TOTAL = sum(w.nbytes for w in encoder_weights().values())
MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    return write_stand_ins(tmp_path_factory.mktemp("stand-ins"))


def test_a_model_with_external_data(files):
    found = inspect_weights(files / "model.onnx")
    assert found.source_format == "onnx"
    assert found.storage_bytes("external") == sum(w.nbytes for w in encoder_weights().values() if w.nbytes >= 1024)
    assert found.total_bytes == TOTAL + 8
    assert [g.name for g in found.groups][:4] == ["embeddings", "layer-0000", "layer-0001", "layer-0002"]
    assert found.groups[1].tensors == 4
    assert [f.path for f in found.files] == [str(files / "model.onnx"), str(files / "model.onnx.data")]
    assert found.files[1].nbytes == (files / "model.onnx.data").stat().st_size
    assert found.shared_bytes == 0
    assert not found.is_packed


def test_a_model_with_inline_weights_says_where_they_stand(files):
    found = inspect_weights(files / "inline.onnx")
    assert found.storage_bytes("inline") == TOTAL + 8
    content = (files / "inline.onnx").read_bytes()
    for t in found.tensors:
        if t.offset is not None:
            assert content[t.offset : t.offset + t.nbytes] == encoder_weights()[t.name].tobytes()
    assert any(t.offset is not None for t in found.tensors)


@pytest.mark.parametrize("source", ["artifacts", "artifacts/model.safetensors.index.json", "checkpoint"])
def test_a_checkpoint(files, source):
    found = inspect_weights(files / source)
    assert found.source_format == "safetensors"
    assert found.total_bytes == TOTAL
    assert {t.name: t.shape for t in found.tensors} == {n: w.shape for n, w in encoder_weights().items()}
    assert found.tensors[0].group == "embeddings"
    assert found.tensors[-1].group == "classifier"
    assert len(found.files) == (1 if source == "checkpoint" else 2)
    for t in found.tensors:
        data = Path(t.path).read_bytes()
        assert data[t.offset : t.offset + t.nbytes] == encoder_weights()[t.name].tobytes()


def test_delayed_nodes_and_their_load_devices(files, tmp_path):
    for device in ("cpu", "file"):
        ort_delayed.convert_model(files / "model.onnx", tmp_path / f"{device}.onnx", load_device=device)
        found = inspect_weights(tmp_path / f"{device}.onnx")
        delayed = [t for t in found.tensors if t.kind == "delayed node"]
        assert {t.storage for t in delayed} == {device}
        assert sum(t.nbytes for t in delayed) == found.storage_bytes(device) > TOTAL * 0.9


def test_tensors_come_in_order_of_first_use(files):
    names = [t.name for t in inspect_weights(files / "model.onnx").tensors]
    assert names[0] == "embeddings.word_embeddings.weight"
    assert names.index("encoder.layer.0.dense.weight") < names.index("encoder.layer.1.dense.weight")


def test_shared_bytes_count_once(tmp_path):
    name = "shared_weight.onnx"
    found = inspect_weights(MODELS / name)
    assert found.total_bytes - found.shared_bytes == sum(f.tensor_bytes for f in found.files) + sum(
        t.nbytes for t in found.tensors if t.offset is None
    )
    save_safetensors(tmp_path / "tied.safetensors", {"a": weights(4, 4)}, {"b": "a"})
    tied = inspect_weights(tmp_path / "tied.safetensors")
    assert (tied.total_bytes, tied.shared_bytes) == (128, 64)


def test_bodies_have_their_own_tensors():
    found = inspect_weights(MODELS / "if_branches.onnx")
    assert len({t.graph for t in found.tensors}) > 1


def test_a_packed_model_is_recognised(files, tmp_path):
    from ort_delayed.packing import pack_model

    pack_model(files / "model.onnx", tmp_path / "packed.onnx")
    assert inspect_weights(tmp_path / "packed.onnx").is_packed


def test_a_data_file_that_is_not_there_has_no_size(files, tmp_path):
    (tmp_path / "model.onnx").write_bytes((files / "model.onnx").read_bytes())
    assert inspect_weights(tmp_path / "model.onnx").files[1].nbytes is None


def test_values(tmp_path):
    graph = model(
        [node("Mul", ["x", "w"], ["y"]), node("SequenceConstruct", ["y"], ["s"])],
        [value("x", ["batch", None, 3]), value("w", [3])],
        [value("y", None)],
        [initializer("w", np.ones(3, np.float32))],
    )
    graph.graph.output.append(helper.make_tensor_sequence_value_info("s", 1, None))
    inputs, outputs = model_values(save(graph, tmp_path / "m.onnx"))
    assert [(v.name, v.element_type, v.shape) for v in inputs] == [("x", "float32", ("batch", "?", 3))]
    assert [(v.name, v.element_type, v.shape) for v in outputs] == [
        ("y", "float32", None),
        ("s", "sequence_type", None),
    ]


def test_what_is_no_model_is_refused(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"\xff\xff")
    with pytest.raises(NotAModelError):
        inspect_weights(tmp_path / "m.onnx")
    with pytest.raises(FileNotFoundError):
        inspect_weights(tmp_path / "other.onnx")
