"""Mapping a group: the right bytes, read-only, and nothing left when it is released, unless somebody holds on."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    SAFETENSORS_NAMES,
    Array,
    bits,
    entry,
    library_knows,
    raw_safetensors,
    save_onnx,
    save_safetensors,
)

from ort_delayed.loader import mapping
from ort_delayed.loader.element_types import ELEMENT_TYPES
from ort_delayed.loader.errors import BufferReleaseError, LocalWeightsRequired, ShardFormatError
from ort_delayed.loader.layers import LayerGroup, group_tensors
from ort_delayed.loader.mapping import FileRange, StreamedLayerGroup, map_group, ranges_of
from ort_delayed.loader.sources import DiscoveredWeights, discover_weights, local_source
from ort_delayed.loader.tensor_on_disk import TensorOnDisk

PAGE = 4096
FLOAT32, UINT8 = ELEMENT_TYPES[0], ELEMENT_TYPES[1]


def one_group(found: DiscoveredWeights) -> LayerGroup:
    (group,) = group_tensors(found.tensors, layers_per_group=10**6)
    return group


def mapped(source: Path) -> StreamedLayerGroup:
    """Everything in ``source`` as one group."""
    found = discover_weights(local_source(source))
    return map_group(one_group(found), identities=found.identities, within=found.within)


def mapped_files(directory: Path) -> int:
    """How many mappings of files below ``directory`` this process has."""
    return Path("/proc/self/maps").read_text().count(str(directory))


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc/self")


# The bytes


def test_every_type_arrives_bit_for_bit(tmp_path: Path) -> None:
    types = [name for name, dtype in SAFETENSORS_NAMES.items() if library_knows(dtype)]
    # The file's header shifts everything to odd offsets, so multi-byte items are not aligned.
    arrays = {"pad": bits("int8", (1,)), **{n: bits(n, (3, 5), i) for i, n in enumerate(types)}}
    arrays |= {"scalar": bits("float64", ()), "empty": bits("float16", (0, 7))}
    with mapped(save_safetensors(tmp_path / "m.safetensors", arrays)) as group:
        assert set(group.tensors) == set(arrays)
        for name, array in arrays.items():
            view = group.tensors[name]
            assert (view.dtype, view.shape) == (array.dtype, array.shape)
            assert view.tobytes() == array.tobytes()
            assert not view.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                view[...] = 0
        assert group.tensors["bfloat16"].dtype == ml_dtypes.bfloat16
        del view


def test_packed_types_are_their_bytes(tmp_path: Path) -> None:
    header = {"p": entry(0, 6, [3, 4], "F4"), "none": entry(6, 6, [0, 2], "F4")}
    with mapped(raw_safetensors(tmp_path / "m.safetensors", header, b"abcdef")) as group:
        assert group.tensors["p"].dtype == np.uint8
        assert group.tensors["p"].tobytes() == b"abcdef"
        assert group.tensors["none"].shape == (0,)
        assert {r.name: r.shape for r in group.records} == {"p": (3, 4), "none": (0, 2)}


def test_tensors_in_several_files_and_far_apart(tmp_path: Path) -> None:
    path = save_safetensors(tmp_path / "1.safetensors", {f"a{i}": bits("uint8", (PAGE * 3 + i,), i) for i in range(4)})
    save_safetensors(tmp_path / "2.safetensors", {"b": bits("int16", (7,), 9)})
    found = discover_weights(local_source(tmp_path))
    some = [t for t in found.tensors if t.name in ("a0", "a3", "b")]
    (group,) = group_tensors(some, 9)
    with map_group(group, identities=found.identities, within=found.within) as streamed:
        for t in some:
            assert streamed.tensors[t.name].tobytes() == Path(t.path).read_bytes()[t.offset : t.end]
    assert path.exists()


@needs_proc
def test_a_tensor_past_4_gib_in_a_sparse_file(tmp_path: Path) -> None:
    path = tmp_path / "w.bin"
    with path.open("wb") as file:
        file.seek(5 << 30)
        file.write(b"past four gigabytes")
    tensor = TensorOnDisk("t", str(path), (5 << 30) + 5, 4, (4,), UINT8)
    (group,) = group_tensors([tensor])
    with map_group(group, identities={str(path): mapping.FileIdentity.of(str(path))}) as streamed:
        assert streamed.tensors["t"].tobytes() == b"four"


def test_two_names_for_the_same_bytes(tmp_path: Path) -> None:
    array = bits("float32", (4,))
    with mapped(save_safetensors(tmp_path / "m.safetensors", {"a": array}, {"tied": "a"})) as group:
        assert group.tensors["tied"].tobytes() == group.tensors["a"].tobytes() == array.tobytes()


def test_names_are_in_natural_order(tmp_path: Path) -> None:
    arrays: dict[str, Array] = {n: bits("int8", (1,)) for n in ("layers.0.w10", "layers.0.w9", "layers.0.b")}
    with mapped(save_safetensors(tmp_path / "m.safetensors", arrays)) as group:
        assert group.name == "layer-0000"
        assert list(group.tensors) == ["layers.0.b", "layers.0.w9", "layers.0.w10"]
        assert group.spec.tensor_names == tuple(group.tensors)


# The ranges


def tensor(path: str, offset: int, nbytes: int) -> TensorOnDisk:
    return TensorOnDisk(f"{path}@{offset}", path, offset, nbytes, (nbytes,), UINT8)


def test_whole_pages_are_mapped_and_neighbours_joined() -> None:
    tensors = [tensor("/b", 10, 5), tensor("/a", 3 * PAGE - 1, 2), tensor("/a", 0, 1), tensor("/a", 9 * PAGE, PAGE)]
    assert ranges_of(tensors) == (
        FileRange("/a", 0, PAGE),
        FileRange("/a", 2 * PAGE, 4 * PAGE),
        FileRange("/a", 9 * PAGE, 10 * PAGE),
        FileRange("/b", 0, PAGE),
    )
    touching = [tensor("/a", 0, PAGE), tensor("/a", PAGE, 1), tensor("/a", 5, 3)]
    assert ranges_of(touching) == (FileRange("/a", 0, 2 * PAGE),)
    assert sum(r.nbytes for r in ranges_of(touching)) == 2 * PAGE


def test_empty_tensors_take_no_mapping() -> None:
    assert ranges_of([tensor("/a", 5, 0)]) == ()


def test_very_many_stretches_are_joined_over_small_gaps() -> None:
    scattered = [tensor("/a", i * 20 * PAGE, PAGE) for i in range(2000)]
    ranges = ranges_of([*scattered, tensor("/a", 10**9, 1)])
    assert len(ranges) <= 256
    assert ranges[-1].start > 9 * 10**8
    for t in scattered:
        assert any(r.start <= t.offset and t.end <= r.end for r in ranges)


def test_very_many_files_stay_apart() -> None:
    assert len(ranges_of([tensor(f"/{i}", 0, 1) for i in range(400)])) == 400


@needs_proc
def test_a_group_of_thousands_of_scattered_tensors_takes_few_descriptors(tmp_path: Path) -> None:
    path = tmp_path / "w.bin"
    path.touch()
    os.truncate(path, 3000 * 20 * PAGE)
    identities = {str(path): mapping.FileIdentity.of(str(path))}
    (group,) = group_tensors([tensor(str(path), i * 20 * PAGE, 8) for i in range(3000)], 10**6)
    before = len(os.listdir("/proc/self/fd"))
    with map_group(group, identities=identities) as streamed:
        assert len(os.listdir("/proc/self/fd")) - before <= 256
        assert len(streamed.tensors) == 3000
    assert len(os.listdir("/proc/self/fd")) == before


# Before mapping


def test_a_changed_file_is_not_mapped(tmp_path: Path) -> None:
    path = save_safetensors(tmp_path / "m.safetensors", {"a": bits("int8", (9,))})
    found = discover_weights(local_source(path))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ShardFormatError, match="changed after it was discovered"):
        map_group(one_group(found), identities=found.identities)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="not there any more"):
        map_group(one_group(found), identities=found.identities)


def test_a_range_behind_the_files_end_is_not_mapped(tmp_path: Path) -> None:
    path = save_safetensors(tmp_path / "m.safetensors", {"a": bits("int8", (9,))})
    found = discover_weights(local_source(path))
    (group,) = group_tensors([replace(found.tensors[0], nbytes=10**6, shape=(10**6,))])
    with pytest.raises(ShardFormatError, match=r"tensor 'a' needs 1000000 bytes at offset .* of '.*', which has"):
        map_group(group, identities=found.identities)


def test_a_file_that_leads_outside_meanwhile_is_not_mapped(tmp_path: Path) -> None:
    path = save_safetensors(tmp_path / "m" / "m.safetensors", {"a": bits("int8", (9,))})
    found = discover_weights(local_source(path.parent))
    path.rename(tmp_path / "outside.safetensors")
    path.symlink_to("../outside.safetensors")
    with pytest.raises(LocalWeightsRequired, match="outside the artifact directory"):
        map_group(one_group(found), identities=found.identities, within=found.within)


@needs_proc
def test_a_failure_half_way_leaves_no_mapping(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "1.safetensors", {"a": bits("int8", (9,))})
    path = save_safetensors(tmp_path / "2.safetensors", {"b": bits("int8", (9,))})
    found = discover_weights(local_source(tmp_path))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        map_group(one_group(found), identities=found.identities)
    assert mapped_files(tmp_path) == 0


@needs_proc
def test_a_failure_while_views_are_made_leaves_no_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_safetensors(tmp_path / "1.safetensors", {"a": bits("int8", (9,)), "b": bits("int8", (9,))})
    made: list[int] = []
    real = np.frombuffer

    def second_fails(*args: Any) -> Any:
        made.append(1)
        if len(made) == 2:
            raise MemoryError("no more arrays")
        return real(*args)

    monkeypatch.setattr(mapping.np, "frombuffer", second_fails)
    with pytest.raises(MemoryError, match="no more arrays") as caught:
        mapped(path)
    assert len(made) == 2
    del caught
    gc.collect()
    assert mapped_files(tmp_path) == 0


# Releasing


@needs_proc
def test_a_released_group_leaves_nothing(tmp_path: Path) -> None:
    path = save_safetensors(tmp_path / "m.safetensors", {"a": bits("uint8", (9,))})
    descriptors = len(os.listdir("/proc/self/fd"))
    group = mapped(path)
    assert mapped_files(tmp_path) == 1
    assert not group.released
    proxy = group.tensors
    group.release()
    assert group.released
    assert mapped_files(tmp_path) == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert dict(proxy) == {}
    with pytest.raises(RuntimeError, match="layer group 'a' has been released"):
        group.tensors  # noqa: B018
    group.release()


def test_the_mapping_of_tensors_cannot_be_changed(tmp_path: Path) -> None:
    group = mapped(save_safetensors(tmp_path / "m.safetensors", {"a": bits("uint8", (9,))}))
    with pytest.raises(TypeError):
        group.tensors["a"] = 3  # type: ignore[index]
    group.release()


def closure(view: Array) -> Callable[[], Array]:
    return lambda: view


HOLDERS = {
    "the view": lambda v: v,
    "a slice": lambda v: v[1:3],
    "a reshape": lambda v: v.reshape(4, 2),
    "a memoryview": memoryview,
    "a memoryview of a slice": lambda v: memoryview(v[2:]),
    "an ml_dtypes view": lambda v: v.view(ml_dtypes.float8_e4m3fn),
    "dlpack": lambda v: np.from_dlpack(v),
    "a closure": closure,
    "an attribute": lambda v: type("Layer", (), {"w": v})(),
    "frombuffer": lambda v: np.frombuffer(v, np.uint8),
}


@needs_proc
@pytest.mark.parametrize("holder", HOLDERS)
def test_whoever_holds_a_view_is_told(tmp_path: Path, holder: str) -> None:
    array = bits("uint8", (8,), 4)
    group = mapped(save_safetensors(tmp_path / "m.safetensors", {"a": array}))
    held = HOLDERS[holder](group.tensors["a"])
    with pytest.raises(BufferReleaseError, match=r"views of layer group 'a' are still held.* copy what is needed"):
        group.release()
    assert not group.released
    with pytest.raises(RuntimeError, match="has been released"):
        group.tensors  # noqa: B018
    if isinstance(held, np.ndarray):
        assert held.tobytes() in array.tobytes()
    del held
    gc.collect()
    group.release()
    assert group.released
    assert mapped_files(tmp_path) == 0


def test_the_message_names_what_is_held(tmp_path: Path) -> None:
    arrays = {f"layers.0.w{i}": bits("uint8", (8,), i) for i in range(9)}
    group = mapped(save_safetensors(tmp_path / "m.safetensors", arrays))
    held = [group.tensors["layers.0.w4"][1:]]
    with pytest.raises(BufferReleaseError, match=r"still held \(of 'layers.0.w4'\): copy"):
        group.release()
    del held
    group.release()
    group = mapped(tmp_path / "m.safetensors")
    held = [v[1:] for v in group.tensors.values()]
    with pytest.raises(BufferReleaseError, match=r"\(of 'layers.0.w0', 'layers.0.w1', 'layers.0.w2' and 6 more\)"):
        group.release()
    del held
    group.release()


def test_a_copy_is_nobodys_view(tmp_path: Path) -> None:
    array = bits("float32", (8,))
    with mapped(save_safetensors(tmp_path / "m.safetensors", {"a": array})) as group:
        copies = [np.array(group.tensors["a"], copy=True), group.tensors["a"].tobytes(), group.tensors["a"][1:] * 1]
    assert group.released
    assert copies[1] == array.tobytes()


def test_a_reference_cycle_that_the_collector_clears_is_no_offence(tmp_path: Path) -> None:
    group = mapped(save_safetensors(tmp_path / "m.safetensors", {"a": bits("uint8", (8,))}))
    gc.disable()
    try:
        cycle: list[object] = [group.tensors["a"]]
        cycle.append(cycle)
        del cycle
        group.release()
    finally:
        gc.enable()
    assert group.released


@needs_proc
def test_pages_are_given_back_even_where_a_view_is_held(tmp_path: Path) -> None:
    path = save_safetensors(tmp_path / "m.safetensors", {"a": bits("uint8", (64 * PAGE,))})
    group = mapped(path)
    view = group.tensors["a"]
    assert int(view.sum()) > 0
    assert resident_kib(tmp_path) >= 64 * PAGE >> 10
    with pytest.raises(BufferReleaseError):
        group.release()
    assert resident_kib(tmp_path) == 0
    assert view.tobytes() == path.read_bytes()[-64 * PAGE :]
    del view
    group.release()


def resident_kib(directory: Path) -> int:
    """Resident KiB of this process's mappings of files below ``directory``."""
    total, counting = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            counting = str(directory) in line
        elif counting and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@needs_proc
