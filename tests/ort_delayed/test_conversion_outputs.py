"""Conversions write whole files or none, never touch the source, and need little memory."""

import errno
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from weighted_models import external, initializer, model, node, run_delayed, same_bits, save, value, weights

import ort_delayed
from ort_delayed import convert_model, new_files, restore_model
from ort_delayed.ops.attributes import is_delayed

N = 1100
X = {"x": weights(N, seed=9)}
TESTS = Path(__file__).parent.parent


def simple(seed=0):
    return model(
        [node("Add", ["x", "w"], ["y"])],
        [value("x", [N])],
        [value("y", [N])],
        [initializer("w", weights(N, seed=seed))],
    )


def data_files(directory):
    return sorted(name for name in os.listdir(directory) if re.fullmatch(r".*\.[0-9a-f]{12}\.weights", name))


# Overwriting


@pytest.mark.parametrize("operation", [convert_model, restore_model])
def test_a_destination_is_replaced_only_when_asked_to(tmp_path, operation):
    source = save(simple(), tmp_path / "m.onnx")
    (tmp_path / "there.onnx").write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        operation(source, tmp_path / "there.onnx")
    assert (tmp_path / "there.onnx").read_bytes() == b"precious"
    operation(source, tmp_path / "there.onnx", overwrite=True)
    assert onnx.load(tmp_path / "there.onnx").graph.name == "graph"


@pytest.mark.parametrize("operation", [convert_model, restore_model])
@pytest.mark.parametrize("name", ["m.onnx", "./m.onnx", "link.onnx", "sub/../m.onnx", "hard.onnx"])
def test_the_source_is_no_destination(tmp_path, operation, name):
    source = save(simple(), tmp_path / "m.onnx")
    os.symlink("m.onnx", tmp_path / "link.onnx")
    os.link(source, tmp_path / "hard.onnx")
    (tmp_path / "sub").mkdir()
    before = source.read_bytes()
    with pytest.raises(ValueError, match="are the same file"):
        operation(source, tmp_path / name, overwrite=True)
    assert source.read_bytes() == before


def test_a_data_file_of_the_source_is_no_destination(tmp_path):
    (tmp_path / "w.bin").write_bytes(weights(N).tobytes())
    made = simple()
    made.graph.initializer[0].CopyFrom(external("w", weights(N), "w.bin"))
    with pytest.raises(ValueError, match="that the source reads its weights from"):
        convert_model(save(made, tmp_path / "m.onnx"), tmp_path / "w.bin", overwrite=True)
    assert (tmp_path / "w.bin").read_bytes() == weights(N).tobytes()


def test_impossible_destinations_are_refused(tmp_path):
    source = save(simple(), tmp_path / "m.onnx")
    (tmp_path / "sub").mkdir()
    with pytest.raises(IsADirectoryError, match="name the model file"):
        convert_model(source, tmp_path / "sub", overwrite=True)
    with pytest.raises(FileNotFoundError, match="make it first"):
        convert_model(source, tmp_path / "nowhere" / "m.onnx")
    with pytest.raises(FileNotFoundError):
        convert_model(tmp_path / "nothing.onnx", tmp_path / "c.onnx")
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "sub"]


def test_overwriting_removes_the_old_data_file_and_no_other(tmp_path):
    old, new = save(simple(0), tmp_path / "old.onnx"), save(simple(1), tmp_path / "new.onnx")
    first = convert_model(old, tmp_path / "c.onnx")
    strangers = ["c.onnx.0123456789ab.weights", "other.onnx.0123456789ab.weights"]
    for name in strangers:
        (tmp_path / name).write_bytes(b"somebody's")
    second = convert_model(new, tmp_path / "c.onnx", overwrite=True)
    assert first.data_file != second.data_file
    assert data_files(tmp_path) == sorted([*strangers, os.path.basename(second.data_file)])
    assert same_bits(run_delayed(tmp_path / "c.onnx", X), [X["x"] + weights(N, seed=1)])


def test_a_session_never_reads_the_data_of_the_model_that_took_its_place(tmp_path):
    old, new = save(simple(0), tmp_path / "old.onnx"), save(simple(1), tmp_path / "new.onnx")
    convert_model(old, tmp_path / "c.onnx")
    session = ort_delayed.InferenceSession(str(tmp_path / "c.onnx"))
    convert_model(new, tmp_path / "c.onnx", overwrite=True)
    with pytest.raises(FileNotFoundError):
        session.run(None, X)
    convert_model(old, tmp_path / "c.onnx", overwrite=True)
    assert same_bits(session.run(None, X), [X["x"] + weights(N)])


def test_the_same_conversion_gives_the_same_files(tmp_path):
    source = save(simple(), tmp_path / "m.onnx")
    first = convert_model(source, tmp_path / "c.onnx")
    content = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    assert convert_model(source, tmp_path / "c.onnx", overwrite=True) == first
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == content


