"""External-data entries that are missing, zero, wrong, padded or doubled: what onnxruntime reads, or an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from fuzzing import fuzz, lengths
from hypothesis import strategies as st
from mutations import INTERESTING_INTEGERS
from onnx import TensorProto, helper
from trial_worker import TrialWorker
from weighted_models import model, node, value

SIDE = 32
NBYTES = SIDE * SIDE * 4

keys = st.sampled_from(["location", "offset", "length"])
odd_keys = st.sampled_from(["checksum", "Offset", "offset ", " length", "basepath", "prepacked_0", "", "location\0"])
numbers = st.sampled_from([0, 4, NBYTES, NBYTES - 4, NBYTES + 4, 2 * NBYTES, *INTERESTING_INTEGERS])
spellings = st.sampled_from(
    ["{}"] * 8 + [" {}", "{} ", "+{}", "0{}", "{}.0", "0x{}", "{}e0", "{}_0", "{}\0", "{}a", "\n{}", "\t{}\r", "-{}"]
)
locations = st.sampled_from(
    ["w.bin"] * 8
    + ["./w.bin", "sub/w.bin", "sub/../w.bin", "link.bin", "outside.bin", "sub", "", ".", "absent", "w.bin ", "w.bin\0"]
    + ["/dev/zero", "../outside/w.bin", "case.onnx", "n" * 300, "w.bin/", "//w.bin", "é.bin", "*/_ORT_MEM_ADDR_/*"]
)


@st.composite
def entries(draw: st.DrawFn) -> list[tuple[str, str]]:
    made = []
    for key in ("location", "offset", "length"):
        if draw(st.integers(0, 5)) == 0 and key != "location":
            continue
        made.append((key, draw(_value(key))))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        key = draw(keys | odd_keys)
        made.insert(draw(st.integers(0, len(made))), (key, draw(_value(key.strip()))))
    return made


def _value(key: str) -> st.SearchStrategy[str]:
    if key == "location":
        return locations
    likely = {"offset": ["0", "4096", "4"], "length": [str(NBYTES), "0", str(NBYTES)]}.get(key, ["", "x"])
    return st.sampled_from(likely) | st.builds(str.format, spellings, numbers)


shapes = st.sampled_from([[SIDE, SIDE]] * 12 + [[SIDE, SIDE, 1], [], [0], [-1], [2**31, 2**31], [2**62, 4], [1] * 9])
types = st.sampled_from([TensorProto.FLOAT] * 10 + [TensorProto.FLOAT16, TensorProto.STRING, 0, TensorProto.INT4, 99])


@st.composite
def models(draw: st.DrawFn) -> onnx.ModelProto:
    """``y = x + w``, whose sum is the same bits whatever kernel computes it."""
    w = TensorProto(name="w", dims=draw(shapes), data_type=draw(types), data_location=TensorProto.EXTERNAL)
    for key, text in draw(entries()):
        w.external_data.add(key=key, value=text)
    if draw(st.integers(0, 30)) == 0:
        w.raw_data = bytes(NBYTES)
    if draw(st.integers(0, 30)) == 0:
        w.data_location = TensorProto.DEFAULT
    kind = w.data_type if w.data_type == TensorProto.FLOAT16 else TensorProto.FLOAT
    inputs = [value("x", [SIDE, SIDE], kind)]
    if draw(st.integers(0, 8)):
        return model([node("Add", ["x", "w"], ["y"])], inputs, [value("y", None, kind)], [w])
    branch = helper.make_graph([node("Identity", ["w"], ["b"])], "branch", [], [value("b", None, kind)], [w])
    nodes = [
        node("Cast", ["x"], ["flags"], to=TensorProto.BOOL),
        node("ReduceMax", ["x"], ["top"], keepdims=0),
        node("Cast", ["top"], ["flag"], to=TensorProto.BOOL),
        node("If", ["flag"], ["i"], then_branch=branch, else_branch=branch),
        node("Add", ["x", "i"], ["y"]),
    ]
    return model(nodes, inputs, [value("y", None, kind)])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    outside = tmp_path_factory.mktemp("around")
    made = outside / "model"
    for path in (made / "sub", outside / "outside"):
        path.mkdir(parents=True)
    content = np.linspace(-1, 1, 4 * SIDE * SIDE, dtype=np.float32).tobytes()
    for name in ("w.bin", "sub/w.bin", "é.bin", "../outside/w.bin"):
        (made / name).write_bytes(content)
    (made / "link.bin").symlink_to("w.bin")
    (made / "outside.bin").symlink_to("../outside/w.bin")
    return made


@lengths(80, 8000)
def test_any_entries(worker: TrialWorker, directory: Path, examples: int) -> None:
    def trial(made: onnx.ModelProto) -> None:
        path = directory / "case.onnx"
        path.unlink(missing_ok=True)
        path.write_bytes(made.SerializeToString())
        worker.run("external_data", path, upstream="plain_session")

    fuzz(examples, models(), trial)