def test_tensors_of_two_groups_on_one_page(tmp_path: Path) -> None:
    arrays = {f"layers.{i}.w": bits("uint8", (1000,), i) for i in range(6)}
    found = discover_weights(local_source(save_onnx(tmp_path / "m.onnx", arrays)))
    groups = group_tensors(found.tensors)
    first = map_group(groups[0], identities=found.identities)
    second = map_group(groups[1], identities=found.identities)
    assert first.tensors["layers.0.w"].tobytes() == arrays["layers.0.w"].tobytes()
    assert second.tensors["layers.1.w"].tobytes() == arrays["layers.1.w"].tobytes()
    first.release()
    assert second.tensors["layers.1.w"].tobytes() == arrays["layers.1.w"].tobytes()
    second.release()


# Behind a failure


@needs_proc
def test_an_abandoned_group_closes_with_its_last_view(tmp_path: Path) -> None:
    group = mapped(save_safetensors(tmp_path / "m.safetensors", {"a": bits("uint8", (64 * PAGE,))}))
    view = group.tensors["a"]
    assert int(view.sum()) > 0
    error = KeyError("mine")
    group.abandon(error)
    assert error.__notes__ == [
        "Views of layer group 'a' are still held (of 'a'), by this traceback or elsewhere. Their memory has been given "
        "back; the mapping closes when the last view is gone."
    ]
    assert resident_kib(tmp_path) == 0
    assert mapped_files(tmp_path) == 1
    del view
    assert mapped_files(tmp_path) == 0


def test_an_abandoned_group_without_views_leaves_no_note(tmp_path: Path) -> None:
    group = mapped(save_safetensors(tmp_path / "m.safetensors", {"a": bits("uint8", (8,))}))
    error = KeyError("mine")
    group.abandon(error)
    assert not hasattr(error, "__notes__")
    assert group.released


def test_the_context_manager_does_not_replace_an_exception(tmp_path: Path) -> None:
    path = save_safetensors(tmp_path / "m.safetensors", {"a": bits("uint8", (8,))})

    def fail() -> None:
        with mapped(path) as group:
            view = group.tensors["a"]
            raise KeyError(view.shape)

    with pytest.raises(KeyError) as caught:
        fail()
    assert len(caught.value.__notes__) == 1