def test_data_that_the_source_reads_is_not_removed(tmp_path):
    """The source is a copy of the model that is overwritten, and shares its data file."""
    convert_model(save(simple(), tmp_path / "m.onnx"), tmp_path / "c.onnx")
    (tmp_path / "copy.onnx").write_bytes((tmp_path / "c.onnx").read_bytes())
    before = data_files(tmp_path)
    (tmp_path / "padded.onnx").write_bytes((tmp_path / "copy.onnx").read_bytes())
    convert_model(tmp_path / "copy.onnx", tmp_path / "c.onnx", overwrite=True)
    assert data_files(tmp_path) == before
    assert same_bits(run_delayed(tmp_path / "copy.onnx", X), run_delayed(tmp_path / "c.onnx", X))


def test_a_destination_that_appears_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    source = save(simple(), tmp_path / "m.onnx")
    flush = new_files.PendingFile.flush_to_disk

    def flush_and_be_late(self):
        flush(self)
        (tmp_path / "c.onnx").write_bytes(b"somebody was faster")

    monkeypatch.setattr(new_files.PendingFile, "flush_to_disk", flush_and_be_late)
    with pytest.raises(FileExistsError):
        convert_model(source, tmp_path / "c.onnx")
    assert sorted(os.listdir(tmp_path)) == ["c.onnx", "m.onnx"]
    assert (tmp_path / "c.onnx").read_bytes() == b"somebody was faster"


def test_an_interrupt_just_when_the_model_has_got_its_name_leaves_its_data(tmp_path, monkeypatch):
    link = os.link

    def link_and_interrupt(old, new):
        link(old, new)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", link_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert_model(save(simple(), tmp_path / "m.onnx"), tmp_path / "c.onnx")
    assert same_bits(run_delayed(tmp_path / "c.onnx", X), [X["x"] + weights(N)])
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".partial")]


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def no_links(old, new):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    source = save(simple(), tmp_path / "m.onnx")
    convert_model(source, tmp_path / "c.onnx")
    assert same_bits(run_delayed(tmp_path / "c.onnx", X), [X["x"] + weights(N)])
    with pytest.raises(FileExistsError):
        new_files._rename_to_free_name(str(source), str(tmp_path / "c.onnx"))


def test_a_source_that_changes_meanwhile_gives_no_destination(tmp_path, monkeypatch):
    source = save(simple(), tmp_path / "m.onnx")
    write = new_files.PendingDataFile.pad_to

    def change_and_write(self, offset):
        os.utime(source, ns=(1, 1))
        write(self, offset)

    monkeypatch.setattr(new_files.PendingDataFile, "pad_to", change_and_write)
    with pytest.raises(RuntimeError, match="was changed while it was being read"):
        convert_model(source, tmp_path / "c.onnx")
    assert os.listdir(tmp_path) == ["m.onnx"]


def test_new_files_have_the_mode_that_the_umask_gives(tmp_path):
    previous = os.umask(0o027)
    try:
        report = convert_model(save(simple(), tmp_path / "m.onnx"), tmp_path / "c.onnx")
    finally:
        os.umask(previous)
    assert {os.stat(p).st_mode & 0o777 for p in (report.destination, report.data_file)} == {0o640}


# Cut off


def filled(number):
    """Two weights that hold only ``number``, so that what a destination holds can be told."""
    full = np.full(5000, number, np.float32)
    nodes = [node("Add", ["x", "w0"], ["y0"]), node("Add", ["y0", "w1"], ["y"])]
    tensors = [initializer("w0", full), initializer("w1", full)]
    return model(nodes, [value("x", [5000])], [value("y", [5000])], tensors)


def cut_off(tmp_path, kind):
    for name, number in (("A", 0), ("B", 1)):
        save(filled(number), tmp_path / name)
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        # -P: not the script's directory, where a folder of tests is called ort_delayed too.
        [sys.executable, "-P", TESTS / "crashing_conversion.py", tmp_path, kind],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(t["intact"] for t in trials)
    return trials


def test_a_conversion_that_dies_at_any_step_leaves_no_destination_or_a_whole_one(tmp_path):
    trials = cut_off(tmp_path, "die")
    for overwrite in (False, True):
        ends = [t["held"] for t in trials if t["overwrite"] == overwrite]
        before = "A" if overwrite else "absent"
        # Every step was tried, and the new model came at one of them, at once.
        assert ends == [before] * ends.count(before) + ["B"] * ends.count("B")
        assert ends.count(before) > 6
        assert ends.count("B") > 2
        assert [t["code"] for t in trials if t["overwrite"] == overwrite] == [9] * (len(ends) - 1) + [100]


def test_a_conversion_on_a_full_disk_leaves_everything_as_it_was(tmp_path):
    trials = cut_off(tmp_path, "full")
    failed = [t for t in trials if t["code"] not in (0, 100)]
    assert len(failed) > 10
    for t in failed:
        assert t["code"] == errno.ENOSPC
        assert t["held"] == ("A" if t["overwrite"] else "absent")
        assert len(t["others"]) == t["overwrite"], t  # the data file of the old model
    # What comes after the model is in its place (tidying up) may fail without harm.
    assert {t["held"] for t in trials if t not in failed} == {"B"}
    assert len(trials) - len(failed) > 4


