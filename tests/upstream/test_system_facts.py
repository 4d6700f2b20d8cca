"""Facts about memory, mappings and lifetimes that the project depends on: of ONNX Runtime, its extensions, the kernel.

Each test says what to revisit when a release changes the fact.
"""

from __future__ import annotations

import gc
import mmap
import os
import sys
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from delayed_models import FLOAT, model, node, save, value, write
from onnx import TensorProto, helper
from subprocesses import run_snippet

Plain = onnxruntime.InferenceSession
VERSION = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
linux = pytest.mark.skipif(sys.platform != "linux", reason="what Linux does with pages of mappings")


# --- the Python custom op: what ends the process (see also test_facts.py) ---------------------------------------------

OP = """
import os, signal, sys, threading, time
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime_extensions import PyCustomOpDef, get_library_path, onnx_op
import numpy as np

class Late(Exception):
    pass

def late(*arguments):
    raise Late

signal.signal(signal.SIGALRM, late)

@onnx_op(op_type="up.stream::Slow", inputs=[], outputs=[PyCustomOpDef.dt_float])
def slow():
    # Every exception of its own is caught: what is raised comes in the frames around it.
    try:
        until = time.perf_counter() + 0.02
        while time.perf_counter() < until:
            pass
    except BaseException:
        pass
    return np.zeros(1, np.float32)

output = helper.make_tensor_value_info("y40", TensorProto.FLOAT, None)
nodes = [helper.make_node("Slow", [], [f"y{i}"], domain="up.stream") for i in range(41)]
opsets = [helper.make_opsetid("up.stream", 1), helper.make_opsetid("", 17)]
outputs = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(41)]
graph = helper.make_graph(nodes, "g", [], outputs)
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
options.register_custom_ops_library(get_library_path())
made = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
session = onnxruntime.InferenceSession(made, options, enable_fallback=0)
session.run(None, {})

def deep(frames):
    if frames:
        return deep(frames - 1)
    return session.run(None, {})
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no alarms")
def test_a_run_on_the_main_thread_can_die_of_a_signal_or_of_recursion_and_one_on_another_does_not() -> None:
    """Near the recursion limit it always does; of a signal only where it comes in the extension's own frame."""
    direct = """
for left in range(1, 40):
    try:
        deep(sys.getrecursionlimit() - len(__import__("inspect").stack()) - left)
    except RecursionError:
        pass
print("survived")
"""
    with pytest.raises(AssertionError) as ended:
        assert run_snippet(OP + direct) is None, (
            "a RecursionError in the frames of a Python op does not abort the process any more: "
            "ort_delayed/run_threads.py may not be needed, nor the warning in prepare_model"
        )
    assert "exit status -6" in str(ended.value), str(ended.value)
    beside = """
errors, over, alarms = [], False, 0
def work():
    global over
    try:
        session.run(None, {})
    except BaseException as error:
        errors.append(error)
    over = True

thread = threading.Thread(target=work)
thread.start()
while not over:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(1)
    except Late:
        alarms += 1
thread.join()
assert alarms > 3, alarms
assert not errors, errors
print("survived")
"""
    assert "survived" in run_snippet(OP + beside), (
        "a signal reaches ops on another thread than the main one: revisit ort_delayed/run_threads.py"
    )


# --- pages of file mappings -------------------------------------------------------------------------------------------


@linux
def test_pages_count_until_they_are_given_up_and_come_back_right(tmp_path: Path) -> None:
    from ort_delayed.loader import platform

    content = os.urandom(1 << 20) * 32
    (tmp_path / "w").write_bytes(content)
    with (tmp_path / "w").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        before = platform.resident_bytes()
        array = np.frombuffer(mapping, np.uint64)
        total = int(array.sum(dtype=np.uint64))
        touched = platform.resident_bytes()
        mapping.madvise(mmap.MADV_DONTNEED)
        given_up = platform.resident_bytes()
        again = int(array.sum(dtype=np.uint64))
        del array
    assert before is not None
    assert touched is not None
    assert given_up is not None
    revisit = "revisit loader/platform.py (give_back_pages, give_up_pages) and with it every budget"
    assert touched - before > 24 << 20, f"pages of a mapping do not count as resident: {revisit}"
    assert touched - given_up > 24 << 20, f"MADV_DONTNEED does not take pages of a file mapping out: {revisit}"
    assert again == total, f"given-up pages come back with other bytes: {revisit}"


