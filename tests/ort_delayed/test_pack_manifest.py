"""ort_delayed/pack_manifest.py: what a packed model says of itself, and whether it fits here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import onnx
import onnxruntime
import pytest

from ort_delayed.pack_layout import RangeGroup
from ort_delayed.pack_manifest import (
    MANIFEST_KEY,
    PackManifest,
    PackManifestError,
    check_manifest,
    current_environment,
    read_manifest,
    verify_packed_model,
    write_manifest,
)


@pytest.fixture
def manifest(tmp_path: Path) -> PackManifest:
    (tmp_path / "data").write_bytes(bytes(10_000))
    return PackManifest(
        producer="ort-delayed 0",
        source_digest="ab",
        environment=current_environment(),
        optimize="all",
        prepack=True,
        tied_to_processor=False,
        data_file="data",
        data_bytes=10_000,
        streamed_start=4096,
        streamed_end=9000,
        groups=(RangeGroup(4096, 100), RangeGroup(8192, 808)),
    )


def model_with(text: str) -> onnx.ModelProto:
    model = onnx.ModelProto(ir_version=8)
    model.graph.name = "graph"
    model.metadata_props.add(key=MANIFEST_KEY, value=text)
    return model


def test_what_is_written_is_read_back(manifest: PackManifest) -> None:
    model = onnx.ModelProto()
    model.metadata_props.add(key="other", value="stays")
    write_manifest(model, replace(manifest, data_bytes=1))
    write_manifest(model, manifest)
    assert read_manifest(model) == manifest
    assert [p.key for p in model.metadata_props] == ["other", MANIFEST_KEY]


def test_a_model_without_one() -> None:
    assert read_manifest(onnx.ModelProto()) is None


@pytest.mark.parametrize("field", ["producer", "environment", "groups", "data_bytes", "prepack"])
def test_a_damaged_one_is_refused(manifest: PackManifest, field: str) -> None:
    model = onnx.ModelProto()
    write_manifest(model, manifest)
    whole = json.loads(model.metadata_props[0].value)
    for broken in ({k: v for k, v in whole.items() if k != field}, {**whole, field: [1]}):
        with pytest.raises(PackManifestError, match=r"damaged.*pack the model again"):
            read_manifest(model_with(json.dumps(broken)))


@pytest.mark.parametrize("offset", ["Infinity", "1e999", "NaN", "[]", '"x"', "null"])
def test_a_group_that_is_none_is_refused(manifest: PackManifest, offset: str) -> None:
    model = onnx.ModelProto()
    write_manifest(model, replace(manifest, groups=(RangeGroup(123456789, 1),)))
    with pytest.raises(PackManifestError, match="damaged"):
        read_manifest(model_with(model.metadata_props[0].value.replace("123456789", offset)))


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", "1", "null", "[" * 100_000, '{"format":' * 100_000])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(PackManifestError, match="damaged"):
        read_manifest(model_with(text))


def test_another_format_and_unknown_fields_are_refused(manifest: PackManifest) -> None:
    model = onnx.ModelProto()
    write_manifest(model, manifest)
    whole = json.loads(model.metadata_props[0].value)
    with pytest.raises(PackManifestError, match="has format 2, this release of ort_delayed reads format 1"):
        read_manifest(model_with(json.dumps({**whole, "format": 2})))
    with pytest.raises(PackManifestError, match="unknown fields more"):
        read_manifest(model_with(json.dumps({**whole, "more": 1})))


def test_what_a_refused_manifest_says_is_not_repeated_at_length(manifest: PackManifest) -> None:
    model = onnx.ModelProto()
    write_manifest(model, manifest)
    whole = json.loads(model.metadata_props[0].value)
    for broken in ({"format": "x" * 9999}, {**whole, "x" * 9999: 1}, {**whole, "data_bytes": "x" * 9999}):
        with pytest.raises(PackManifestError) as caught:
            read_manifest(model_with(json.dumps({**whole, **broken})))
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["../data", "/data", "a/b", "", "a\0", "\ud800"])
def test_the_data_file_stands_beside_the_model(manifest: PackManifest, name: str) -> None:
    model = onnx.ModelProto()
    write_manifest(model, replace(manifest, data_file=name))
    with pytest.raises(PackManifestError, match="must stand beside the model"):
        read_manifest(model)


def test_a_model_of_this_machine_is_in_order(manifest: PackManifest, tmp_path: Path) -> None:
    assert check_manifest(manifest, str(tmp_path))


def test_another_onnxruntime_or_processor_makes_packed_weights_useless_only(
    manifest: PackManifest, tmp_path: Path
) -> None:
    here = manifest.environment
    older = check_manifest(replace(manifest, environment=replace(here, onnxruntime="1.0.0")), str(tmp_path))
    assert not older
    assert older.faults == ()
    assert older.differences == (f"it was packed with onnxruntime 1.0.0, this is {onnxruntime.__version__}",)
    other = check_manifest(replace(manifest, environment=replace(here, features=("avx512f",))), str(tmp_path))
    assert other.faults == ()
    assert "it was packed for " in other.differences[0]
    assert "with avx512f, this is" in other.differences[0]


def test_a_graph_laid_out_for_another_processor_is_a_fault(manifest: PackManifest, tmp_path: Path) -> None:
    elsewhere = replace(manifest.environment, machine="riscv64")
    found = check_manifest(replace(manifest, environment=elsewhere, tied_to_processor=True), str(tmp_path))
    assert "pack the model again here, or with optimize='extended'" in found.faults[0]


def test_a_data_file_that_is_gone_or_cut_is_a_fault(manifest: PackManifest, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(9_999))
    (fault,) = check_manifest(manifest, str(tmp_path)).faults
    assert "must have 10000 bytes, it has 9999" in fault
    (tmp_path / "data").unlink()
    (fault,) = check_manifest(manifest, str(tmp_path)).faults
    assert "cannot be opened (No such file or directory)" in fault


def test_verifying_a_file(manifest: PackManifest, tmp_path: Path) -> None:
    model = model_with("")
    write_manifest(model, manifest)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    assert verify_packed_model(tmp_path / "model.onnx").manifest == manifest
    del model.metadata_props[:]
    (tmp_path / "plain.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(PackManifestError, match=r"has no manifest: it was not written by ort_delayed\.pack_model"):
        verify_packed_model(tmp_path / "plain.onnx")


def test_the_processor_is_described_by_what_matters_only() -> None:
    environment = current_environment()
    assert environment == current_environment()
    assert list(environment.features) == sorted(environment.features)
    assert "sse2" not in environment.features
