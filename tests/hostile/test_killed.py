"""Packing and restoring killed at random moments: the destination is whole or absent, and the next attempt works.

Converting: ``tests/ort_delayed/test_conversion_outputs.py`` (at every step, on a full disk, at random moments).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hostile_operations import prepare
from subprocesses import run_snippet

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no fork")

KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from hostile_operations import WRITING, contents
import ort_delayed

sources, out, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
before = contents(sources)
function = getattr(ort_delayed, f"{name}_model")
source = sources / ("delayed.onnx" if name == "restore" else "model.onnx")

def child(work):
    # Nothing of ONNX Runtime has been used in this process, so there are no threads that a fork would lose.
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid

def whole(path):
    # What a session computes on it, in a process of its own.
    from hostile_operations import _check
    pid = child(lambda: _check(ort_delayed.InferenceSession(path, enable_fallback=0), sources))
    return os.waitpid(pid, 0)[1] == 0

began = time.perf_counter()
assert os.waitpid(child(lambda: WRITING[name](sources, out)), 0)[1] == 0
seconds = time.perf_counter() - began
reference = contents(out)
for path in out.iterdir():
    path.unlink()

generator, killed, done = random.Random(7), 0, 0
for trial in range(int(sys.argv[4])):
    overwrite = trial % 2 == 1
    if overwrite and not (out / "result.onnx").exists():
        assert os.waitpid(child(lambda: WRITING[name](sources, out)), 0)[1] == 0
    pid = child(lambda: function(source, out / "result.onnx", overwrite=overwrite))
    time.sleep(generator.uniform(0, 1.1 * seconds))
    os.kill(pid, signal.SIGKILL)
    killed += os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert contents(sources) == before, "a source was touched"
    if overwrite:
        assert (out / "result.onnx").exists(), "overwriting left nothing"
    if (out / "result.onnx").exists():
        done += 1
        now = contents(out)
        assert reference.items() <= now.items(), (sorted(reference), sorted(now))
        assert whole(out / "result.onnx")
    if not overwrite:
        # The second attempt works, whatever the first one left.
        pid = child(lambda: function(source, out / "result.onnx", overwrite=True))
        assert os.waitpid(pid, 0)[1] == 0
        assert reference.items() <= contents(out).items()
        (out / "result.onnx").unlink()
        for path in out.glob("*.weights"):
            path.unlink()
print(f"{name}: {seconds:.2f} s, {killed} killed, {done} whole")
assert killed > 0
left = sorted(p.name for p in out.iterdir() if p.name not in reference)
assert all(n.startswith(".result.onnx") for n in left), left
assert name != "pack" or not [n for n in left if n.endswith(".packing")][1:], left
"""


@pytest.mark.parametrize("name", ["pack", "restore"])
def test_killed_at_random_moments(name: str, tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "out").mkdir()
    prepare(tmp_path / "sources")
    run_snippet(KILLED, tmp_path / "sources", tmp_path / "out", name, "8", timeout=120)
