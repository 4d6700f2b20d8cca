"""Command lines that make no sense: exit status 0, 1 or 2 and a message, never a traceback, whatever is asked."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from fuzzing import fuzz, lengths
from hypothesis import strategies as st
from mutations import INTERESTING_INTEGERS
from stand_ins import write_stand_ins
from trial_worker import TrialWorker

# A name that is not UTF-8 comes as what os.fsdecode makes of it.
ODD_NAMES = ["", " ", ".", "..", "nope", "nope/x.onnx", "-", "é.onnx", "\udcff.onnx", "\udcff.safetensors", "\x1b[2J"]
SOURCES = ["model.onnx", "inline.onnx", "artifacts", "checkpoint", "checkpoint/model.safetensors", "feeds.npz", "out"]
SOURCES += ["artifacts/model.safetensors.index.json", "model.onnx.data", "/dev/null", "https://h/x.onnx", "hf:x/y"]
SOURCES += ["a/b", "n" * 300]
DESTINATIONS = ["out/a.onnx", "out/b.onnx", "out", "nope/a.onnx", "model.onnx", "out/\udcff.onnx", "/dev/null", ""]

DIMS = ["batch=1", "batch=0", "batch=-1", "batch", "=", "sequence=4", "nope=1", "batch=٣", "batch=²"]
DIMS.append("batch=" + "9" * 5000)

numbers = st.sampled_from(INTERESTING_INTEGERS).map(str) | st.sampled_from(["", "x", "1e3", "nan", "٣", "9" * 5000])
sizes = st.sampled_from(["64MiB", "1GB", "64", "0", "-1MiB", "1e3KiB", "infGB", "nanMiB", "MiB", "1 GiB", "1kib"])
sizes |= st.builds(str.__add__, numbers, st.sampled_from(["", "MiB", "GB", "B"]))
sources = st.sampled_from(SOURCES) | st.sampled_from(ODD_NAMES)
destinations = st.sampled_from(DESTINATIONS)

# A run that repeats 2**31 times is what was asked for, not a fault.
OPTIONS: dict[str, st.SearchStrategy[str] | None] = {
    "--ram": sizes,
    "--weights-dir": sources,
    "--groups": None,
    "--json": None,
    "--debug": None,
    "--tensors": None,
    "--copy": None,
    "--overwrite": None,
    "--min-bytes": numbers,
    "--load-device": st.sampled_from(["file", "cpu", "gpu", ""]),
    "--feeds": sources,
    "--random": None,
    "--dim": st.sampled_from(DIMS),
    "--seed": numbers,
    "--repeat": st.sampled_from(["0", "1", "-1", "x", "2"]),
    "--save": destinations,
    "--timeline": st.sampled_from(["out/t.csv", "out/t.png", "out/t.x", "", "nope/t.csv"]),
    "--layers-per-group": numbers,
    "--optimize": st.sampled_from(["all", "extended", "none", "", "x"]),
    "--no-prepack": None,
    "--select": st.sampled_from(["*", "[", "encoder*", "", "\udcff"]),
    "--help": None,
    "--version": None,
    "--nope": None,
}
COMMANDS = ["inspect", "check", "plan", "run", "stream", "convert", "restore", "pack"]
USUAL = {"plan": ["--ram"], "run": ["--random"], "stream": ["--ram"]}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    command = draw(st.sampled_from(COMMANDS if draw(st.integers(0, 20)) else ["", "nope", "--help", "-x"]))
    line = [command, draw(sources)]
    if command in ("convert", "restore", "pack"):
        line.append(draw(destinations))
    chosen = [*USUAL.get(command, []), *draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=4))]
    for option in chosen:
        values = OPTIONS[option]
        line.append(option)
        if values is not None and draw(st.integers(0, 15)):
            line.append(draw(values))
    if draw(st.integers(0, 15)) == 0:
        line.insert(draw(st.integers(0, len(line))), draw(sources))
    return line


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_stand_ins(tmp_path_factory.mktemp("originals"))
    # As a file system that does not care about encodings has them.
    shutil.copy(directory / "inline.onnx", os.fsencode(directory / "\udcff.onnx"))
    shutil.copy(directory / "checkpoint" / "model.safetensors", os.fsencode(directory / "\udcff.safetensors"))
    return directory


@lengths(90, 6000)
def test_any_command_line(worker: TrialWorker, originals: Path, tmp_path: Path, examples: int) -> None:
    files = tmp_path / "files"

    def trial(line: list[str]) -> None:
        shutil.rmtree(files, ignore_errors=True)
        shutil.copytree(originals, files)
        case = files / "case.json"
        case.write_text(json.dumps(line))
        worker.run("command_line", case)

    fuzz(examples, command_lines(), trial)
