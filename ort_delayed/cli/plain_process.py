"""Plain onnxruntime in a process of its own, for ``ort-delayed run --compare``.

python -m ort_delayed.cli.plain_process MODEL FEEDS.npz REPEAT OUTPUTS.npz

It prints what it measured as JSON, or what went wrong as the last line on standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext

import numpy as np
import onnxruntime

from ort_delayed.cli.errors import CommandError, message_of
from ort_delayed.cli.feeds import Feeds, save_arrays
from ort_delayed.cli.measuring import MeasuredRun, Outputs, measure

__all__ = ["run_plain"]


def run_plain(model: str, feeds: Feeds, repeat: int) -> tuple[MeasuredRun, Outputs]:
    """Run a model without delayed nodes in plain onnxruntime, in a process of its own.

    Raises:
        CommandError: the process failed; the message says what it said.
    """
    with tempfile.TemporaryDirectory(prefix="ort-delayed-") as directory:
        given, yielded = os.path.join(directory, "feeds.npz"), os.path.join(directory, "outputs.npz")
        save_arrays(given, feeds)
        command = [sys.executable, "-m", "ort_delayed.cli.plain_process", model, given, str(repeat), yielded]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise CommandError(f"plain onnxruntime failed: {said[-1]}")
        values = json.loads(done.stdout)
        with np.load(yielded, allow_pickle=False) as stored:
            outputs = {name: stored[name] for name in stored.files}
    return MeasuredRun(**values | {"run_seconds": tuple(values["run_seconds"])}), outputs


def _main(model: str, given: str, repeat: str, yielded: str) -> int:
    onnxruntime.set_default_logger_severity(4)
    with np.load(given, allow_pickle=False) as stored:
        feeds = {name: stored[name] for name in stored.files}
    try:
        # enable_fallback=0: a failed construction is not tried again, with a banner.
        make = lambda: onnxruntime.InferenceSession(model, enable_fallback=0)  # noqa: E731
        measured, outputs, _ = measure(make, feeds, int(repeat), lambda name: nullcontext())
    except Exception as error:
        print(message_of(error), file=sys.stderr)
        return 1
    save_arrays(yielded, outputs)
    print(json.dumps(dataclasses.asdict(measured)))
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
