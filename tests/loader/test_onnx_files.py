"""ONNX models with external data: initializers of every graph, their ranges, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from checkpoints import bits, external_initializer, save_graph, save_onnx
from onnx import TensorProto, helper, numpy_helper

from ort_delayed.loader.budget import RamBudgetExceeded
from ort_delayed.loader.errors import LocalWeightsRequired, ShardFormatError
from ort_delayed.loader.files import FileIdentity
from ort_delayed.loader.onnx_files import check_ranges, external_initializers, iter_initializers, read_onnx_model
from ort_delayed.loader.probe import PeakRamProbe
from ort_delayed.loader.tensor_on_disk import TensorOnDisk


def discover(path: Path) -> tuple[TensorOnDisk, ...]:
    return external_initializers(read_onnx_model(str(path)), str(path), str(path.parent))


def in_a_body(initializer: TensorProto, *, depth: int = 1) -> onnx.NodeProto:
    """An If whose branch, ``depth`` deep, holds the initializer."""
    nodes = [] if depth == 1 else [in_a_body(initializer, depth=depth - 1)]
    body = helper.make_graph(nodes, "body", [], [], [initializer] if depth == 1 else [])
    return helper.make_node("If", ["c"], [], then_branch=body, else_branch=helper.make_graph([], "e", [], []))


def test_every_type_with_raw_storage(tmp_path: Path) -> None:
    types = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "uint8", "bool", "complex128"]
    arrays = {name: bits(name, (2, 3), i) for i, name in enumerate(types)}
    found = {t.name: t for t in discover(save_onnx(tmp_path / "m.onnx", arrays, align=64))}
    assert set(found) == set(types)
    for name, tensor in found.items():
        assert tensor.element_type.name == name
        assert tensor.offset % 64 == 0
        assert Path(tensor.path).read_bytes()[tensor.offset : tensor.end] == arrays[name].tobytes()


def test_initializers_in_bodies_at_any_depth(tmp_path: Path) -> None:
    array = bits("float32", (2,))
    deep = in_a_body(external_initializer("deep", array, "w", 8), depth=3)
    path = save_graph(tmp_path / "m.onnx", [external_initializer("top", array, "w", 0)], [deep])
    assert {t.name: t.offset for t in discover(path)} == {"top": 0, "deep": 8}
    assert {t.name for t in iter_initializers(read_onnx_model(str(path)).graph)} == {"top", "deep"}


def test_a_list_of_graphs_is_a_body_too() -> None:
    inner = helper.make_graph([], "b", [], [], [TensorProto(name="x")])
    node = helper.make_node("N", [], [], domain="d", bodies=[inner])
    assert [t.name for t in iter_initializers(helper.make_graph([node], "g", [], []))] == ["x"]


def test_one_name_for_the_same_bytes_in_two_graphs_is_one_tensor(tmp_path: Path) -> None:
    array = bits("float32", (2,))
    tensors = [external_initializer("w", array, "w", 0), external_initializer("w", array, "w", 0)]
    path = save_graph(tmp_path / "m.onnx", tensors[:1], [in_a_body(tensors[1])])
    assert [t.name for t in discover(path)] == ["w"]


def test_one_name_for_different_bytes_is_refused(tmp_path: Path) -> None:
    array = bits("float32", (2,))
    other = in_a_body(external_initializer("w", array, "w", 8))
    path = save_graph(tmp_path / "m.onnx", [external_initializer("w", array, "w", 0)], [other])
    with pytest.raises(ShardFormatError, match="two initializers called 'w' in different graphs, with different data"):
        discover(path)


def test_small_inline_initializers_are_left_to_the_graph(tmp_path: Path) -> None:
    small = numpy_helper.from_array(np.zeros(1023, np.uint8), "shape")
    path = save_graph(tmp_path / "m.onnx", [small, external_initializer("w", bits("int8", (2,)), "w", 0)])
    assert [t.name for t in discover(path)] == ["w"]


@pytest.mark.parametrize("in_body", [False, True])
def test_large_inline_initializers_are_refused_with_the_way_out(tmp_path: Path, in_body: bool) -> None:
    large = numpy_helper.from_array(np.zeros(1024, np.uint8), "weight")
    path = save_graph(tmp_path / "m.onnx", [] if in_body else [large], [in_a_body(large)] if in_body else [])
    with pytest.raises(
        ShardFormatError, match=r"holds 1 weights inline, .*'weight' \(1024 bytes\)\. Move them"
    ) as caught:
        discover(path)
    assert f"onnx.save_model(onnx.load({str(path)!r}), 'new.onnx', save_as_external_data=True" in str(caught.value)


def test_the_way_out_works(tmp_path: Path) -> None:
    large = numpy_helper.from_array(np.arange(1024, dtype=np.uint8), "weight")
    path = save_graph(tmp_path / "m.onnx", [large])
    new = str(tmp_path / "new.onnx")
    onnx.save_model(onnx.load(str(path)), new, save_as_external_data=True, size_threshold=1024)
    (tensor,) = discover(Path(new))
    assert Path(tensor.path).read_bytes()[tensor.offset : tensor.end] == large.raw_data


def test_many_inline_initializers_are_counted(tmp_path: Path) -> None:
    large = [numpy_helper.from_array(np.zeros(2000, np.uint8), f"w{i}") for i in range(5)]
    with pytest.raises(ShardFormatError, match=r"holds 5 weights inline.* and 2 more\. Move"):
        discover(save_graph(tmp_path / "m.onnx", large))


def test_strings_count_by_what_they_take(tmp_path: Path) -> None:
    strings = TensorProto(name="words", dims=[1], data_type=TensorProto.STRING, string_data=[b"x" * 2000])
    with pytest.raises(ShardFormatError, match="'words'"):
        discover(save_graph(tmp_path / "m.onnx", [strings]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"location": ""}, "no usable 'location'"),
        ({"offset": "-1"}, "'offset' must be"),
        ({"offset": "x"}, "'offset' must be"),
        ({"length": "7"}, "'length' is 7"),
    ],
)
def test_entries_that_say_nothing(tmp_path: Path, change: dict[str, str], said: str) -> None:
    tensor = external_initializer("w", bits("int8", (2,)), "w", 0)
    for e in tensor.external_data:
        e.value = change.get(e.key, e.value)
    with pytest.raises(ShardFormatError, match=rf"m\.onnx': initializer 'w': external data.*{said}"):
        discover(save_graph(tmp_path / "m.onnx", [tensor]))


def test_external_strings_are_refused(tmp_path: Path) -> None:
    tensor = external_initializer("w", bits("int8", (2,)), "w", 0)
    tensor.data_type = TensorProto.STRING
    with pytest.raises(ShardFormatError, match="has no raw storage"):
        discover(save_graph(tmp_path / "m.onnx", [tensor]))


def test_an_external_initializer_without_a_name(tmp_path: Path) -> None:
    with pytest.raises(ShardFormatError, match="has no name"):
        discover(save_graph(tmp_path / "m.onnx", [external_initializer("", bits("int8", (2,)), "w", 0)]))


@pytest.mark.parametrize("location", ["https://h/w", "/etc/passwd"])
def test_locations_are_local_and_relative(tmp_path: Path, location: str) -> None:
    path = save_graph(tmp_path / "m.onnx", [external_initializer("w", bits("int8", (2,)), location, 0)])
    with pytest.raises(LocalWeightsRequired, match=r"initializer 'w' of '.*m\.onnx' names the shard"):
        discover(path)


@pytest.mark.parametrize("content", [b"\xff\xff\xff\xff garbage", b"\x0a\xff\xff\xff\xff\x0f"])
def test_what_is_not_a_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(ShardFormatError, match="is not an ONNX model"):
        read_onnx_model(str(tmp_path / "m.onnx"))


def test_a_model_is_reserved_before_it_is_read_and_checked_after(tmp_path: Path) -> None:
    path = save_onnx(tmp_path / "m.onnx", {"w": bits("int8", (2,))})
    with PeakRamProbe(5, rss_sampler=lambda: 0) as probe, pytest.raises(RamBudgetExceeded) as caught:
        read_onnx_model(str(path), probe=probe)
    assert caught.value.requested_bytes == path.stat().st_size
    samples = iter([0, 0, 5000])
    probe = PeakRamProbe(4000, rss_sampler=lambda: next(samples), poll_interval_seconds=None)
    probe.start()
    with pytest.raises(RamBudgetExceeded) as caught:
        read_onnx_model(str(path), probe=probe)
    assert caught.value.observed_bytes == 5000


def test_a_large_model_file_that_does_not_fit_is_told_what_to_do(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.zeros((1024, 1025), np.float32), "w")
    path = save_graph(tmp_path / "m.onnx", [weight])
    with PeakRamProbe(1 << 20) as probe, pytest.raises(RamBudgetExceeded, match="save them as external data first"):
        read_onnx_model(str(path), probe=probe)


def test_ranges_are_inside_their_files(tmp_path: Path) -> None:
    tensors = discover(save_onnx(tmp_path / "m.onnx", {"a": bits("int8", (2,)), "b": bits("int8", (3,))}))
    data = tmp_path / "weights.bin"
    assert check_ranges(tensors) == {str(data): FileIdentity.of(str(data))}
    data.write_bytes(bytes(4))
    with pytest.raises(ShardFormatError, match=r"initializer 'b' needs 3 bytes at offset 2 of '.*', which has 4 bytes"):
        check_ranges(tensors)
    data.unlink()
    with pytest.raises(FileNotFoundError, match=r"which the model names, is not there"):
        check_ranges(tensors, named_by="the model")
