"""What is refused when a session is constructed: typed, before anything runs, leaving nothing behind."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from delayed_models import FLOAT, delayed, function, model, node, output_only, save, single_weight, value, write
from onnx import TensorProto, helper
from subprocesses import run_snippet

import ort_delayed
from ort_delayed import DelayedInitializerError
from ort_delayed.ops import kernel
from ort_delayed.ops.errors import DelayedInitializerValueError


def construct(path: str | bytes, **settings: object) -> ort_delayed.InferenceSession:
    before = dict(kernel._table.entries)
    try:
        return ort_delayed.InferenceSession(path, enable_fallback=0, **settings)
    except BaseException:
        assert kernel._table.entries.keys() <= before.keys(), "a failed construction left handles behind"
        raise


def with_attribute(made: onnx.ModelProto, name: str, new: object) -> onnx.ModelProto:
    (node_,) = [n for n in made.graph.node if n.domain == "ai.rt"]
    kept = [a for a in node_.attribute if a.name != name]
    del node_.attribute[:]
    node_.attribute.extend(kept)
    if new is not None:
        node_.attribute.append(helper.make_attribute(name, new))
    return made


@pytest.mark.parametrize(
    ("name", "new", "built_in"),
    [
        *((n, None, ValueError) for n in ("dtype", "filename", "load_device", "offset", "runtime_device", "shape")),
        ("load_device", "gpu", ValueError),
        ("runtime_device", "cuda", ValueError),
        ("shape", [3, -3], ValueError),
        ("shape", [2**40, 2**40], ValueError),
        ("offset", -1, ValueError),
        ("offset", 2**63 - 1, ValueError),
        ("filename", "", ValueError),
        ("filename", "a\0b", ValueError),
        ("filename", b"\xff\xfe", ValueError),
        *(("dtype", t, TypeError) for t in (0, 8, 14, 15, 16, 17, 21, 22, 23, 99)),
    ],
)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_attributes(name: str, new: object, built_in: type, as_bytes: bool, tmp_path: Path) -> None:
    made = with_attribute(single_weight(), name, new)
    path = save(tmp_path / "m.onnx", made)
    with pytest.raises(DelayedInitializerError) as caught:
        construct(made.SerializeToString() if as_bytes else path)
    assert isinstance(caught.value, built_in)
    assert "'w'" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda n: n.input.append("x"),
        lambda n: n.output.append("v"),
        lambda n: n.ClearField("output"),
    ],
)
def test_inputs_and_outputs_of_the_node(change: Callable[[onnx.NodeProto], None], tmp_path: Path) -> None:
    made = single_weight()
    change(made.graph.node[0])
    with pytest.raises(DelayedInitializerError, match=r"takes no inputs|exactly one output"):
        construct(save(tmp_path / "m.onnx", made))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (value("w", [3, 3], TensorProto.INT32), "INT32"),
        (value("w", [3, 4]), "shape"),
        (value("w", [3]), "shape"),
        (
            helper.make_value_info("w", helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, None))),
            "type",
        ),
    ],
)
def test_declarations_that_contradict_the_attributes(
    declared: onnx.ValueInfoProto, message: str, tmp_path: Path
) -> None:
    made = single_weight()
    made.graph.value_info.append(declared)
    with pytest.raises(DelayedInitializerError, match=message):
        construct(save(tmp_path / "m.onnx", made))
    as_output = model([delayed("w", [3, 3])], [], [declared])
    with pytest.raises(DelayedInitializerError, match=message):
        construct(save(tmp_path / "m.onnx", as_output))


@pytest.mark.parametrize("declared", [value("w", ["a", 3]), value("w", None), value("w", [None, None])])
def test_declarations_that_leave_things_open(declared: onnx.ValueInfoProto, tmp_path: Path) -> None:
    made = single_weight()
    made.graph.value_info.append(declared)
    construct(save(tmp_path / "m.onnx", made))


def test_bad_nodes_in_bodies_and_functions(tmp_path: Path) -> None:
    def bad() -> onnx.NodeProto:
        made = delayed("w", [3, 3])
        made.attribute.remove(next(a for a in made.attribute if a.name == "offset"))
        return made

    branch = helper.make_graph([bad(), node("MatMul", ["x", "w"], ["o"])], "b", [], [value("o", None)])
    in_body = model(
        [node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)],
        [value("c", [], TensorProto.BOOL), value("x", [1, 3])],
        [value("y", None)],
    )
    in_function = model(
        [node("F", ["x"], ["y"], domain="local")],
        [value("x", [1, 3])],
        [value("y", None)],
        functions=[function("F", ["a"], ["b"], [bad(), node("MatMul", ["a", "w"], ["b"])])],
    )
    for made in (in_body, in_function):
        with pytest.raises(DelayedInitializerError, match="offset"):
            construct(save(tmp_path / "m.onnx", made))


def test_a_model_that_was_prepared_already_or_poses_as_one(tmp_path: Path) -> None:
    prepared = ort_delayed.prepare_model(save(tmp_path / "m.onnx", single_weight()), onnxruntime.SessionOptions())
    assert isinstance(prepared, bytes)
    with pytest.raises(DelayedInitializerError, match="prepared"):
        construct(prepared)
    with pytest.raises(DelayedInitializerError, match="prepared"):
        ort_delayed.prepare_model(prepared, onnxruntime.SessionOptions())
    with_handle = with_attribute(single_weight(), kernel.HANDLE_ATTRIBUTE, 1)
    with pytest.raises(DelayedInitializerError, match="handles"):
        construct(save(tmp_path / "m.onnx", with_handle))
    for op_type in ("DelayedInitializer_int8", "DelayedInitializer_after_float32"):
        internal = single_weight()
        internal.graph.node[0].op_type = op_type
        with pytest.raises(DelayedInitializerError, match="prepared"):
            construct(save(tmp_path / "m.onnx", internal))


def test_the_import_of_the_ops_domain(tmp_path: Path) -> None:
    made = single_weight()
    kept = [o for o in made.opset_import if o.domain != "ai.rt"]
    del made.opset_import[:]
    made.opset_import.extend(kept)
    with pytest.raises(DelayedInitializerError, match="import"):
        construct(save(tmp_path / "m.onnx", made))


def test_an_optimized_model_cannot_be_written(tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    path = save(tmp_path / "m.onnx", single_weight())
    with pytest.raises(DelayedInitializerError, match="optimized_model_filepath"):
        construct(path, sess_options=options)
    with pytest.raises(DelayedInitializerError, match="optimized_model_filepath"):
        ort_delayed.prepare_model(path, options)
    assert not (tmp_path / "optimized.onnx").exists()


# --- files of cpu payloads --------------------------------------------------------------------------------------------


def directory(path: Path) -> None:
    path.mkdir()


def dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def looping_link(path: Path) -> None:
    path.symlink_to(path)


def unix_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's name is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


FAULTS: list[tuple[Callable[[Path], object], type[Exception]]] = [
    (lambda path: None, FileNotFoundError),
    (dangling_link, FileNotFoundError),
    (lambda path: path.write_bytes(bytes(35)), EOFError),
    (lambda path: path.write_bytes(b""), EOFError),
    (directory, IsADirectoryError),
    (lambda path: os.mkfifo(path), OSError),
    (lambda path: path.symlink_to("/dev/zero"), OSError),
    (unix_socket, OSError),
    (looping_link, OSError),
]


@pytest.mark.parametrize(("make", "built_in"), FAULTS)
@pytest.mark.parametrize("confined", [False, True])
def test_files_of_cpu_payloads(
    make: Callable[[Path], object], built_in: type[Exception], confined: bool, tmp_path: Path
) -> None:
    make(tmp_path / "w.bin")
    settings = {"weights_dir": tmp_path} if confined else {}
    with pytest.raises(DelayedInitializerError) as caught:
        construct(save(tmp_path / "m.onnx", single_weight(load_device="cpu")), **settings)
    assert isinstance(caught.value, built_in)
    for part in ("'w'", "w.bin", "offset 0", "36 bytes needed"):
        assert part in str(caught.value)
    assert str(caught.value.path).endswith("w.bin")


def test_a_short_file_says_how_much_it_holds(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(30))
    with pytest.raises(EOFError, match=r"offset 8, 36 bytes needed, 22 found") as caught:
        construct(save(tmp_path / "m.onnx", single_weight(load_device="cpu", offset=8)))
    error = caught.value
    assert isinstance(error, DelayedInitializerError)
    assert (error.offset, error.expected_bytes, error.found_bytes) == (8, 36, 22)


def test_a_claim_to_a_terabyte_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(100))
    for mode in ("cpu", "file"):
        path = save(tmp_path / "m.onnx", output_only([2**38], load_device=mode))
        with pytest.raises(EOFError, match="100 found"):
            construct(path).run(None, {})


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory that every user may enter; pytest's own are private."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        yield Path(made)


def test_a_file_that_may_not_be_read(public_directory: Path) -> None:
    write(public_directory / "w.bin", np.ones(9, np.float32)).chmod(0)
    path = save(public_directory / "m.onnx", single_weight(load_device="cpu"))
    printed = run_snippet(
        """
        import os, sys, ort_delayed
        if os.getuid() == 0:  # root may read everything
            os.setgid(65534)
            os.setuid(65534)
        try:
            ort_delayed.InferenceSession(sys.argv[1], enable_fallback=0)
        except PermissionError as error:
            assert isinstance(error, ort_delayed.DelayedInitializerError)
            print(error)
        """,
        path,
    )
    assert "may not be read" in printed


# --- confinement ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["cpu", "file"])
@pytest.mark.parametrize("filename", ["../w.bin", "sub/../../w.bin", "{outside}/w.bin", "..", "/etc/passwd"])
def test_names_that_lead_out_of_weights_dir(filename: str, mode: str, tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    write(outside / "w.bin", np.ones(9, np.float32))
    write(tmp_path / "w.bin", np.ones(9, np.float32))
    made = single_weight(filename=filename.format(outside=outside), load_device=mode)
    for given in (save(inside / "m.onnx", made), made.SerializeToString()):
        with pytest.raises(DelayedInitializerError, match="outside") as caught:
            construct(given, weights_dir=inside)
        assert isinstance(caught.value, PermissionError)


def test_a_directory_whose_name_only_begins_alike_is_outside(tmp_path: Path) -> None:
    write(tmp_path / "inside2" / "w.bin", np.ones(9, np.float32))
    made = single_weight(filename=str(tmp_path / "inside2" / "w.bin"), load_device="cpu")
    with pytest.raises(PermissionError):
        construct(save(tmp_path / "inside" / "m.onnx", made), weights_dir=tmp_path / "inside")


@pytest.mark.parametrize("mode", ["cpu", "file"])
@pytest.mark.parametrize("level", ["file", "directory"])
def test_links_that_lead_out_of_weights_dir(level: str, mode: str, tmp_path: Path, x: np.ndarray) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    write(outside / "w.bin", np.ones(9, np.float32))
    link, target = ("w.bin", outside / "w.bin") if level == "file" else ("sub", outside)
    (inside / link).symlink_to(target)
    filename = "w.bin" if level == "file" else "sub/w.bin"
    path = save(inside / "m.onnx", single_weight(filename=filename, load_device=mode))
    with pytest.raises(PermissionError, match="outside") as caught:
        construct(path, weights_dir=inside).run(None, {"x": x})
    assert isinstance(caught.value, DelayedInitializerError)
    construct(path).run(None, {"x": x})


@pytest.mark.parametrize("mode", ["cpu", "file"])
def test_links_within_weights_dir_and_to_it(mode: str, tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    real = tmp_path / "real"
    write(real / "deep" / "w.bin", weight)
    (real / "w.bin").symlink_to("deep/w.bin")
    (tmp_path / "linked").symlink_to(real)
    made = single_weight(load_device=mode)
    save(real / "m.onnx", made)
    for directory_ in (real, tmp_path / "linked"):
        for given in (str(directory_ / "m.onnx"), made.SerializeToString()):
            session = construct(given, weights_dir=directory_)
            assert np.array_equal(session.run(None, {"x": x})[0], x @ weight)
    absolute = save(real / "a.onnx", single_weight(load_device=mode, filename=str(tmp_path / "linked" / "w.bin")))
    assert np.array_equal(construct(absolute, weights_dir=tmp_path / "linked").run(None, {"x": x})[0], x @ weight)


@pytest.mark.parametrize("mode", ["cpu", "file"])
def test_a_snapshot_of_a_hub_cache(mode: str, tmp_path: Path, weight: np.ndarray, x: np.ndarray) -> None:
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    write(repository / "blobs" / "111", weight)
    save(repository / "blobs" / "222", single_weight(load_device=mode))
    (snapshot / "w.bin").symlink_to("../../blobs/111")
    (snapshot / "m.onnx").symlink_to("../../blobs/222")
    for settings in ({}, {"weights_dir": snapshot}):
        session = construct(str(snapshot / "m.onnx"), **settings)
        assert np.array_equal(session.run(None, {"x": x})[0], x @ weight)
    write(tmp_path / "models--other" / "blobs" / "111", weight)
    (snapshot / "w.bin").unlink()
    (snapshot / "w.bin").symlink_to("../../../models--other/blobs/111")
    with pytest.raises(PermissionError, match="outside"):
        construct(str(snapshot / "m.onnx"), weights_dir=snapshot).run(None, {"x": x})


TEXTS: dict[str, Callable[[onnx.ModelProto], None]] = {
    "the delayed node": lambda m: setattr(m.graph.node[0], "name", "=BAD="),
    "what it yields": lambda m: m.graph.node[0].output.__setitem__(0, "=BAD="),
    "its operator": lambda m: setattr(m.graph.node[0], "op_type", "DelayedInitializer=BAD="),
    "an attribute": lambda m: m.graph.node[0].attribute.append(helper.make_attribute("=BAD=", 1)),
    "another node": lambda m: setattr(m.graph.node[1], "name", "=BAD="),
    "an input": lambda m: setattr(m.graph.input[0], "name", "=BAD="),
    "a function": lambda m: m.functions.append(function("=BAD=", ["a"], ["b"], [node("Neg", ["a"], ["b"])])),
    "an import": lambda m: m.opset_import.extend([helper.make_opsetid("=BAD=", 1)]),
}


@pytest.mark.parametrize("place", TEXTS)
@pytest.mark.parametrize("by_path", [True, False])
def test_names_that_are_not_utf8(tmp_path: Path, place: str, by_path: bool) -> None:
    made = single_weight()
    TEXTS[place](made)
    data = made.SerializeToString().replace(b"=BAD=", b"=\xff\xfe\xfd=")
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(DelayedInitializerValueError, match="not UTF-8 text"):
        construct(str(tmp_path / "m.onnx") if by_path else data)
