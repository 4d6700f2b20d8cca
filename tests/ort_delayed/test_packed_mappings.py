"""ort_delayed/packed_mappings.py: packed weights that ONNX Runtime cannot map, or that stand at odd places."""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from packable_models import random, save_external
from refused_mappings import CAN_REFUSE
from subprocesses import run_snippet

import ort_delayed
from ort_delayed import packed_mappings
from ort_delayed.loader import platform
from ort_delayed.loader.element_types import element_type_from_onnx
from ort_delayed.loader.errors import ShardFormatError
from ort_delayed.loader.platform import FileMapping
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.packed_mappings import MAY_READ_UNALIGNED, PackedMappings, places_of
from ort_delayed.packed_source import PackedModelError, all_packed_ranges
from ort_delayed.packing import pack_model
from ort_delayed.prepacked_entries import packed_weights, set_packed_weights

must_be_mapped = pytest.mark.skipif(not MAY_READ_UNALIGNED, reason="this onnxruntime reads packed weights anywhere")
lists_mappings = pytest.mark.skipif(not platform.can_give_up_pages(), reason="mappings cannot be listed here")

WAYS: dict[str, Callable[[Path], object]] = {
    "session": ort_delayed.InferenceSession,
    "budget": lambda path: ort_delayed.InferenceSession(path, ram_budget=64 << 20),
    "prepare_model": lambda path: ort_delayed.prepare_model(path, onnxruntime.SessionOptions()),
}
each_way = pytest.mark.parametrize("way", [w if w != "budget" else pytest.param(w, marks=lists_mappings) for w in WAYS])


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Three matrices for any number of rows: kernels for few rows read packed weights from anywhere."""
    weights = [numpy_helper.from_array(random(512, 512, seed=i), f"w{i}") for i in range(3)]
    nodes = [helper.make_node("MatMul", ["x", "w0"], ["a"]), helper.make_node("MatMul", ["a", "w1"], ["b"])]
    nodes.append(helper.make_node("MatMul", ["b", "w2"], ["y"]))
    x, y = (helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["rows", 512]) for n in "xy")
    graph = helper.make_graph(nodes, "graph", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    pack_model(save_external(model, tmp_path / "model.onnx"), tmp_path / "packed.onnx")
    return tmp_path / "packed.onnx"


def ranges_of(path: Path) -> tuple[TensorOnDisk, ...]:
    return all_packed_ranges(onnx.load(path, load_external_data=False), str(path.parent))


def mapping_of(stored: TensorOnDisk, address: int = 1 << 30) -> FileMapping:
    start = stored.offset // mmap.PAGESIZE * mmap.PAGESIZE
    return FileMapping(address, -(-stored.end // mmap.PAGESIZE) * mmap.PAGESIZE - start, start, stored.path)


def test_all_packed_ranges_are_those_that_onnx_runtime_maps(packed: Path) -> None:
    model = onnx.load(packed, load_external_data=False)
    buffers = [b for t in model.graph.initializer for w in packed_weights(t) for b in w.buffers]
    found = ranges_of(packed)
    assert len(found) == 3
    assert [(t.offset, t.nbytes) for t in found] == [(b.offset, b.nbytes) for b in buffers]
    assert {t.path for t in found} == {str(p.resolve()) for p in packed.parent.glob("*.weights")}


@must_be_mapped
def test_a_range_without_a_mapping_is_named(packed: Path) -> None:
    ranges = ranges_of(packed)
    with pytest.raises(OSError, match=r"could not map 1 of 3 packed weights .*vm\.max_map_count") as raised:
        PackedMappings().take(ranges, [mapping_of(t) for t in ranges[:2]])
    assert (raised.value.errno, raised.value.filename) == (errno.ENOMEM, ranges[2].path)
    assert ranges[2].name in str(raised.value)
    assert f"{ranges[2].nbytes} bytes at offset {ranges[2].offset}" in str(raised.value)
    assert not packed_mappings._owners


def test_where_ranges_are_shown() -> None:
    page, file, other = mmap.PAGESIZE, "/a", "/b"
    uint8 = element_type_from_onnx(onnx.TensorProto.UINT8)
    assert uint8 is not None
    ranges = {
        name: TensorOnDisk(name, path, offset, nbytes, (nbytes,), uint8)
        for name, path, offset, nbytes in [
            ("first", file, 0, page),
            ("inside", file, 64, 128),
            ("second", file, page, 2 * page),
            ("empty", file, page, 0),
            ("elsewhere", other, 0, page),
        ]
    }
    mappings = [
        FileMapping(10 * page, page, 0, file),
        FileMapping(30 * page, 3 * page, 0, file),  # two that have become one
        FileMapping(50 * page, page, page, file),  # too short
        FileMapping(70 * page, 2 * page, page, file),
    ]
    found = {t.name: places for t, places in places_of(ranges.values(), mappings).items()}
    assert found == {
        "first": ((file, 0, 10 * page), (file, 0, 30 * page)),
        "inside": ((file, 64, 10 * page + 64), (file, 64, 30 * page + 64)),
        "second": ((file, page, 31 * page), (file, page, 70 * page)),
        "elsewhere": (),
    }


@must_be_mapped
@lists_mappings
def test_mappings_of_another_session_do_not_count(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = ranges_of(packed)
    monkeypatch.setattr(platform, "file_mappings", lambda paths: [mapping_of(t) for t in ranges])
    first, second = PackedMappings(), PackedMappings()
    with first.appearing(ranges):
        pass
    with pytest.raises(OSError, match="could not map 3 of 3"), second.appearing(ranges):
        pass
    with first.appearing(ranges):  # made again, at the same addresses
        pass
    first.close()  # it goes, and another one gets its addresses
    with second.appearing(ranges):
        pass
    second.close()
    second.close()
    assert not packed_mappings._owners


@must_be_mapped
@lists_mappings
def test_sessions_that_come_and_go_on_several_threads(packed: Path) -> None:
    """None is refused: the addresses of those that go are told from those of others."""
    feeds, failures = {"x": random(16, 512)}, list[BaseException]()
    expected = ort_delayed.InferenceSession(packed).run(None, feeds)[0]

    def come_and_go() -> None:
        try:
            for number in range(24):
                # What other threads take counts against a budget as well.
                session = ort_delayed.InferenceSession(packed, ram_budget=(1 << 30) if number % 8 == 7 else None)
                np.testing.assert_array_equal(session.run(None, feeds)[0], expected)
        except BaseException as failed:
            failures.append(failed)

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_providers_can_be_set_again(packed: Path) -> None:
    session = ort_delayed.InferenceSession(packed)
    feeds = {"x": random(16, 512)}
    expected = session.run(None, feeds)[0]
    for _ in range(3):
        session.set_providers(["CPUExecutionProvider"])
        np.testing.assert_array_equal(session.run(None, feeds)[0], expected)


@each_way
def test_a_model_of_which_every_weight_is_small(tmp_path: Path, way: str) -> None:
    weight = numpy_helper.from_array(random(32, 16), "w")
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [3, 32])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [3, 16])
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "graph", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    pack_model(save_external(model, tmp_path / "model.onnx"), tmp_path / "packed.onnx")
    assert [t.nbytes for t in ranges_of(tmp_path / "packed.onnx")] == [2048]
    assert WAYS[way](tmp_path / "packed.onnx") is not None


@must_be_mapped
@each_way
def test_a_filesystem_that_cannot_map(packed: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def refused(*arguments: object, **settings: object) -> None:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr("ort_delayed.packed_mappings.mmap.mmap", refused)
    with pytest.raises(OSError, match=r"must be mapped.* refuses \(No such device\).*unpacked") as raised:
        WAYS[way](packed)
    assert raised.value.errno == errno.ENODEV
    assert raised.value.filename == ranges_of(packed)[0].path


@must_be_mapped
@each_way
def test_offsets_that_kernels_cannot_read_from(packed: Path, way: str) -> None:
    change_buffers(packed, offset=(at := ranges_of(packed)[0].offset + 16))
    with pytest.raises(PackedModelError, match=rf"multiple of 64 bytes.* is {at}: pack"):
        WAYS[way](packed)


def change_buffers(path: Path, **changes: int) -> None:
    model = onnx.load(path, load_external_data=False)
    tensor = next(t for t in model.graph.initializer if packed_weights(t))
    (weight,) = packed_weights(tensor)
    set_packed_weights(tensor, [replace(weight, buffers=tuple(replace(b, **changes) for b in weight.buffers))])
    path.write_bytes(model.SerializeToString())


@each_way
def test_packed_forms_that_are_too_short(packed: Path, way: str) -> None:
    """Kernels would read beyond the mapping, and the process would end with SIGBUS (with onnxruntime up to 1.31)."""
    change_buffers(packed, nbytes=512 * 512 * 4 - 4)
    with pytest.raises(PackedModelError, match=r"'MatMul' made of the weight 'w0' .* 1048576 bytes, it has 1048572 at"):
        WAYS[way](packed)


@pytest.mark.parametrize("way", ["session", pytest.param("budget", marks=lists_mappings)])
def test_ranges_that_end_behind_the_file(packed: Path, way: str) -> None:
    (data,) = packed.parent.glob("*.weights")
    change_buffers(packed, offset=data.stat().st_size - 4096)
    with pytest.raises((ShardFormatError, Fail), match=r"the file holds 4096 from there on|Pre-packed blob: MatMul"):
        WAYS[way](packed)


REFUSED = """
import onnxruntime, ort_delayed, numpy as np
from pathlib import Path
from refused_mappings import refuse_private_file_mappings
path, settings = Path(sys.argv[1]), {"ram_budget": 64 << 20} if sys.argv[2] == "budget" else {}
feeds = {"x": np.ones((16, 512), np.float32)}
expected = ort_delayed.InferenceSession(path, **settings).run(None, feeds)[0]
if not refuse_private_file_mappings():
    print("not allowed")
    sys.exit()
try:
    session = ort_delayed.InferenceSession(path, enable_fallback=0, **settings)
except OSError as error:
    print(error)
else:
    assert session.run(None, feeds)[0].tobytes() == expected.tobytes()
    print("ran")
"""


@pytest.mark.skipif(not CAN_REFUSE, reason="mappings cannot be refused here")
@pytest.mark.parametrize("way", ["session", "budget"])
def test_a_process_that_may_map_no_file(packed: Path, way: str) -> None:
    """Without the check SIGSEGV ends it: ONNX Runtime reads what it cannot map to a place that is not aligned."""
    printed = run_snippet(REFUSED, packed, way)
    if printed == "not allowed\n":
        pytest.skip("no filters allowed here")
    assert ("ONNX Runtime could not map 3 of 3 packed weights" in printed) is MAY_READ_UNALIGNED, printed
    assert (printed == "ran\n") is not MAY_READ_UNALIGNED, printed
