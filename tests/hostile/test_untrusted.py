"""Models written by somebody who means harm. docs/untrusted_models.md is the threat model that these tests hold up.

Attributes and declarations: tests/ort_delayed/test_construction_failures.py. Random bytes: the fuzzing tests here.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from checkpoints import save_safetensors
from delayed_models import FLOAT, delayed, function, model, node, output_only, save, single_weight, value, write
from onnx import TensorProto, helper
from subprocesses import run_snippet

import ort_delayed
from ort_delayed import DelayedInitializerError
from ort_delayed.loader.external_data import ExternalDataError
from ort_delayed.loader.files import NotARegularFileError, OutsideDirectoryError, confining_directories, open_weights
from ort_delayed.ops import kernel

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc, or needs a budget")
posix = pytest.mark.skipif(sys.platform == "win32", reason="links and FIFOs")
INSIDE, OUTSIDE = np.full(9, 1, np.float32), np.full(9, 7, np.float32)


def yielded(path: str, **settings: object) -> np.ndarray:
    return ort_delayed.InferenceSession(path, enable_fallback=0, **settings).run(None, {})[0]


# --- links at every level ---------------------------------------------------------------------------------------------


def tree(tmp_path: Path, file: str) -> tuple[Path, Path]:
    """``inside/a/b/c/FILE`` and the same below ``outside``."""
    for name, content in (("inside", INSIDE), ("outside", OUTSIDE)):
        write(tmp_path / name / "a" / "b" / "c" / file, content)
    return tmp_path / "inside", tmp_path / "outside"


def lead_out(inside: Path, outside: Path, level: str) -> None:
    """Put a link that leads outside in the place of what stands at ``level`` below ``inside``."""
    target = inside / level
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink()
    target.symlink_to(outside / level)


LEVELS = ["a", "a/b", "a/b/c", "a/b/c/w.bin"]


@posix
@pytest.mark.parametrize("mode", ["file", "cpu"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_link_out_of_weights_dir_at_any_level(level: str, mode: str, tmp_path: Path) -> None:
    inside, outside = tree(tmp_path, "w.bin")
    path = save(inside / "m.onnx", output_only([9], filename="a/b/c/w.bin", load_device=mode))
    assert np.array_equal(yielded(path, weights_dir=inside), INSIDE)
    lead_out(inside, outside, level)
    with pytest.raises(PermissionError, match="outside") as caught:
        yielded(path, weights_dir=inside)
    assert isinstance(caught.value, DelayedInitializerError)


def external_model(location: str) -> onnx.ModelProto:
    """A delayed node, so that the model is prepared, and an initializer in another file."""
    tensor = TensorProto(name="v", data_type=FLOAT, dims=[9], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return model(
        [delayed("w", [9], "own.bin"), node("Add", ["w", "v"], ["y"])],
        [],
        [value("y", [9])],
        initializers=[tensor],
    )


@posix
@pytest.mark.parametrize("level", [*LEVELS, "..", "absolute"])
def test_external_data_that_leads_out_of_the_models_directory(level: str, tmp_path: Path) -> None:
    inside, outside = tree(tmp_path, "w.bin")
    write(inside / "own.bin", np.zeros(9, np.float32))
    assert np.array_equal(yielded(save(inside / "m.onnx", external_model("a/b/c/w.bin"))), INSIDE)
    location = "a/b/c/w.bin"
    if level == "..":
        location = "../outside/a/b/c/w.bin"
    elif level == "absolute":
        location = str(outside / location)
    else:
        lead_out(inside, outside, level)
    path = save(inside / "m.onnx", external_model(location))
    budgeted: list[dict[str, object]] = [{"ram_budget": 64 << 20}] if sys.platform == "linux" else []
    for settings in ({}, {"weights_dir": inside}, *budgeted):
        with pytest.raises(ExternalDataError, match="must stand below"):
            yielded(path, **settings)
    with pytest.raises(ExternalDataError, match="must stand below"):
        ort_delayed.prepare_model(path, onnxruntime.SessionOptions())
    with pytest.raises(Exception, match=r"outside|below"):
        ort_delayed.pack_model(path, inside / "packed.onnx")
    assert not (inside / "packed.onnx").exists()
    # Converting and restoring follow what the model says, so that is what to look at before.
    from ort_delayed.checking import check_weights

    faults = check_weights(path).faults
    assert any("outside" in fault for fault in faults), faults


@posix
@pytest.mark.parametrize("level", ["a", "a/b", "a/b/c", "a/b/c/w.safetensors"])
def test_a_shard_that_leads_out_at_any_level(level: str, tmp_path: Path) -> None:
    inside, outside = tree(tmp_path, "w.safetensors")
    for top in (inside, outside):
        save_safetensors(top / "a/b/c/w.safetensors", {"w": INSIDE})
    (inside / "model.safetensors.index.json").write_text('{"weight_map": {"w": "a/b/c/w.safetensors"}}')
    loader = ort_delayed.StreamingWeightLoader(inside, ram_budget=64 << 20)
    assert loader.layer_groups
    lead_out(inside, outside, level)
    with pytest.raises(ort_delayed.LocalWeightsRequired, match="outside"):  # discovered before, streamed after
        loader.stream(lambda group: None)
    with pytest.raises(ort_delayed.LocalWeightsRequired, match="outside"):
        ort_delayed.StreamingWeightLoader(inside, ram_budget=64 << 20).stream(lambda group: None)


# --- what is swapped between the check and the opening ----------------------------------------------------------------


@contextmanager
def swapping(step: Callable[[int], None]) -> Iterator[None]:
    stop, failed = threading.Event(), []

    def work() -> None:
        turn = 0
        try:
            while not stop.is_set():
                step(turn)
                turn += 1
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # else Python's threads take turns of 5 ms, and nothing races
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failed, failed


def put_link(link: Path, target: str) -> None:
    new = link.with_name("new link")
    new.symlink_to(target)
    new.rename(link)  # at once: there always is one


@linux
@pytest.mark.parametrize("level", ["file", "directory"])
def test_a_link_that_is_swapped_all_the_time(level: str, tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    write(inside / "real" / "w.bin", INSIDE)
    write(outside / "w.bin", OUTSIDE)
    link, good, bad = (
        (inside / "w.bin", "real/w.bin", "../outside/w.bin")
        if level == "file"
        else (inside / "sub", "real", "../outside")
    )
    link.symlink_to(good)
    path = str(link if level == "file" else link / "w.bin")
    within = confining_directories(str(inside))
    made = output_only([9], filename=os.path.relpath(path, inside))
    session = ort_delayed.InferenceSession(save(inside / "m.onnx", made), weights_dir=inside)
    opened = refused = 0
    with swapping(lambda turn: put_link(link, (good, bad)[turn % 2])):
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            try:
                if (opened + refused) % 4:
                    fd = open_weights(path, within=within)
                    try:
                        assert os.read(fd, 100) == INSIDE.tobytes()
                    finally:
                        os.close(fd)
                else:
                    assert np.array_equal(session.run(None, {})[0], INSIDE)
                opened += 1
            except PermissionError:
                refused += 1
    assert opened > 20
    assert refused > 20


@posix
@pytest.mark.parametrize("confined", [False, True])
def test_a_fifo_that_comes_and_goes_blocks_nobody(confined: bool, tmp_path: Path) -> None:
    write(tmp_path / "regular", INSIDE)
    os.mkfifo(tmp_path / "fifo")
    path = tmp_path / "w.bin"
    os.link(tmp_path / "regular", path)
    within = confining_directories(str(tmp_path)) if confined else None

    def swap(turn: int) -> None:
        os.link(tmp_path / ("fifo", "regular")[turn % 2], tmp_path / "new")
        os.rename(tmp_path / "new", path)

    opened = refused = 0
    with swapping(swap):
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            try:
                fd = open_weights(str(path), within=within)
            except NotARegularFileError:
                refused += 1
                continue
            assert os.read(fd, 100) == INSIDE.tobytes()
            os.close(fd)
            opened += 1
    assert opened > 20
    assert refused > 20


# --- files that are none ----------------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("mode", ["file", "cpu"])
@pytest.mark.parametrize("path", ["/proc/self/environ", "/proc/self/mem", "/proc/self/maps", "/proc/kmsg"])
def test_files_that_are_made_when_they_are_read(path: str, mode: str, tmp_path: Path) -> None:
    """They say that they hold nothing, and are not asked for more: even without weights_dir."""
    offset = 0 if path != "/proc/self/mem" else np.ones(100).ctypes.data
    made = output_only([16], dtype=TensorProto.UINT8, filename=path, offset=offset, load_device=mode)
    with pytest.raises(DelayedInitializerError) as caught:
        yielded(save(tmp_path / "m.onnx", made))
    assert isinstance(caught.value, (EOFError, PermissionError))
    with pytest.raises(PermissionError):
        yielded(save(tmp_path / "m.onnx", made), weights_dir=tmp_path)


@posix
@pytest.mark.parametrize("mode", ["file", "cpu"])
@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/dev/urandom", "/dev/stdin", "/dev/fd/0", "/dev/tty"])
def test_devices(path: str, mode: str, tmp_path: Path) -> None:
    if not os.path.exists(path):
        pytest.skip("no such device here")
    made = output_only([16], dtype=TensorProto.UINT8, filename=path, load_device=mode)
    with pytest.raises((DelayedInitializerError, OSError)) as caught:
        yielded(save(tmp_path / "m.onnx", made))
    assert isinstance(caught.value, DelayedInitializerError)


SPARSE = """
import os, resource
import numpy as np, ort_delayed
from delayed_models import output_only, save
from pathlib import Path
directory = Path(sys.argv[1])
with open(directory / "w.bin", "wb") as file:
    try:
        file.truncate(1 << 40)
    except OSError:
        print("too large")
        os._exit(0)
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
for mode in ("cpu", "file"):
    path = save(directory / "m.onnx", output_only([1 << 38], load_device=mode))
    settings = [{}, {"ram_budget": 64 << 20}] if sys.platform == "linux" else [{}]
    for given in settings:
        try:
            ort_delayed.InferenceSession(path, enable_fallback=0, **given).run(None, {})
            raise SystemExit("it ran")
        except (MemoryError, ort_delayed.RamBudgetExceeded) as error:
            print(type(error).__name__, error)
    # Its last bytes are as good as any.
    path = save(directory / "m.onnx", output_only([4], offset=(1 << 40) - 16, load_device=mode))
    assert not ort_delayed.InferenceSession(path).run(None, {})[0].any()
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, "MiB")
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 600 << 10
"""


@linux
def test_a_sparse_file_of_a_terabyte(tmp_path: Path) -> None:
    """What it claims it has; what it does not have is memory for it, and that is said before any is taken."""
    if "too large" in run_snippet(SPARSE, tmp_path):
        pytest.skip("this file system has no such files")


# --- graphs -----------------------------------------------------------------------------------------------------------


def time_of(count: int, tmp_path: Path) -> float:
    """Seconds to construct a session of so many nodes and to run it."""
    nodes = [delayed(f"w{i}", [1], offset=4 * (i % 9)) for i in range(count)]
    nodes.append(node("Sum", [f"w{i}" for i in range(count)], ["y"]))
    path = save(tmp_path / "m.onnx", model(nodes, [], [value("y", [1])]))
    began = time.perf_counter()
    assert yielded(path).tolist() == [count]
    return time.perf_counter() - began


def test_thousands_of_nodes_take_time_in_proportion(tmp_path: Path) -> None:
    write(tmp_path / "w.bin", INSIDE)
    time_of(10, tmp_path)
    few = min(time_of(300, tmp_path) for _ in range(2))
    many = time_of(2400, tmp_path)
    assert many < 8 * few * 4 + 2, f"300 nodes: {few:.2f} s, 2400 nodes: {many:.2f} s"


def prepared_handles(path: str) -> list[int]:
    """Handles of somebody else's session in this process."""
    before = set(kernel._table.entries)
    options = onnxruntime.SessionOptions()
    ort_delayed.prepare_model(path, options)
    _kept.append(options)
    return sorted(set(kernel._table.entries) - before)


