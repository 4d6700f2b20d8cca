"""The caller's SessionOptions, models in every form, other people's ops, and providers: what a session leaves alone."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import onnxruntime_extensions
import pytest
from delayed_models import FLOAT, model, node, save, single_weight, value, write
from onnx import TensorProto, helper
from subprocesses import run_snippet

import ort_delayed
from ort_delayed.external_files import EXTERNAL_DIRECTORY_ENTRY

Plain = onnxruntime.InferenceSession


def with_external_data(directory: Path, weight: np.ndarray, factor: float, *, delayed_too: bool) -> str:
    """``y = x @ w @ v`` with an external ``v`` in v.bin, ``w`` delayed or absent."""
    write(directory / "v.bin", np.float32(factor) * np.eye(3, dtype=np.float32))
    write(directory / "w.bin", weight)
    made = single_weight() if delayed_too else model([], [value("x", ["n", 3])], [value("y", ["n", 3])])
    if delayed_too:
        made.graph.node[1].output[0] = "h"
    made.graph.node.append(node("MatMul", ["h" if delayed_too else "x", "v"], ["y"]))
    external = onnx.TensorProto(name="v", data_type=FLOAT, dims=[3, 3], data_location=onnx.TensorProto.EXTERNAL)
    external.external_data.add(key="location", value="v.bin")
    made.graph.initializer.append(external)
    return save(directory / "m.onnx", made)


# --- options used for two models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("set_by_caller", [False, True])
def test_options_for_two_models_in_two_directories(
    ours_first: bool, set_by_caller: bool, tmp_path: Path, weight: np.ndarray, x: np.ndarray
) -> None:
    ours = with_external_data(tmp_path / "a", weight, 2, delayed_too=True)
    plain = with_external_data(tmp_path / "b", weight, 5, delayed_too=False)
    options = onnxruntime.SessionOptions()
    if set_by_caller:
        options.add_session_config_entry(EXTERNAL_DIRECTORY_ENTRY, str(tmp_path / "b"))

    def run_ours() -> None:
        assert np.array_equal(ort_delayed.InferenceSession(ours, options).run(None, {"x": x})[0], 2 * (x @ weight))

    def run_plain() -> None:
        assert np.array_equal(Plain(plain, options).run(None, {"x": x})[0], 5 * x)

    for step in [run_ours, run_plain] if ours_first else [run_plain, run_ours]:
        step()
        step()
    if set_by_caller:
        assert options.get_session_config_entry(EXTERNAL_DIRECTORY_ENTRY) == str(tmp_path / "b")


def test_the_entry_is_put_back_when_construction_fails(tmp_path: Path, weight: np.ndarray) -> None:
    ours = with_external_data(tmp_path / "a", weight, 2, delayed_too=True)
    (tmp_path / "a" / "v.bin").unlink()
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(EXTERNAL_DIRECTORY_ENTRY, "before")
    with pytest.raises(Exception, match=r"v\.bin"):
        ort_delayed.InferenceSession(ours, options, enable_fallback=0)
    assert options.get_session_config_entry(EXTERNAL_DIRECTORY_ENTRY) == "before"


def test_options_of_ours_for_two_models_of_ours(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    paths = [with_external_data(tmp_path / str(f), weight, f, delayed_too=True) for f in (2, 3)]
    options = onnxruntime.SessionOptions()
    sessions = [ort_delayed.InferenceSession(path, options) for path in paths]
    for _ in range(2):
        for session, factor in zip(sessions, (2, 3), strict=True):
            assert np.array_equal(session.run(None, {"x": x})[0], factor * (x @ weight))


def test_external_data_in_a_snapshot_of_a_hub_cache(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    repository = tmp_path / "models--a--b"
    with_external_data(repository / "blobs", weight, 2, delayed_too=True)
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in ("m.onnx", "v.bin", "w.bin"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    for settings in ({}, {"weights_dir": snapshot}):
        session = ort_delayed.InferenceSession(str(snapshot / "m.onnx"), **settings)
        assert np.array_equal(session.run(None, {"x": x})[0], 2 * (x @ weight))


# --- models in every form ---------------------------------------------------------------------------------------------


def test_paths_bytes_and_weights_dir(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    path = with_external_data(tmp_path, weight, 2, delayed_too=True)
    data = Path(path).read_bytes()
    expected = 2 * (x @ weight)
    for given, settings in (
        (path, {}),
        (Path(path), {}),
        (path, {"weights_dir": str(tmp_path)}),
        (data, {"weights_dir": str(tmp_path)}),
        (data, {"weights_dir": tmp_path}),
    ):
        assert np.array_equal(ort_delayed.InferenceSession(given, **settings).run(None, {"x": x})[0], expected)
        options = onnxruntime.SessionOptions()
        prepared = ort_delayed.prepare_model(given, options, **settings)
        assert np.array_equal(Plain(prepared, options).run(None, {"x": x})[0], expected)


@pytest.mark.parametrize("mode", ["cpu", "file"])
def test_relative_paths_are_those_of_the_moment_of_construction(
    mode: str, tmp_path: Path, weight: np.ndarray, x: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a" / "w.bin", weight)
    path = save(tmp_path / "a" / "m.onnx", single_weight(load_device=mode))
    data = Path(path).read_bytes()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    sessions = [
        ort_delayed.InferenceSession("m.onnx"),
        ort_delayed.InferenceSession(Path("m.onnx"), weights_dir="."),
        ort_delayed.InferenceSession(data),
        ort_delayed.InferenceSession(data, weights_dir="../a"),
    ]
    monkeypatch.chdir(tmp_path / "b")
    for session in sessions:
        assert np.array_equal(session.run(None, {"x": x})[0], x @ weight)
    for session in sessions[:2]:
        session.set_providers(["CPUExecutionProvider"])
        assert np.array_equal(session.run(None, {"x": x})[0], x @ weight)


def test_a_model_without_delayed_nodes_goes_to_onnxruntime_by_its_path(
    tmp_path: Path, weight: np.ndarray, x: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = with_external_data(tmp_path, weight, 2, delayed_too=False)
    given: list[object] = []
    original = Plain.__init__

    def spy(self: object, path_or_bytes: object, *rest: object, **more: object) -> None:
        given.append(path_or_bytes)
        original(self, path_or_bytes, *rest, **more)

    monkeypatch.setattr(Plain, "__init__", spy)
    session = ort_delayed.InferenceSession(path)
    assert given == [path]
    assert np.array_equal(session.run(None, {"x": x})[0], 2 * x)
    assert ort_delayed.prepare_model(path, onnxruntime.SessionOptions()) == path


def test_a_model_that_only_mentions_the_op(tmp_path: Path, x: np.ndarray) -> None:
    made = model([node("Neg", ["x"], ["y"], name="DelayedInitializer")], [value("x", None)], [value("y", None)])
    path = save(tmp_path / "m.onnx", made)
    assert np.array_equal(ort_delayed.InferenceSession(path).run(None, {"x": x})[0], -x)
    assert ort_delayed.prepare_model(path, onnxruntime.SessionOptions()) == path


@pytest.mark.parametrize("content", [b"", b"garbage " * 10, b"DelayedInitializer" * 10, b"\x08"])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_what_is_no_model_fails_as_in_onnxruntime(content: bytes, as_bytes: bool, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    given = content if as_bytes else str(path)
    with pytest.raises(Exception) as expected:
        Plain(given, enable_fallback=0)
    with pytest.raises(type(expected.value)) as caught:
        ort_delayed.InferenceSession(given, enable_fallback=0)
    assert str(caught.value) == str(expected.value)


def test_a_path_that_leads_nowhere_and_a_wrong_type(tmp_path: Path) -> None:
    for given in (str(tmp_path / "absent.onnx"), str(tmp_path), 7, None, bytearray(b"x")):
        with pytest.raises(Exception) as expected:
            Plain(given, enable_fallback=0)
        with pytest.raises(type(expected.value)) as caught:
            ort_delayed.InferenceSession(given, enable_fallback=0)
        assert str(caught.value) == str(expected.value)


def test_a_model_in_ort_format(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    path = save(tmp_path / "m.onnx", model([node("Neg", ["x"], ["y"])], [value("x", None)], [value("y", None)]))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "m.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    Plain(path, options)
    for given in (str(tmp_path / "m.ort"), (tmp_path / "m.ort").read_bytes()):
        assert np.array_equal(ort_delayed.InferenceSession(given).run(None, {"x": x})[0], -x)


def test_a_large_model_is_scanned_in_pieces(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    # The op's name may stand across the border of two pieces.
    from ort_delayed import model_source

    write(tmp_path / "w.bin", weight)
    path = save(tmp_path / "m.onnx", single_weight())
    size = model_source._PIECE_BYTES
    try:
        for piece in (1, 2, 3, 5, 17, 18, 19, 64, 100):
            model_source._PIECE_BYTES = piece
            assert np.array_equal(ort_delayed.InferenceSession(path).run(None, {"x": x})[0], x @ weight)
    finally:
        model_source._PIECE_BYTES = size


# --- registering ------------------------------------------------------------------------------------------------------


def test_registering_in_every_order(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    path = save(tmp_path / "m.onnx", single_weight())
    assert os.path.isfile(ort_delayed.get_library_path())

    def by_caller(options: onnxruntime.SessionOptions) -> None:
        options.register_custom_ops_library(onnxruntime_extensions.get_library_path())

    ours = ort_delayed.register_custom_ops
    for steps in ([], [ours], [ours, ours], [by_caller], [by_caller, ours], [by_caller, ours, ours]):
        options = onnxruntime.SessionOptions()
        for step in steps:
            step(options)
        for _ in range(2):
            session = ort_delayed.InferenceSession(path, options)
            assert np.array_equal(session.run(None, {"x": x})[0], x @ weight)
        prepared = ort_delayed.prepare_model(path, options)
        assert np.array_equal(Plain(prepared, options).run(None, {"x": x})[0], x @ weight)


def test_a_tokenizers_op_runs_beside_ours(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    made = single_weight()
    made.opset_import.append(helper.make_opsetid("ai.onnx.contrib", 1))
    made.graph.node.append(node("StringLength", ["text"], ["length"], domain="ai.onnx.contrib"))
    made.graph.input.append(value("text", ["n"], TensorProto.STRING))
    made.graph.output.append(value("length", ["n"], TensorProto.INT64))
    session = ort_delayed.InferenceSession(save(tmp_path / "m.onnx", made))
    y, length = session.run(None, {"x": x, "text": np.array(["abc", "de"])})
    assert np.array_equal(y, x @ weight)
    assert length.tolist() == [3, 2]


def test_reloading(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    printed = run_snippet(
        """
        import importlib, sys
        import numpy as np
        import ort_delayed
        import ort_delayed.ops.kernel as kernel

        def run():
            return ort_delayed.InferenceSession(sys.argv[1])

        x = np.eye(3, dtype=np.float32)
        first = run()
        for name in sorted(n for n in sys.modules if n.split(".")[0] == "ort_delayed"):
            importlib.reload(sys.modules[name])
        second = run()
        for name in [n for n in sys.modules if n.split(".")[0] == "ort_delayed"]:
            del sys.modules[name]
        import ort_delayed
        third = run()
        for session in (first, second, third, first):
            print(session.run(None, {"x": x})[0].sum())
        import os
        os.unlink(sys.argv[2])
        for attempt in (third.run, lambda *_: ort_delayed.InferenceSession(sys.argv[3])):
            try:
                attempt(None, {"x": x})
            except ort_delayed.DelayedInitializerError as error:
                assert isinstance(error, FileNotFoundError)
                print("typed")
        """,
        save(tmp_path / "m.onnx", single_weight()),
        write(tmp_path / "w.bin", weight),
        save(tmp_path / "cpu.onnx", single_weight(load_device="cpu")),
    )
    assert printed.split() == ["45.0"] * 4 + ["typed"] * 2


@pytest.mark.parametrize("moment", ["before", "after"])
def test_ops_of_the_user_in_a_domain_of_their_own(moment: str, tmp_path: Path, weight: np.ndarray) -> None:
    write(tmp_path / "w.bin", weight)
    made = single_weight()
    made.graph.node[1].output[0] = "h"
    made.opset_import.append(helper.make_opsetid("user.ops", 1))
    made.graph.node.append(node("Double", ["h"], ["y"], domain="user.ops"))
    printed = run_snippet(
        """
        import sys
        import numpy as np
        from onnxruntime_extensions import PyCustomOpDef, onnx_op

        def declare(name, domain="user.ops"):
            @onnx_op(op_type=f"{domain}::{name}", inputs=[PyCustomOpDef.dt_float], outputs=[PyCustomOpDef.dt_float])
            def double(h):
                return 2 * h

        if sys.argv[2] == "before":
            declare("Double")
        import ort_delayed
        if sys.argv[2] == "after":
            declare("Double")
        session = ort_delayed.InferenceSession(sys.argv[1])
        x = np.eye(3, dtype=np.float32)
        print(session.run(None, {"x": x})[0].sum())
        declare("Another", "another.domain")
        print(session.run(None, {"x": x})[0].sum())
        print(ort_delayed.InferenceSession(sys.argv[1]).run(None, {"x": x})[0].sum())
        """,
        save(tmp_path / "m.onnx", made),
        moment,
    )
    assert printed.split() == ["90.0"] * 3


@pytest.mark.parametrize("dtype", [1, 10, 7])
@pytest.mark.parametrize("typed", [True, False])
def test_an_unprepared_model_in_a_plain_session_never_runs(
    typed: bool, dtype: int, tmp_path: Path, weight: np.ndarray
) -> None:
    write(tmp_path / "w.bin", weight)
    made = single_weight(dtype=dtype)
    if typed:
        made.graph.value_info.append(value("w", [3, 3], dtype))
    options = onnxruntime.SessionOptions()
    ort_delayed.register_custom_ops(options)
    with pytest.raises(Exception) as caught:
        Plain(save(tmp_path / "m.onnx", made), options, enable_fallback=0)
    if dtype == FLOAT or not typed:
        assert "ort_delayed" in str(caught.value)
    with pytest.raises(Exception, match=r"ai\.rt"):
        Plain(save(tmp_path / "m.onnx", made), enable_fallback=0)


# --- providers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["cpu", "file"])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_set_providers(mode: str, as_bytes: bool, tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    path = write(tmp_path / "w.bin", weight)
    made = save(tmp_path / "m.onnx", single_weight(load_device=mode))
    session = (
        ort_delayed.InferenceSession(Path(made).read_bytes(), weights_dir=tmp_path)
        if as_bytes
        else ort_delayed.InferenceSession(made)
    )
    for factor in (2, 3):
        write(path, factor * weight)
        session.set_providers(["CPUExecutionProvider"])
        assert np.array_equal(session.run(None, {"x": x})[0], factor * (x @ weight))
    if mode == "cpu":
        path.unlink()
        with pytest.raises(FileNotFoundError):
            session.set_providers(["CPUExecutionProvider"])
        # As the session was before.
        assert np.array_equal(session.run(None, {"x": x})[0], 3 * (x @ weight))


def test_a_session_made_with_other_options_than_the_model_was_prepared_with(
    tmp_path: Path, weight: np.ndarray, x: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    import gc

    write(tmp_path / "w.bin", weight)
    prepared_with, other = onnxruntime.SessionOptions(), onnxruntime.SessionOptions()
    prepared = ort_delayed.prepare_model(save(tmp_path / "m.onnx", single_weight()), prepared_with)
    ort_delayed.register_custom_ops(other)
    session = Plain(prepared, other)
    assert np.array_equal(session.run(None, {"x": x})[0], x @ weight)
    del prepared_with
    gc.collect()
    with pytest.raises(Exception, match="Input shape"):
        session.run(None, {"x": x})
    assert "the session options that this model was prepared with are gone" in caplog.text


def test_the_caller_need_not_keep_anything(tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    import gc

    write(tmp_path / "w.bin", weight)

    def make() -> tuple[object, object]:
        options = onnxruntime.SessionOptions()
        path = save(tmp_path / "m.onnx", single_weight(load_device="cpu"))
        prepared = ort_delayed.prepare_model(path, options)
        return ort_delayed.InferenceSession(path, onnxruntime.SessionOptions()), Plain(prepared, options)

    sessions = make()
    gc.collect()
    for session in sessions:
        assert np.array_equal(session.run(None, {"x": x})[0], x @ weight)  # type: ignore[attr-defined]
