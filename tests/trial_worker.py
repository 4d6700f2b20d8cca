"""A process that trials run in, so that a crash or a hang is the failure of one case, which is known by its files."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["TrialFailed", "TrialWorker"]

_SECONDS = 120.0
_TESTS = Path(__file__).resolve().parent
# Behind everything else, so that an installed package is what is tried where there is one.
_PROGRAM = f"import sys; sys.path += [{str(_TESTS)!r}, {str(_TESTS.parent)!r}]; import trials; trials.main()"


class TrialFailed(AssertionError):  # noqa: N818
    """A trial ended the process, took too long, raised what nobody documented, or left descriptors open."""


class TrialWorker:
    """Runs trials in another process, which is started again where one has taken it down."""

    def __init__(self, *, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._errors: Any = None
        self.trials = 0
        self.upstream: list[str] = []

    def __enter__(self) -> TrialWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout, self._errors):
                if stream is not None:
                    stream.close()
            self._process = None

    def run(self, trial: str, path: Path, *, upstream: str | None = None) -> dict[str, str]:
        """Try ``path``; returns what came of each step.

        Args:
            trial: the name of a trial in ``trials``.
            path: the case.
            upstream: a trial by which plain onnxruntime is asked, where the process died: if it dies of the same file,
                the case says nothing about this project.
        """
        self.trials += 1
        try:
            return self._ask(trial, path)
        except TrialFailed as failed:
            if upstream is not None and "died" in str(failed):
                with TrialWorker(seconds=self._seconds) as other:
                    try:
                        other._ask(upstream, path)
                    except TrialFailed as plain:
                        if "died" in str(plain):
                            self.upstream.append(str(plain))
                            return {"upstream": "died"}
            raise

    def _ask(self, trial: str, path: Path) -> dict[str, str]:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"trial": trial, "path": str(path)}) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], self._seconds)
        line = process.stdout.readline() if ready else ""
        if line:
            answer = json.loads(line)
            if answer["fault"]:
                raise TrialFailed(f"{trial} of {path}:\n{answer['fault']}")
            found: dict[str, str] = answer["found"]
            return found
        if ready:
            process.wait()
            ended = signal.Signals(-process.returncode).name if process.returncode < 0 else str(process.returncode)
            how = f"the process died ({ended})"
        else:
            process.send_signal(signal.SIGABRT)  # faulthandler shows where it was
            time.sleep(0.5)
            how = f"nothing came of it in {self._seconds:.0f} s"
        self._errors.seek(0)
        said = self._errors.read()[-6000:]
        self.close()
        raise TrialFailed(f"{trial} of {path}: {how}\n{said}")

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed with the process)
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                # A test that imports onnxruntime-extensions itself leaves this one behind (ops/extensions.py).
                env={k: v for k, v in os.environ.items() if k != "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"},
            )
        return self._process