_kept: list[onnxruntime.SessionOptions] = []


@pytest.mark.parametrize("place", ["graph", "branch", "loop", "function", "function that nobody calls"])
@pytest.mark.parametrize("waits", [False, True])
def test_a_stolen_handle_is_refused_wherever_it_stands(place: str, waits: bool, tmp_path: Path) -> None:
    """Even one that is right. No model that this library takes has any."""
    write(tmp_path / "w.bin", INSIDE)
    (handle,) = prepared_handles(save(tmp_path / "victim.onnx", single_weight()))
    op_type = "DelayedInitializer_after_float32" if waits else "DelayedInitializer"
    forged = node(op_type, ["i"] if waits else [], ["w"], domain="ai.rt", **{kernel.HANDLE_ATTRIBUTE: handle})
    one = helper.make_tensor("i", TensorProto.INT64, [], [1])
    yes = helper.make_tensor("c", TensorProto.BOOL, [], [True])
    outputs, functions, nodes = [value("y", None)], [], [forged, node("Identity", ["w"], ["y"])]
    if place == "branch":
        body = helper.make_graph([forged, node("Identity", ["w"], ["o"])], "b", [], [value("o", None)])
        nodes = [node("If", ["c"], ["y"], then_branch=body, else_branch=body)]
    elif place == "loop":
        body = helper.make_graph(
            [forged, node("Identity", ["go"], ["on"]), node("Identity", ["w"], ["n"])],
            "b",
            [value("t", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("s", None)],
            [value("on", [], TensorProto.BOOL), value("n", None)],
        )
        nodes = [node("Identity", ["v"], ["x"]), node("Loop", ["i", "", "x"], ["y"], body=body)]
    elif place.startswith("function"):
        inner = [node("Constant", [], ["i"], value=one)] if waits else []
        functions = [function("F", [], ["o"], [*inner, forged, node("Identity", ["w"], ["o"])])]
        nodes = [node("F", [], ["y"], domain="local")]
        if place.endswith("nobody calls"):
            nodes = [node("Identity", ["v"], ["y"])]
    made = model(
        nodes,
        [],
        outputs,
        initializers=[one, yes, helper.make_tensor("v", FLOAT, [1], [1.0])],
        functions=functions,
    )
    path = save(tmp_path / "m.onnx", made)
    for refused in (
        lambda: ort_delayed.InferenceSession(path, enable_fallback=0),
        lambda: ort_delayed.InferenceSession(made.SerializeToString(), enable_fallback=0),
        lambda: ort_delayed.prepare_model(path, onnxruntime.SessionOptions()),
    ):
        with pytest.raises(DelayedInitializerError, match="prepared"):
            refused()


def test_confinement_holds_when_links_are_put_in_later(tmp_path: Path) -> None:
    """For a session that exists; each run opens anew."""
    inside, outside = tree(tmp_path, "w.bin")
    path = save(inside / "m.onnx", output_only([9], filename="a/b/c/w.bin"))
    session = ort_delayed.InferenceSession(path, weights_dir=inside)
    assert np.array_equal(session.run(None, {})[0], INSIDE)
    lead_out(inside, outside, "a/b")
    with pytest.raises(PermissionError, match="outside"):
        session.run(None, {})
    with pytest.raises(OutsideDirectoryError):
        open_weights(str(inside / "a/b/c/w.bin"), within=confining_directories(str(inside)))
    (inside / "a" / "b").unlink()
    write(inside / "a" / "b" / "c" / "w.bin", 2 * INSIDE)
    assert np.array_equal(session.run(None, {})[0], 2 * INSIDE)