@linux
def test_what_a_mapping_shows_of_a_file_that_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"a" * 3 * mmap.PAGESIZE)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    revisit = "revisit loader/mapped_ranges.py (MappedFiles), loader/mapping.py and docs/untrusted_models.md"
    with path.open("r+b") as file:
        file.write(b"b")
    assert mapping[:1] == b"b", f"a file rewritten in place does not show through its mapping: {revisit}"
    (tmp_path / "other").write_bytes(b"c" * 3 * mmap.PAGESIZE)
    (tmp_path / "other").rename(path)
    assert mapping[:1] == b"b", f"a file replaced by renaming shows through the old one's mapping: {revisit}"
    path.unlink()
    mapping.madvise(mmap.MADV_DONTNEED)
    assert mapping[:2] == b"ba", f"a removed file's mapping loses its bytes: {revisit}"
    mapping.close()


@linux
def test_a_truncated_file_kills_who_touches_its_mapping_and_a_read_comes_back_short(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"a" * 3 * mmap.PAGESIZE)
    with path.open("rb") as file:
        os.truncate(path, 5)
        assert os.pread(file.fileno(), 100, 0) == b"aaaaa", "reading a truncated file: revisit loader/reading.py"
        assert os.pread(file.fileno(), 100, mmap.PAGESIZE) == b""
    code = """
    import mmap, os
    with open(sys.argv[1], "r+b") as file:
        file.truncate(3 * mmap.PAGESIZE)
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        file.truncate(5)
    print("touching", flush=True)
    print(mapping[2 * mmap.PAGESIZE])
    """
    with pytest.raises(AssertionError, match="touching") as ended:
        assert run_snippet(code, path) is None, (
            "touching a mapping behind the end of a truncated file is harmless here: file payloads could be mapped "
            "instead of read (ops/payloads.py), and docs/untrusted_models.md says otherwise"
        )
    assert "exit status -7" in str(ended.value)


# --- weights that options supply --------------------------------------------------------------------------------------


def product(*, initializer: onnx.TensorProto) -> onnx.ModelProto:
    return model(
        [node("MatMul", ["x", "v"], ["y"])],
        [value("x", ["n", 3])],
        [value("y", ["n", 3])],
        initializers=[initializer],
    )


def test_a_plain_session_keeps_its_options_alive(tmp_path: Path) -> None:
    """What add_initializer was given, and a prepared model's payloads, live as long as the options do."""
    made = product(initializer=helper.make_tensor("v", FLOAT, [3, 3], [0.0] * 9))
    options = onnxruntime.SessionOptions()
    kept = np.eye(3, dtype=np.float32)
    values = onnxruntime.OrtValue.ortvalue_from_numpy(kept)
    options.add_initializer("v", values)
    gone: list[str] = []
    weakref.finalize(options, gone.append, "options")
    session = Plain(made.SerializeToString(), options)
    del options
    gc.collect()
    revisit = "revisit prepare_model, ort_delayed/installed_values.py: values would be freed under a session"
    assert not gone, f"a session does not keep its SessionOptions alive any more: {revisit}"
    x = np.ones((1, 3), np.float32)
    assert np.array_equal(session.run(None, {"x": x})[0], x)
    del session
    gc.collect()
    assert gone == ["options"], f"SessionOptions outlive their session: {revisit} too late"


def test_values_of_types_without_numpy_types_are_taken_by_their_number() -> None:
    bits = np.array([0x3F80, 0x4000], np.uint16)
    taken = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)
    revisit = "revisit ort_delayed/weight_copying.py"
    assert taken.element_type() == TensorProto.BFLOAT16, f"uint16 is not taken as bfloat16: {revisit}"
    assert taken.shape() == [2], f"bfloat16 has another shape than its uint16: {revisit}"
    with pytest.raises(Exception) as caught:
        onnxruntime.OrtValue.ortvalue_from_numpy(bits.view(ml_dtypes.bfloat16))
    assert caught.value, f"ml_dtypes arrays are taken as they are: {revisit}, it may be simpler"


