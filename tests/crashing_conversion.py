"""Conversions that are cut off: a script that stops one at its k-th step, for every k, and reports what is left.

Run as ``python crashing_conversion.py DIRECTORY KIND``. KIND is ``die`` (the process ends there and then, as by
SIGKILL), ``full`` (the step fails with ENOSPC) or ``random`` (SIGKILL at random moments). Prints one line of JSON a
trial: the step, how the conversion ended, whether the source is intact, what the destination holds, and what else
lies there.
"""

import builtins
import errno
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import onnx

from ort_delayed import convert_model, new_files
from ort_delayed.ops.attributes import is_delayed, read_attributes

MAX_STEPS = 200
UNTOUCHED = 100  # how a conversion ends that is through before the step
counted = 0


def interrupt_at(step: int, kind: str) -> None:
    """Make the ``step``-th call that changes the file system the last one."""

    def wrapped(function):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            global counted
            counted += 1
            if counted == step and kind == "die":
                os._exit(9)
            if counted == step:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args, **kwargs)

        return call

    for name in ("open", "fsync", "replace", "link", "unlink", "rename"):
        setattr(os, name, wrapped(getattr(os, name)))
    new_files.PendingFile.write = wrapped(new_files.PendingFile.write)  # type: ignore[method-assign]


def held(path: Path) -> str:
    """``absent``, or which of the two sources the model at ``path`` is a conversion of."""
    if not path.exists():
        return "absent"
    graph = onnx.load(path, load_external_data=False).graph
    values = []
    for node in filter(is_delayed, graph.node):
        a = read_attributes(node)
        data = (path.parent / a.filename).read_bytes()[a.offset : a.offset + a.nbytes]
        values.append(np.frombuffer(data, np.float32))
    assert len(values) == 2
    assert all(len(set(v.tolist())) == 1 and v.size == 5000 for v in values)
    return "".join(sorted({"AB"[int(v[0])] for v in values}))


def trial(directory: Path, step: int, kind: str, overwrite: bool) -> dict[str, object]:
    destination = directory / "out" / "m.onnx"
    sources = {name: (directory / name).read_bytes() for name in "AB"}
    child = os.fork()
    if child == 0:
        os.close(1)
        code = 0
        try:
            if kind != "random":
                interrupt_at(step, kind)
            convert_model(directory / "B", destination, overwrite=overwrite)
            while kind == "random":
                convert_model(directory / random.choice("AB"), destination, overwrite=True)
            code = 0 if counted >= step else UNTOUCHED
        except OSError as error:
            code = error.errno or 1
        os._exit(code)
    if kind == "random":
        time.sleep(random.Random(step).uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    intact = all((directory / name).read_bytes() == data for name, data in sources.items())
    others = sorted(p.name for p in destination.parent.iterdir() if p != destination)
    return {"step": step, "code": code, "intact": intact, "held": held(destination), "others": others}


def main(directory: Path, kind: str) -> None:
    for overwrite in (False, True):
        for step in range(1, MAX_STEPS):
            out = directory / "out"
            for path in list(out.iterdir()):
                path.unlink()
            if overwrite:
                convert_model(directory / "A", out / "m.onnx")
            result = trial(directory, step, kind, overwrite)
            builtins.print(json.dumps({"overwrite": overwrite, **result}), flush=True)
            if result["code"] == UNTOUCHED or (kind == "random" and step == 15):
                break


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
