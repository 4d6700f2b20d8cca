"""Every way to run a session: results, failures as typed errors, and a good run after each failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from delayed_models import delayed, model, node, output_only, save, single_weight, value, write
from onnx import TensorProto, helper

import ort_delayed
from ort_delayed import DelayedInitializerError

Session = onnxruntime.InferenceSession
Feeds = dict[str, np.ndarray]


def by_run(session: Session, feeds: Feeds, run_options: Any) -> np.ndarray:
    return session.run(None, feeds, run_options)[0]


def by_ort_values(session: Session, feeds: Feeds, run_options: Any) -> np.ndarray:
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(a) for n, a in feeds.items()}
    return session.run_with_ort_values(["y"], values, run_options)[0].numpy()


def by_iobinding(session: Session, feeds: Feeds, run_options: Any) -> np.ndarray:
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("y")
    session.run_with_iobinding(binding, run_options)
    return binding.copy_outputs_to_cpu()[0]


def by_ortvaluevector(session: Session, feeds: Feeds, run_options: Any) -> np.ndarray:
    fed, fetched = onnxruntime.capi.onnxruntime_pybind11_state.OrtValueVector(), None
    fetched = onnxruntime.capi.onnxruntime_pybind11_state.OrtValueVector()
    for array in feeds.values():
        fed.push_back(onnxruntime.OrtValue.ortvalue_from_numpy(array)._ortvalue)
    device = onnxruntime.OrtDevice.make("cpu", 0)._ort_device
    session.run_with_ortvaluevector(run_options or onnxruntime.RunOptions(), list(feeds), fed, ["y"], fetched, [device])
    return fetched[0].numpy()


def by_async(session: Session, feeds: Feeds, run_options: Any) -> np.ndarray:
    done, got = threading.Event(), []

    def callback(results: Any, data: Any, message: str) -> None:
        got.extend([results, data, message])
        done.set()

    session.run_async(None, feeds, callback, "data", run_options)
    assert done.wait(30)
    results, data, message = got
    assert data == "data"
    if message:
        raise DelayedInitializerError(message)
    return results[0]


METHODS = [by_run, by_ort_values, by_iobinding, by_ortvaluevector, by_async]
Method = Callable[[Session, Feeds, Any], np.ndarray]


def options(mode: onnxruntime.ExecutionMode) -> onnxruntime.SessionOptions:
    made = onnxruntime.SessionOptions()
    made.execution_mode = mode
    return made


@pytest.mark.parametrize("given_options", [False, True])
@pytest.mark.parametrize("mode", [onnxruntime.ExecutionMode.ORT_SEQUENTIAL, onnxruntime.ExecutionMode.ORT_PARALLEL])
@pytest.mark.parametrize("method", METHODS)
def test_good_failing_good(
    method: Method,
    mode: onnxruntime.ExecutionMode,
    given_options: bool,
    tmp_path: Path,
    weight: np.ndarray,
    x: np.ndarray,
) -> None:
    path = write(tmp_path / "w.bin", weight)
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", single_weight(offset=0)), options(mode))
    run_options = onnxruntime.RunOptions() if given_options else None
    for _ in range(2):
        assert np.array_equal(method(session, {"x": x}, run_options), x @ weight)
        path.unlink()
        with pytest.raises(DelayedInitializerError) as caught:
            method(session, {"x": x}, run_options)
        for part in ("'w'", str(path), "offset 0", "36 bytes needed", "does not exist"):
            assert part in str(caught.value)
        if method is not by_async:
            assert isinstance(caught.value, FileNotFoundError)
            assert isinstance(caught.value.__cause__, FileNotFoundError)
        if run_options is not None:
            assert run_options.terminate is False
        write(path, weight)
    assert np.array_equal(method(session, {"x": x}, run_options), x @ weight)


def directory(path: Path) -> None:
    path.mkdir()


def fifo(path: Path) -> None:
    import os

    os.mkfifo(path)


FAULTS: list[tuple[Callable[[Path], object], type[Exception], str]] = [
    (lambda path: path.write_bytes(bytes(30)), EOFError, "30 found"),
    (lambda path: path.write_bytes(b""), EOFError, "0 found"),
    (directory, IsADirectoryError, "directory"),
    (fifo, OSError, "FIFO"),
    (lambda path: path.symlink_to("/dev/zero"), OSError, "character device"),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("make", "built_in", "says"), FAULTS)
def test_faults_of_files(
    make: Callable[[Path], object],
    built_in: type[Exception],
    says: str,
    method: Method,
    tmp_path: Path,
    weight: np.ndarray,
    x: np.ndarray,
) -> None:
    path = tmp_path / "w.bin"
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", single_weight()))
    make(path)
    with pytest.raises(DelayedInitializerError, match=says) as caught:
        method(session, {"x": x}, None)
    if method is not by_async:
        assert isinstance(caught.value, built_in)
    path.rmdir() if path.is_dir() else path.unlink()
    write(path, weight)
    assert np.array_equal(method(session, {"x": x}, None), x @ weight)


@pytest.mark.parametrize("shape", [[], [9], [3, 3], [1] * 8, [0], [0, 3], [3, 0]])
@pytest.mark.parametrize("opset", [7, 13, 17])
@pytest.mark.parametrize("mode", [onnxruntime.ExecutionMode.ORT_SEQUENTIAL, onnxruntime.ExecutionMode.ORT_PARALLEL])
def test_a_graph_output_that_fails(
    shape: list[int], opset: int, mode: onnxruntime.ExecutionMode, tmp_path: Path
) -> None:
    made = model([delayed("y", shape)], [], [value("y", shape)], opset=opset)
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", made), options(mode))
    for method in (by_run, by_iobinding, by_async):
        with pytest.raises(DelayedInitializerError, match=r"w\.bin"):
            method(session, {}, None)
    write(tmp_path / "w.bin", np.ones(9, np.float32))
    assert by_run(session, {}, None).shape == tuple(shape)


def test_the_last_node_of_a_run(tmp_path: Path) -> None:
    nodes = [node("Relu", ["x"], ["h"]), delayed("w", [3]), node("Mul", ["h", "w"], ["y"])]
    made = model(nodes, [value("x", [3])], [value("h", [3]), value("y", [3])])
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", made))
    with pytest.raises(FileNotFoundError):
        session.run(None, {"x": np.ones(3, np.float32)})
    # ONNX Runtime computes all nodes, whichever outputs are asked for.
    with pytest.raises(FileNotFoundError):
        session.run(["h"], {"x": np.ones(3, np.float32)})


@pytest.mark.parametrize("condition", ["asked", "known"])
def test_a_branch_that_fails(condition: str, tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    def branch(name: str, filename: str) -> Any:
        nodes = [delayed(f"{name}_w", [3, 3], filename), node("MatMul", ["x", f"{name}_w"], [f"{name}_o"])]
        return helper.make_graph(nodes, name, [], [value(f"{name}_o", None)])

    made = model(
        [node("If", [condition], ["y"], then_branch=branch("t", "t.bin"), else_branch=branch("e", "e.bin"))],
        [value("asked", [], TensorProto.BOOL), value("x", ["n", 3])],
        [value("y", None)],
        initializers=[helper.make_tensor("known", TensorProto.BOOL, [], [True])],
    )
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", made))
    feeds = {"asked": np.array(True), "x": x}
    with pytest.raises(FileNotFoundError, match=r"'t_w'.*t\.bin"):
        session.run(None, feeds)
    write(tmp_path / "t.bin", weight)
    assert np.array_equal(session.run(None, feeds)[0], x @ weight)


def test_a_fixed_output_buffer(tmp_path: Path, weight: np.ndarray) -> None:
    path = write(tmp_path / "w.bin", weight)
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", output_only([3, 3])))
    bound = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((3, 3), np.float32))
    binding = session.io_binding()
    binding.bind_ortvalue_output("y", bound)
    for factor in (1, 2):
        write(path, factor * weight)
        session.run_with_iobinding(binding)
        assert np.array_equal(bound.numpy(), factor * weight)
    path.unlink()
    with pytest.raises(DelayedInitializerError):
        session.run_with_iobinding(binding)


def test_errors_of_the_caller_are_onnxruntimes(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    made = save(tmp_path / "m.onnx", single_weight())
    ours = ort_delayed.InferenceSession(made)
    plain_options = onnxruntime.SessionOptions()
    plain = Session(ort_delayed.prepare_model(made, plain_options), plain_options)
    for outputs, feeds in ((None, {}), (["nothing"], {"x": x}), (None, {"x": x.astype(np.int32)}), (None, {"x": x.T})):
        with pytest.raises(Exception) as expected:
            plain.run(outputs, feeds)
        with pytest.raises(type(expected.value)) as caught:
            ours.run(outputs, feeds)
        assert str(caught.value) == str(expected.value)
    with pytest.raises(ValueError, match="x"):
        ours.run_async(None, {}, lambda *_: None, None)


def test_terminate_set_by_the_caller(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", single_weight()))
    run_options = onnxruntime.RunOptions()
    run_options.terminate = True
    for method in METHODS:
        with pytest.raises(Exception, match="terminate"):
            method(session, {"x": x}, run_options)
    run_options.terminate = False
    assert np.array_equal(by_run(session, {"x": x}, run_options), x @ weight)


def test_eight_threads_on_one_session(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", single_weight()))
    wrong: list[object] = []

    def work(number: int) -> None:
        feed = x * (number + 1)
        for method in METHODS * 4:
            try:
                if not np.array_equal(method(session, {"x": feed}, None), feed @ weight):
                    wrong.append(number)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("mode", [onnxruntime.ExecutionMode.ORT_SEQUENTIAL, onnxruntime.ExecutionMode.ORT_PARALLEL])
def test_of_two_runs_at_once_one_fails(mode: onnxruntime.ExecutionMode, tmp_path: Path) -> None:
    # An If decides whether a run needs the file that is not there.
    def branch(name: str, filename: str) -> Any:
        nodes = [delayed(f"{name}_w", [3], filename), node("Add", ["x", f"{name}_w"], [f"{name}_o"])]
        return helper.make_graph(nodes, name, [], [value(f"{name}_o", None)])

    made = model(
        [node("If", ["c"], ["y"], then_branch=branch("t", "there.bin"), else_branch=branch("e", "absent.bin"))],
        [value("c", [], TensorProto.BOOL), value("x", [3])],
        [value("y", None)],
    )
    write(tmp_path / "there.bin", np.ones(3, np.float32))
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", made), options(mode))
    outcomes: dict[bool, list[object]] = {True: [], False: []}

    def work(good: bool) -> None:
        for _ in range(40):
            try:
                outcomes[good].append(
                    session.run(None, {"c": np.array(good), "x": np.zeros(3, np.float32)})[0].tolist()
                )
            except Exception as error:
                outcomes[good].append(error)

    threads = [threading.Thread(target=work, args=(good,)) for good in (True, False, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes[True] == [[1, 1, 1]] * 80
    assert len(outcomes[False]) == 80
    assert all(isinstance(e, FileNotFoundError) and "absent.bin" in str(e) for e in outcomes[False])


def test_several_failing_nodes_at_once_in_parallel_mode(tmp_path: Path) -> None:
    nodes = [delayed(f"w{i}", [3], f"{i}.bin") for i in range(8)]
    nodes += [node("Sum", [f"w{i}" for i in range(8)], ["y"])]
    made = model(nodes, [], [value("y", [3])])
    session = ort_delayed.InferenceSession(
        save(tmp_path / "m.onnx", made), options(onnxruntime.ExecutionMode.ORT_PARALLEL)
    )
    for _ in range(20):
        with pytest.raises(FileNotFoundError):
            session.run(None, {})
    for i in range(8):
        write(tmp_path / f"{i}.bin", np.full(3, i, np.float32))
    assert session.run(None, {})[0].tolist() == [28, 28, 28]


def test_a_file_truncated_between_runs_and_put_back(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    path = write(tmp_path / "w.bin", weight)
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", single_weight()))
    session.run(None, {"x": x})
    with open(path, "r+b") as file:
        file.truncate(20)
    with pytest.raises(EOFError, match="20 found"):
        session.run(None, {"x": x})
    write(path, weight)
    assert np.array_equal(session.run(None, {"x": x})[0], x @ weight)


def test_many_failures_leave_the_session_as_it_was(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", single_weight()))
    for _ in range(200):
        with pytest.raises(FileNotFoundError):
            session.run(None, {"x": x})
    assert session._binding is not None
    assert not session._binding._bound.errors
    write(tmp_path / "w.bin", weight)
    assert np.array_equal(session.run(None, {"x": x})[0], x @ weight)


# --- run_async --------------------------------------------------------------------------------------------------------


def test_more_asynchronous_runs_than_threads(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", single_weight()))
    got: list[tuple[int, bool, str]] = []
    done = threading.Semaphore(0)

    def callback(results: Any, number: int, message: str) -> None:
        got.append((number, bool(results) and np.array_equal(results[0], (x * number) @ weight), message))
        done.release()

    for number in range(100):
        session.run_async(["y"], {"x": x * number}, callback, number)
    for _ in range(100):
        assert done.acquire(timeout=30)
    assert sorted(got) == [(number, True, "") for number in range(100)]


def test_one_thread_in_the_pool_is_enough(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    made = onnxruntime.SessionOptions()
    made.intra_op_num_threads = 1
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", single_weight()), made)
    assert np.array_equal(by_async(session, {"x": x}, None), x @ weight)


def test_a_callback_that_raises_is_reported_and_the_next_run_works(
    tmp_path: Path, weight: np.ndarray, x: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "w.bin", weight)
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", single_weight()))
    reported: list[object] = []
    seen = threading.Event()

    def hook(arguments: threading.ExceptHookArgs) -> None:
        reported.append(arguments.exc_value)
        seen.set()

    monkeypatch.setattr(threading, "excepthook", hook)
    error = RuntimeError("from the callback")

    def callback(*arguments: object) -> None:
        raise error

    for _ in range(3):
        seen.clear()
        session.run_async(None, {"x": x}, callback, None)
        assert seen.wait(30)
    assert reported == [error] * 3
    assert np.array_equal(by_async(session, {"x": x}, None), x @ weight)


def test_a_callback_may_run_the_session(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", single_weight()))
    got: list[np.ndarray] = []
    done = threading.Event()

    def callback(results: Any, data: Any, message: str) -> None:
        got.extend(session.run(None, {"x": results[0]}))
        done.set()

    session.run_async(None, {"x": x}, callback, None)
    assert done.wait(30)
    assert np.array_equal(got[0], x @ weight @ weight)


# --- plain sessions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [onnxruntime.ExecutionMode.ORT_SEQUENTIAL, onnxruntime.ExecutionMode.ORT_PARALLEL])
def test_a_plain_session_with_a_prepared_model(
    mode: onnxruntime.ExecutionMode, tmp_path: Path, weight: np.ndarray, x: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    made = options(mode)
    session = Session(ort_delayed.prepare_model(save(tmp_path / "m.onnx", single_weight(offset=4)), made), made)
    del made
    with pytest.raises(Exception, match=r"'w'.*w\.bin.*offset 4, 36 bytes needed"):
        session.run(None, {"x": x})
    assert "does not exist" in caplog.text
    write(tmp_path / "w.bin", weight, padding=b"abcd")
    for method in METHODS:
        assert np.array_equal(method(session, {"x": x}, None), x @ weight)