def test_a_fused_initializer_keeps_the_models_own_value() -> None:
    """As folding does (test_facts.py): the bytes that are installed must be those that the model names."""
    ones, zeros = np.ones(1, np.float32), np.zeros(1, np.float32)
    batch = {"scale": ones, "bias": zeros, "mean": zeros, "variance": ones}
    own = helper.make_tensor("v", FLOAT, [1, 1, 1, 1], [1.0])
    initializers = [own, *(onnx.numpy_helper.from_array(a, n) for n, a in batch.items())]
    made = model(
        [node("Conv", ["x", "v"], ["c"]), node("BatchNormalization", ["c", *batch], ["y"], epsilon=0.0)],
        [value("x", [1, 1, 2, 2])],
        [value("y", [1, 1, 2, 2])],
        initializers=initializers,
    )
    options = onnxruntime.SessionOptions()
    installed = onnxruntime.OrtValue.ortvalue_from_numpy(np.full((1, 1, 1, 1), 10, np.float32))
    options.add_initializer("v", installed)
    (y,) = Plain(made.SerializeToString(), options).run(None, {"x": np.ones((1, 1, 2, 2), np.float32)})
    assert y.ravel().tolist() == [1] * 4, (
        "fusing Conv and BatchNormalization reads the installed OrtValue now: stream_install need not keep both the "
        "same bytes (ort_delayed/installing.py)"
    )


# --- external data ----------------------------------------------------------------------------------------------------


def external(**entries: str) -> onnx.TensorProto:
    tensor = TensorProto(name="v", data_type=FLOAT, dims=[3, 3], data_location=TensorProto.EXTERNAL)
    for key, text in entries.items():
        tensor.external_data.add(key=key, value=text)
    return tensor


@pytest.mark.parametrize("length", [{}, {"length": "0"}, {"length": "36"}])
def test_the_length_of_external_data_may_be_left_out(length: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "v.bin", 2 * np.eye(3, dtype=np.float32))
    path = save(tmp_path / "m.onnx", product(initializer=external(location="v.bin", **length)))
    x = np.ones((1, 3), np.float32)
    assert np.array_equal(Plain(path).run(None, {"x": x})[0], 2 * x), (
        "ONNX Runtime wants a length now: loader/external_data.py takes one that is absent or 0"
    )


def test_external_data_may_stand_in_a_safetensors_file(tmp_path: Path) -> None:
    from checkpoints import save_safetensors

    saved = save_safetensors(tmp_path / "v.safetensors", {"v": 2 * np.eye(3, dtype=np.float32)})
    offset = 8 + int.from_bytes(saved.read_bytes()[:8], "little")
    tensor = external(location="v.safetensors", offset=str(offset), length="36")
    x = np.ones((1, 3), np.float32)
    (y,) = Plain(save(tmp_path / "m.onnx", product(initializer=tensor))).run(None, {"x": x})
    assert np.array_equal(y, 2 * x), "ONNX Runtime takes no offset that is not aligned: loader/onnx_files.py"


@pytest.mark.skipif(VERSION < (1, 24), reason="1.23 does not look")
def test_the_file_of_external_data_must_exist_even_where_the_options_supply_the_value(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", product(initializer=external(location="v.bin")))
    options = onnxruntime.SessionOptions()
    supplied = onnxruntime.OrtValue.ortvalue_from_numpy(np.eye(3, dtype=np.float32))
    options.add_initializer("v", supplied)
    with pytest.raises(Exception) as caught:
        Plain(path, options, enable_fallback=0)
    assert caught.value, (
        "the file need not exist any more: ort_delayed/install_preparing.py could leave entries of other places alone"
    )


@pytest.mark.skipif(VERSION < (1, 24), reason="1.23 takes locations outside the model's directory")
def test_links_out_of_the_models_directory_are_refused_for_bytes(tmp_path: Path) -> None:
    write(tmp_path / "blobs" / "1", np.eye(3, dtype=np.float32))
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "v.bin").symlink_to("../blobs/1")
    data = product(initializer=external(location="v.bin")).SerializeToString()
    options = onnxruntime.SessionOptions()
    entry = "session.model_external_initializers_file_folder_path"
    options.add_session_config_entry(entry, str(tmp_path / "snapshot"))
    with pytest.raises(Exception) as caught:
        Plain(data, options, enable_fallback=0)
    assert caught.value, (
        "links may lead out of the directory of external data: repoint_external_data in "
        "ort_delayed/external_files.py may be simplified"
    )
