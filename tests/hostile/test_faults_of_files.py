"""Weight files that change, go or fail in the middle of a run, of streaming, of a session's construction.

A run of a ``file`` session reads what its file held when the run opened it; one under a budget, and a streamed group,
compute on the mapping. Whatever happens: the right bytes or a typed error, and what comes afterwards works.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from budget_models import MIB, feed, plain, small_chain
from checkpoints import save_safetensors
from delayed_models import delayed, model, node, save, value, write
from subprocesses import run_snippet

import ort_delayed
from ort_delayed import DelayedInitializerError
from ort_delayed.budget_keeper import BudgetKeeper
from ort_delayed.loader import platform
from ort_delayed.loader.errors import ShardFormatError
from ort_delayed.loader.mapped_ranges import MappedFileChanged

LAYERS, SIDE = 8, 24
X = np.ones((2, SIDE), np.float32)
linux = pytest.mark.skipif(sys.platform != "linux", reason="a session keeps to a budget on Linux only")


def weights(factor: float = 1.0) -> np.ndarray:
    """One permutation per layer, scaled: products are exact."""
    rng = np.random.default_rng(3)
    return factor * np.stack([np.eye(SIDE, dtype=np.float32)[rng.permutation(SIDE)] for _ in range(LAYERS)])


def product(*factors: float) -> np.ndarray:
    """What the chain computes where layer i was read when the file held ``weights(factors[i])``."""
    y = X
    for layer, factor in zip(weights(), factors, strict=True):
        y = y @ (factor * layer)
    return y


ONE, TWO = product(*[1.0] * LAYERS), product(*[2.0] * LAYERS)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a chain of delayed products, in a directory of its own that can be renamed."""
    directory = tmp_path / "place"
    write(directory / "w.bin", weights())
    size = SIDE * SIDE * 4
    nodes = []
    for i in range(LAYERS):
        nodes.append(delayed(f"w{i}", [SIDE, SIDE], offset=i * size))
        nodes.append(
            node("MatMul", [f"h{i}" if i else "x", f"w{i}"], [f"h{i + 1}" if i + 1 < LAYERS else "y"], name=f"m{i}")
        )
    made = model(nodes, [value("x", ["n", SIDE])], [value("y", ["n", SIDE])])
    save(directory / "m.onnx", made)
    return directory


Act = Callable[[], object]


@pytest.fixture
def at_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Act], None]:
    """Has something happen right before the n-th read of a file, counted from 0."""
    original, due = platform.read_at, {}

    def read_at(fd: int, buffer: memoryview, offset: int) -> int:
        due["reads"] = due.get("reads", 0) + 1
        if due["reads"] - 1 == due["n"]:
            due["act"]()
        return original(fd, buffer, offset)

    def arrange(n: int, act: Act) -> None:
        due.update(n=n, act=act, reads=0)
        monkeypatch.setattr(platform, "read_at", read_at)

    return arrange


# --- a session in file mode -------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, 5 * SIDE * SIDE * 4 + 7)


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(weights(2).tobytes())


def replace(path: Path) -> None:
    write(path.with_name("new"), weights(2)).rename(path)


def unlink(path: Path) -> None:
    path.unlink()