def test_a_conversion_killed_at_random_moments(tmp_path):
    trials = cut_off(tmp_path, "random")
    assert {t["held"] for t in trials if not t["overwrite"]} <= {"absent", "A", "B"}
    assert {t["held"] for t in trials if t["overwrite"]} <= {"A", "B"}


def test_a_limit_on_file_sizes(tmp_path):
    """The system's own refusal, at whatever write it comes."""
    save(filled(0), tmp_path / "A")
    script = (
        "import sys, resource\n"
        "from ort_delayed import convert_model\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))\n"
        "convert_model(sys.argv[1] + '/A', sys.argv[1] + '/c.onnx')\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 10000
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert "OSError" in done.stderr
    assert "File too large" in done.stderr
    assert os.listdir(tmp_path) == ["A"]


# Memory

MEASURE = """
import sys
from ort_delayed import convert_model, restore_model
directory, destination, copy = sys.argv[1:]
def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) << 10
operation = restore_model if destination.startswith("restored") else convert_model
settings = {} if operation is restore_model else {"copy": copy == "copy", "select": () if copy == "keep" else None}
source = "converted.onnx" if operation is restore_model else "m.onnx"
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status("VmRSS")
operation(f"{directory}/{source}", f"{directory}/{destination}", **settings)
print(status("VmHWM") - before)
"""


def peak(directory, destination, copy="reference"):
    """Bytes of resident memory that an operation needs at most, in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, directory, destination, copy], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def delimited_head(field, size):
    out = bytearray([field << 3 | 2])
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*out, size])


def write_inline_giant(path, sizes):
    """A model file with zeros as weights, of which the disk holds only the rest."""
    names = [f"w{i}" for i in range(len(sizes))]
    made = model(
        [node("Add", ["x", n], [n + "y"]) for n in names], [value("x", [1])], [value(n + "y", ["n"]) for n in names]
    )
    graph = made.graph.SerializeToString()
    made.ClearField("graph")
    heads = [
        onnx.TensorProto(name=n, data_type=1, dims=[size // 4]).SerializeToString() + delimited_head(9, size)
        for n, size in zip(names, sizes, strict=True)
    ]
    heads = [delimited_head(5, len(h) + size) + h for h, size in zip(heads, sizes, strict=True)]
    with path.open("wb") as file:
        total = len(graph) + sum(map(len, heads)) + sum(sizes)
        file.write(made.SerializeToString() + delimited_head(7, total) + graph)
        for head, size in zip(heads, sizes, strict=True):
            file.write(head)
            file.seek(size, os.SEEK_CUR)
        file.truncate()
    return path.stat().st_size


LIMIT = 32 << 20  # and the graph, which is a few hundred bytes here; pieces are smaller than a tensor


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's high-water mark")
def test_memory_of_converting_and_restoring_4_gib_of_external_data(tmp_path):
    made = model([node("Add", ["x", "w"], ["y"])], [value("x", [1])], [value("y", ["n"])])
    tensor = made.graph.initializer.add(name="w", data_type=1, data_location=1)
    tensor.external_data.add(key="location", value="w.bin")
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(4 << 30)
    tensor.dims.append(1 << 30)
    save(made, tmp_path / "m.onnx")
    assert peak(tmp_path, "converted.onnx") < LIMIT
    assert peak(tmp_path, "restored.onnx") < LIMIT
    # Copying takes time, and no more memory for more bytes.
    tensor.dims[0] >>= 2
    save(made, tmp_path / "m.onnx")
    assert peak(tmp_path, "copied.onnx", "copy") < LIMIT
    data = tmp_path / data_files(tmp_path)[0]
    assert data.stat().st_size == 1 << 30
    assert data.stat().st_blocks * 512 < 1 << 20  # what is sparse stays sparse


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's high-water mark")
@pytest.mark.parametrize("sizes", [[(1 << 31) - 10_000], [64 << 20] * 12], ids=["one of 2 GiB", "12 of 64 MiB"])
def test_memory_of_converting_an_inline_file(tmp_path, sizes):
    """Also of a file just under the 2 GiB that a protobuf message can hold."""
    size = write_inline_giant(tmp_path / "m.onnx", sizes)
    assert sum(sizes) < size < 1 << 31
    assert peak(tmp_path, "converted.onnx") < LIMIT
    graph = onnx.load(tmp_path / "converted.onnx", load_external_data=False).graph
    assert sum(map(is_delayed, graph.node)) == len(sizes)
    assert (tmp_path / data_files(tmp_path)[0]).stat().st_size >= sum(sizes)
    if len(sizes) == 1:
        # Weights that stay are streamed from model to model.
        assert peak(tmp_path, "kept.onnx", "keep") < LIMIT
        assert (tmp_path / "kept.onnx").stat().st_size == size
