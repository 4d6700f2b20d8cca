"""The command line as a whole: help, exit statuses, errors in a line or two, pipes, interrupts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from ort_delayed.cli.main import build_parser

# As the script that pip makes.
SCRIPT = "import sys; sys.argv[0] = 'ort-delayed'; from ort_delayed.cli import main; sys.exit(main())"
COMMANDS = ["inspect", "check", "plan", "run", "stream", "convert", "restore", "pack"]


def start(*arguments: str | Path, **settings: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | settings
    return subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def test_help_names_every_command(command):
    status, out, _ = command("--help")
    assert status == 0
    assert all(f"\n    {name}" in out for name in COMMANDS)
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(command, name):
    status, out, _ = command(name, "--help")
    assert status == 0
    assert out.startswith(f"usage: ort-delayed {name}")
    assert "--debug" in out


def test_help_and_version_load_neither_onnxruntime_nor_onnx():
    probe = (
        "import sys\nsys.argv = ['ort-delayed', '--help']\n"
        "from ort_delayed.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(sorted({'onnx', 'onnxruntime', 'onnxruntime_extensions', 'numpy', 'rich'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_package_is_whole_where_the_program_is_another():
    code = "import sys; sys.argv[0] = 'ort-delayed.py.serve'; import ort_delayed; ort_delayed.InferenceSession"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_python_m_ort_delayed_is_the_command_line(files):
    done = subprocess.run(
        [sys.executable, "-m", "ort_delayed", "inspect", "model.onnx"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "ONNX model" in done.stdout


def test_version(command):
    status, out, _ = command("--version")
    assert status == 0
    assert out.startswith("ort-delayed 0.")


def test_an_unknown_option_shows_the_usage_of_its_command(command):
    status, _, err = command("run", "model.onnx", "--rma", "64MiB")
    assert status == 2
    assert err.startswith("usage: ort-delayed run")
    assert "unrecognized arguments: --rma 64MiB" in err


@pytest.mark.parametrize(
    "arguments", [("check", "model.onnx"), ("plan", "model.onnx", "--ram", "1GB"), ("run", "model.onnx", "--random")]
)
def test_a_mistyped_weights_dir_confines_nothing_and_is_refused(command, arguments):
    for mistyped, said in (("nope", "does not exist"), ("model.onnx", "is not a directory")):
        status, _, err = command(*arguments, "--weights-dir", mistyped)
        assert status == 2
        assert f"'{mistyped}' {said}" in err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("fly",),
        ("inspect",),
        ("plan", "model.onnx"),
        ("plan", "model.onnx", "--ram", "much"),
        ("plan", "model.onnx", "--ram", "-1"),
        ("stream", "checkpoint", "--ram", "1GB", "--layers-per-group", "0"),
        ("convert", "model.onnx", "d.onnx", "--min-bytes", "-1"),
        ("convert", "model.onnx", "d.onnx", "--load-device", "gpu"),
        ("pack", "model.onnx", "p.onnx", "--optimize", "most"),
        ("run", "model.onnx", "--repeat", "0"),
        ("run", "model.onnx", "--dim", "batch"),
        ("run", "model.onnx", "--dim", "batch=²"),
        ("run", "model.onnx", "--dim", "batch=" + "9" * 5000),
        ("plan", "model.onnx", "--ram", "9" * 400),
        ("plan", "model.onnx", "--ram", "9" * 400 + ".5GB"),
        ("run", "model.onnx", "--dim", "heads=2"),
        ("run", "model.onnx", "--feeds", "feeds.npz", "--dim", "batch=2"),
        ("run", "model.onnx", "--feeds", "feeds.npz", "--random"),
        ("run", "model.onnx", "--timeline", "memory.gif"),
        ("run", "model.onnx", "--timeline", "nowhere/memory.csv"),
    ],
)
def test_a_wrong_command_line_is_2(command, arguments):
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert "error: " in err


@pytest.mark.parametrize("arguments", [("inspect",), ("check",), ("stream", "--ram", "1GB"), ("plan", "--ram", "1GB")])
def test_a_file_that_is_not_there_is_1(command, arguments):
    status, out, err = command(*arguments, "nowhere.onnx")
    assert (status, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "nowhere.onnx" in err


def test_what_is_no_model_is_1_in_one_line(command, files):
    (files / "garbage.onnx").write_bytes(b"\xff" * 100)
    for arguments in (("inspect",), ("plan", "--ram", "1GB"), ("run",)):
        status, out, err = command(*arguments, "garbage.onnx")
        assert (status, out) == (1, "")
        assert "not an ONNX model" in err
        assert len(err.splitlines()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux")
@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_file_name_that_is_no_text_is_shown_escaped(files, arguments):
    shutil.copy(files / "inline.onnx", b"\xff.onnx")
    done = subprocess.run(
        [sys.executable, "-m", "ort_delayed", "inspect", b"\xff.onnx", *arguments], capture_output=True, check=True
    )
    assert "\\udcff.onnx" in done.stdout.decode()
    if arguments:
        assert json.loads(done.stdout)["source"].endswith("\udcff.onnx")


def test_debug_shows_the_traceback_and_keeps_the_status(command):
    status, _, err = command("inspect", "nowhere.onnx", "--debug")
    assert status == 1
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("ort-delayed inspect: error:")


def test_an_error_of_no_known_kind_says_where_it_came_from(command, monkeypatch):
    import ort_delayed.inspecting

    def fail(source):
        raise KeyError("surprise")

    monkeypatch.setattr(ort_delayed.inspecting, "inspect_weights", fail)
    status, _, err = command("inspect", "model.onnx")
    assert status == 1
    assert len(err.splitlines()) == 2
    assert "KeyError in test_main.py" in err
    assert "--debug" in err


def test_a_reader_that_goes_away_is_no_error(files):
    process = start("inspect", "model.onnx", "--json")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_output_that_is_piped_has_no_colour_and_80_columns(files):
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": "200"}
    for arguments in (("inspect", "model.onnx", "--tensors"), ("stream", "checkpoint", "--ram", "64MiB")):
        done = start(*arguments, env=environment)
        out, err = done.communicate(timeout=60)
        assert (done.returncode, err) == (0, "")
        assert "\x1b" not in out
        tables = [line for line in out.splitlines() if str(files) not in line]
        assert max(map(len, tables)) <= 80


def big_model(path: Path, count: int, nbytes: int) -> None:
    """A model whose weights are holes of a sparse file."""
    side = int((nbytes // 4) ** 0.5)
    nodes, initializers = [], []
    for i in range(count):
        nodes.append(helper.make_node("MatMul", [f"h{i}" if i else "x", f"w{i}"], [f"h{i + 1}"]))
        tensor = TensorProto(name=f"w{i}", data_type=1, dims=[side, side], data_location=TensorProto.EXTERNAL)
        for key, value in (("location", "big.bin"), ("offset", i * side * side * 4), ("length", side * side * 4)):
            tensor.external_data.add(key=key, value=str(value))
        initializers.append(tensor)
    x, y = (helper.make_tensor_value_info(n, 1, ["batch", side]) for n in ("x", f"h{count}"))
    graph = helper.make_graph(nodes, "big", [x], [y], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    with open(path.with_name("big.bin"), "wb") as file:
        file.truncate(count * side * side * 4)


def interrupted(process: subprocess.Popen[str], when: object) -> tuple[str, str]:
    """Interrupt the process once ``when()`` holds; its output."""
    deadline = time.monotonic() + 60
    while not when() and process.poll() is None and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=60)
    finally:
        process.kill()  # one that goes on would keep a core from all tests that follow


@pytest.mark.parametrize("arguments", [("convert", "--copy"), ("pack", "--optimize", "none")])
def test_an_interrupt_is_130_and_leaves_no_file(tmp_path, arguments):
    big_model(tmp_path / "big.onnx", 24, 16 << 20)
    before = set(os.listdir(tmp_path))
    name, *options = arguments
    process = start(name, "big.onnx", "out.onnx", *options, cwd=tmp_path)
    out, err = interrupted(process, lambda: set(os.listdir(tmp_path)) - before)
    assert (process.returncode, out) == (130, "")
    assert err == f"ort-delayed {name}: interrupted\n"
    assert set(os.listdir(tmp_path)) == before


def test_an_interrupted_run_is_130(tmp_path):
    big_model(tmp_path / "big.onnx", 8, 16 << 20)
    arguments = ("big.onnx", "--ram", "96MiB", "--repeat", "100000", "--timeline", "memory.csv")
    process = start("run", *arguments, cwd=tmp_path)
    out, err = interrupted(process, lambda: time.sleep(4) or True)
    assert (process.returncode, out) == (130, "")
    assert err == "ort-delayed run: interrupted\n"
    assert (tmp_path / "memory.csv").read_text().startswith("seconds,")


def test_an_interrupt_in_the_library_is_130(command, monkeypatch):
    import ort_delayed.inspecting

    def interrupt(source):
        raise KeyboardInterrupt

    monkeypatch.setattr(ort_delayed.inspecting, "inspect_weights", interrupt)
    assert command("inspect", "model.onnx") == (130, "", "ort-delayed inspect: interrupted\n")


def test_every_command_that_prints_a_table_prints_json():
    actions = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr,index]
    assert set(actions) == set(COMMANDS)
    for parser in actions.values():
        assert "--json" in parser.format_help()
