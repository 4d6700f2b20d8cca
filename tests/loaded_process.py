"""A process under load: threads that run, close and open sessions of every kind at once, and what is left of it.

``python loaded_process.py DIRECTORY SECONDS`` prints a line of JSON: what was done, what was refused, and resident
memory over time. Wrong outputs, errors of another kind than a kept budget, and anything left behind end it with an
assertion.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

import ort_delayed
from ort_delayed.loader import platform
from ort_delayed.ops import kernel

THREADS, SESSIONS = 8, 50
LAYERS, SIDE = 6, 256  # 1.5 MiB
ROWS = (1, 2, 3, 5, 8, 16, 33, 64)
BUDGET = 96 << 20  # what the other threads take while a run is under way counts, too
MIB = 1 << 20


def chain() -> onnx.ModelProto:
    nodes, weights, last = [], [], "x"
    for i in range(LAYERS):
        generator = np.random.default_rng(i)
        weight = (generator.standard_normal((SIDE, SIDE)) / np.sqrt(SIDE)).astype(np.float32)
        bias = generator.standard_normal(SIDE).astype(np.float32)
        weights += [numpy_helper.from_array(weight, f"w{i}"), numpy_helper.from_array(bias, f"b{i}")]
        out = "y" if i == LAYERS - 1 else f"h{i}"
        nodes += [
            helper.make_node("MatMul", [last, f"w{i}"], [f"m{i}"]),
            helper.make_node("Add", [f"m{i}", f"b{i}"], [f"a{i}"]),
            helper.make_node("Tanh", [f"a{i}"], [out]),
        ]
        last = out
    values = [helper.make_tensor_value_info(n, 1, ["n", SIDE]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "chain", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def options() -> onnxruntime.SessionOptions:
    made = onnxruntime.SessionOptions()
    made.intra_op_num_threads = 1  # so that threads of ONNX Runtime's pools are not what is counted
    return made


Session = onnxruntime.InferenceSession


def kinds(directory: Path) -> dict[str, Callable[[], Session]]:
    """How a session of each kind is made. Those under budgets have a file of their own: what maps it is told apart."""
    for name in ("model", "budgeted"):
        path = directory / f"{name}.onnx"
        onnx.save_model(chain(), path, save_as_external_data=True, location=f"{name}.data", size_threshold=512)
    source = directory / "model.onnx"
    ort_delayed.convert_model(source, directory / "file.onnx", min_bytes=512)
    ort_delayed.convert_model(source, directory / "cpu.onnx", min_bytes=512, load_device="cpu")
    for name in ("packed", "packed-budgeted"):
        ort_delayed.pack_model(source, directory / f"{name}.onnx")

    def session(name: str, **settings: Any) -> Callable[[], Session]:
        return lambda: ort_delayed.InferenceSession(directory / name, options(), enable_fallback=0, **settings)

    def prepared() -> Session:
        used = options()
        return Session(ort_delayed.prepare_model(directory / "file.onnx", used), used, enable_fallback=0)

    return {
        "file": session("file.onnx"),
        "confined": session("file.onnx", weights_dir=directory),
        "cpu": session("cpu.onnx"),
        "plain session": prepared,
        "no delayed nodes": session("model.onnx"),
        "packed": session("packed.onnx"),
        "budget": session("budgeted.onnx", ram_budget=BUDGET),
        "packed under a budget": session("packed-budgeted.onnx", ram_budget=BUDGET),
    }


class Load:
    """The sessions, what they are to compute, and what has happened."""

    def __init__(self, directory: Path) -> None:
        self.made = kinds(directory)
        names = list(self.made)
        self.kinds = [names[i % len(names)] for i in range(SESSIONS)]
        self.sessions: list[Session | None] = [None] * SESSIONS
        self.feeds = {n: np.random.default_rng(n).standard_normal((n, SIDE)).astype(np.float32) for n in ROWS}
        self.expected: dict[tuple[str, int], bytes] = {}
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.ends = 0.0
        self._lock = threading.Lock()

    def learn(self) -> None:
        """Each kind's outputs, which are to be the same bytes from then on, and near those of plain ONNX Runtime."""
        reference = self.made["no delayed nodes"]()
        for kind, make in self.made.items():
            session = make()
            for n, x in self.feeds.items():
                (y,) = session.run(None, {"x": x})
                np.testing.assert_allclose(y, reference.run(None, {"x": x})[0], rtol=1e-3, atol=1e-5)
                self.expected[kind, n] = y.tobytes()

    def work(self, seed: int) -> None:
        generator = random.Random(seed)
        while time.monotonic() < self.ends and not self.errors:
            index = generator.randrange(SESSIONS)
            kind = self.kinds[index]
            try:
                session = self.sessions[index]
                if session is None or generator.random() < 0.04:
                    del session
                    self.sessions[index] = None  # others may be running it
                    session = self.sessions[index] = self.made[kind]()
                    self._count("made")
                for _ in range(generator.randrange(1, 6)):
                    n = generator.choice(ROWS)
                    (y,) = session.run(None, {"x": self.feeds[n]})
                    self._count("runs")
                    if y.tobytes() != self.expected[kind, n]:
                        self.errors.append(f"a run of a '{kind}' session, {n} rows, gave other outputs")
                        return
            except ort_delayed.RamBudgetExceeded as refused:
                self._count(f"refused {refused.operation}")
            except BaseException as error:
                self.errors.append(f"{kind}: {error!r}")
                raise

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


def left() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "handles": len(kernel._table.entries),
    }


def main(directory: Path, seconds: float) -> None:
    load = Load(directory)
    load.learn()
    data = {os.path.realpath(p) for p in directory.iterdir()}
    before = left()
    assert not platform.file_mappings(data)
    load.ends = time.monotonic() + seconds
    threads = [threading.Thread(target=load.work, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    samples: list[int] = []
    while time.monotonic() < load.ends and not load.errors:
        time.sleep(min(0.25, seconds / 40))
        samples.append(platform.resident_bytes() or 0)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    assert not load.errors, load.errors
    load.sessions = [None] * SESSIONS
    after = left()
    assert after == before, (before, after)
    assert not platform.file_mappings(data), "mappings of weights are left"
    # What is resident differs with what is under way: medians of thirds of what comes behind the warm-up.
    warm = samples[len(samples) // 4 :]
    third = len(warm) // 3
    medians = [sorted(warm[i * third : (i + 1) * third])[third // 2] for i in range(3)]
    refused = sum(n for what, n in load.counts.items() if what.startswith("refused"))
    result = {
        "counts": load.counts,
        "MiB": [round(s / MIB, 1) for s in samples[:: max(1, len(samples) // 12)]],
        "medians": [round(m / MIB, 1) for m in medians],
        "in the end": round((platform.resident_bytes() or 0) / MIB, 1),
    }
    print(json.dumps(result), flush=True)
    assert refused * 10 < load.counts["runs"], "too many runs were refused"
    grown = medians[2] - medians[0]
    assert grown < max(16 * MIB, medians[0] // 10), f"resident memory grew by {grown / MIB:.1f} MiB: {result}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