def rename_directory(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


def replace_by_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


OLD = 3  # layers that have been read when it happens
MIXED = product(*[1.0] * OLD, *[2.0] * (LAYERS - OLD))
FAULTS: list[tuple[Callable[[Path], None], np.ndarray | type[Exception], np.ndarray | type[Exception]]] = [
    # what happens, what comes of this run, and of the next one
    (truncate, EOFError, EOFError),
    (rewrite, MIXED, TWO),
    (replace, ONE, TWO),
    (unlink, ONE, FileNotFoundError),
    (rename_directory, ONE, FileNotFoundError),
    (replace_by_a_fifo, ONE, OSError),
    (replace_by_a_directory, ONE, IsADirectoryError),
]


def outcome(session: onnxruntime.InferenceSession, expected: np.ndarray | type[Exception]) -> None:
    if isinstance(expected, np.ndarray):
        assert np.array_equal(session.run(None, {"x": X})[0], expected)
        return
    with pytest.raises(DelayedInitializerError) as caught:
        session.run(None, {"x": X})
    assert isinstance(caught.value, expected)
    assert "w.bin" in str(caught.value)


@pytest.mark.parametrize(("happens", "this_run", "next_run"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
@pytest.mark.parametrize("confined", [False, True])
def test_a_file_that_changes_in_the_middle_of_a_run(
    happens: Callable[[Path], None],
    this_run: np.ndarray | type[Exception],
    next_run: np.ndarray | type[Exception],
    confined: bool,
    place: Path,
    at_read: Callable[[int, Act], None],
) -> None:
    session = ort_delayed.InferenceSession(place / "m.onnx", weights_dir=place if confined else None)
    outcome(session, ONE)
    at_read(OLD, lambda: happens(place / "w.bin"))
    outcome(session, this_run)
    outcome(session, next_run)
    # It is put right again, and the session with it.
    shutil.rmtree(place, ignore_errors=True)
    write(place / "w.bin", weights())
    outcome(session, ONE)


def test_a_session_that_opens_its_file_at_every_node_sees_what_it_holds_then(
    place: Path, at_read: Callable[[int, Act], None]
) -> None:
    """Plain sessions, and parallel mode: of a file that is replaced meanwhile both take part."""
    options = onnxruntime.SessionOptions()
    plain_session = onnxruntime.InferenceSession(ort_delayed.prepare_model(place / "m.onnx", options), options)
    at_read(OLD, lambda: replace(place / "w.bin"))
    found = plain_session.run(None, {"x": X})[0]
    # The file was open already when the read began at which it was replaced.
    assert np.array_equal(found, product(*[1.0] * (OLD + 1), *[2.0] * (LAYERS - OLD - 1)))


UNREADABLE = """
import os
import numpy as np, ort_delayed
from ort_delayed.loader import platform
if os.getuid() == 0:  # root may read everything
    os.setgid(65534)
    os.setuid(65534)
place = sys.argv[1]
session = ort_delayed.InferenceSession(f"{place}/m.onnx")
original, reads = platform.read_at, 0
def read_at(*arguments):
    global reads
    reads += 1
    if reads == 3:
        os.chmod(f"{place}/w.bin", 0)
    return original(*arguments)
platform.read_at = read_at
expected = session.run(None, {"x": np.ones((2, 24), np.float32)})[0]
try:
    session.run(None, {"x": np.ones((2, 24), np.float32)})
    raise SystemExit("it was read")
except PermissionError as error:
    assert isinstance(error, ort_delayed.DelayedInitializerError) and "may not be read" in str(error), error
os.chmod(f"{place}/w.bin", 0o600)
assert np.array_equal(session.run(None, {"x": np.ones((2, 24), np.float32)})[0], expected)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no modes")
def test_a_file_that_becomes_unreadable_in_the_middle_of_a_run(place: Path) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as public:  # every user may enter it; pytest's own are private
        os.chmod(public, 0o777)
        for path in place.iterdir():
            shutil.copy(path, public)
            if os.getuid() == 0:
                os.chown(f"{public}/{path.name}", 65534, 65534)
        run_snippet(UNREADABLE, public)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EINTR, errno.EAGAIN, errno.ENOMEM, errno.EBADF])
@pytest.mark.parametrize("mode", ["file", "cpu"])
def test_errors_of_the_system_while_reading(
    code: int, mode: str, place: Path, at_read: Callable[[int, Act], None]
) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    if mode == "cpu":
        ort_delayed.convert_model(place / "m.onnx", place / "c.onnx")
        made = place / "cpu.onnx"
        import onnx

        proto = onnx.load(place / "m.onnx", load_external_data=False)
        for found in proto.graph.node:
            for attribute in found.attribute:
                if attribute.name == "load_device":
                    attribute.s = b"cpu"
        made.write_bytes(proto.SerializeToString())
        at_read(OLD + 1, fail)  # the first read is that of the model
        with pytest.raises(DelayedInitializerError) as caught:
            ort_delayed.InferenceSession(made, enable_fallback=0)
        outcome(ort_delayed.InferenceSession(made), ONE)
    else:
        session = ort_delayed.InferenceSession(place / "m.onnx")
        at_read(OLD, fail)
        with pytest.raises(DelayedInitializerError) as caught:
            session.run(None, {"x": X})
        outcome(session, ONE)
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == code
    assert os.strerror(code) in str(caught.value)


@pytest.mark.parametrize("most", [1, 7, 4096])
def test_short_reads(most: int, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = platform.read_at
    monkeypatch.setattr(platform, "read_at", lambda fd, buffer, offset: original(fd, buffer[:most], offset))
    outcome(ort_delayed.InferenceSession(place / "m.onnx"), ONE)


ALARMS = """
import os, signal, threading
import numpy as np, ort_delayed
from ort_delayed.loader.reading import read_into
alarms = 0
def count(*arguments):
    global alarms
    alarms += 1
signal.signal(signal.SIGALRM, count)
signal.siginterrupt(signal.SIGALRM, True)  # system calls are interrupted, and not restarted by the kernel
place = sys.argv[1]
session = ort_delayed.InferenceSession(f"{place}/m.onnx")
x = np.ones((2, 24), np.float32)
expected = session.run(None, {"x": x})[0]
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
for _ in range(60):
    assert np.array_equal(session.run(None, {"x": x})[0], expected)
    assert np.array_equal(ort_delayed.InferenceSession(f"{place}/m.onnx").run(None, {"x": x})[0], expected)
# A read that waits is what a signal really interrupts: a pipe takes the place of a slow disk.
reading, writing = os.pipe()
import ort_delayed.loader.platform as platform
platform.read_at = lambda fd, buffer, offset: os.readv(fd, [buffer])
threading.Timer(0.1, os.write, (writing, b"abcd")).start()
buffer = bytearray(4)
read_into(reading, memoryview(buffer), 0)
signal.setitimer(signal.ITIMER_REAL, 0)
assert buffer == b"abcd" and alarms > 50, (buffer, alarms)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no alarms")
def test_signals_that_interrupt_system_calls(place: Path) -> None:
    run_snippet(ALARMS, place)


# --- a session under a budget -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(small_chain(tmp_path_factory.mktemp("chain")))


@pytest.fixture
def copied(chain: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "place"
    directory.mkdir()
    for path in chain.parent.iterdir():
        shutil.copy(path, directory)
    return directory / chain.name


@pytest.fixture
def at_tick(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, Act], None]]:
    original, due = BudgetKeeper._on_tick, {}

    def on_tick(self: BudgetKeeper, group: int) -> None:
        due["ticks"] = due.get("ticks", 0) + 1
        if due["ticks"] - 1 == due.get("n"):
            due["act"]()
        original(self, group)

    # Before a session is made: its ops refer to the method through the keeper.
    monkeypatch.setattr(BudgetKeeper, "_on_tick", on_tick)
    return lambda n, act: due.update(n=n, act=act, ticks=0)


def data_file(path: Path) -> Path:
    return path.with_suffix(".bin")


def replace_by_zeros(path: Path) -> None:
    (path.parent / "new").write_bytes(bytes(path.stat().st_size))
    (path.parent / "new").rename(path)


@linux
@pytest.mark.parametrize("happens", [replace_by_zeros, unlink, rename_directory])
def test_under_a_budget_a_run_goes_on_with_what_it_has_mapped_and_the_next_is_refused(
    happens: Callable[[Path], None], copied: Path, at_tick: Callable[[int, Act], None]
) -> None:
    expected, feeds = plain(str(copied)), feed(str(copied))
    session = ort_delayed.InferenceSession(copied, ram_budget=40 * MIB)
    assert session.run(None, feeds)[0].tobytes() == expected
    at_tick(4, lambda: happens(data_file(copied)))
    assert session.run(None, feeds)[0].tobytes() == expected
    for _ in range(2):
        with pytest.raises(MappedFileChanged, match="construct the session again"):
            session.run(None, feeds)


@linux
def test_under_a_budget_a_file_that_comes_back_is_the_same_again(
    copied: Path, at_tick: Callable[[int, Act], None]
) -> None:
    expected, feeds = plain(str(copied)), feed(str(copied))
    session = ort_delayed.InferenceSession(copied, ram_budget=40 * MIB)
    at_tick(4, lambda: rename_directory(data_file(copied)))
    assert session.run(None, feeds)[0].tobytes() == expected
    with pytest.raises(MappedFileChanged):
        session.run(None, feeds)
    copied.parent.with_name("elsewhere").rename(copied.parent)
    assert session.run(None, feeds)[0].tobytes() == expected


@linux
@pytest.mark.parametrize("happens", ["unlink", "replace"])
def test_a_file_that_goes_while_a_session_under_a_budget_is_constructed(
    happens: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ort_delayed import paged_weights

    original = paged_weights.PagedWeights.adopt

    def adopt(self: Any, *arguments: Any) -> None:
        {"unlink": unlink, "replace": replace_by_zeros}[happens](data_file(copied))
        original(self, *arguments)

    monkeypatch.setattr(paged_weights.PagedWeights, "adopt", adopt)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MappedFileChanged):
        ort_delayed.InferenceSession(copied, ram_budget=40 * MIB)
    assert len(os.listdir("/proc/self/fd")) == descriptors


# --- a loader that streams --------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    arrays = {f"encoder.layer.{i}.weight": layer for i, layer in enumerate(weights())}
    (tmp_path / "place").mkdir()
    return save_safetensors(tmp_path / "place" / "model.safetensors", arrays)


def rewrite_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(file.read(8))
    os.utime(path, ns=(1, 1))


STREAMED: list[tuple[Callable[[Path], None], type[Exception]]] = [
    (unlink, FileNotFoundError),
    (rename_directory, FileNotFoundError),
    (replace_by_zeros, ShardFormatError),
    (rewrite_header, ShardFormatError),
    (replace_by_a_fifo, OSError),
    (replace_by_a_directory, OSError),
]


@pytest.mark.parametrize(("happens", "expected"), STREAMED, ids=[s[0].__name__ for s in STREAMED])
def test_a_shard_that_changes_while_its_group_is_with_the_callback(
    happens: Callable[[Path], None], expected: type[Exception], checkpoint: Path
) -> None:
    """The views of the moment stay right; the next group is refused, and nothing is left mapped."""
    arrays, seen = weights(), []

    def consumer(group: Any) -> None:
        if len(seen) == OLD:
            happens(checkpoint)
        (array,) = group.tensors.values()
        assert np.array_equal(array, arrays[len(seen)])
        seen.append(group)

    loader = ort_delayed.StreamingWeightLoader(checkpoint, ram_budget=64 << 20)
    assert len(loader.layer_groups) == LAYERS
    with pytest.raises(expected):
        loader.stream(consumer)
    assert len(seen) == OLD + 1
    assert all(group.released for group in seen)
    assert loader.last_report is not None
    assert loader.last_report.groups_loaded == OLD + 1


def test_a_shard_that_is_cut_between_two_groups(checkpoint: Path) -> None:
    loader = ort_delayed.StreamingWeightLoader(checkpoint, ram_budget=64 << 20)
    groups = loader.iter_layer_groups()
    next(groups).release()
    os.truncate(checkpoint, checkpoint.stat().st_size // 2)
    with pytest.raises(ShardFormatError, match="changed"):
        next(groups)


def test_signals_leave_streaming_and_its_budget_alone(checkpoint: Path) -> None:
    if not hasattr(signal, "setitimer"):
        pytest.skip("no alarms")
    alarms = []
    before = signal.signal(signal.SIGALRM, lambda *arguments: alarms.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        for _ in range(20):
            copies = {}
            loader = ort_delayed.StreamingWeightLoader(checkpoint, ram_budget=64 << 20)
            loader.stream(lambda group, into=copies: into.update({n: np.array(w) for n, w in group.tensors.items()}))
            assert all(np.array_equal(copies[f"encoder.layer.{i}.weight"], w) for i, w in enumerate(weights()))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert alarms
