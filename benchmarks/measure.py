"""Measuring one thing in a process of its own: resident memory with its exact peak, and medians of time.

    def plain(model: str) -> Result:
        memory = PeakMemory()
        session = onnxruntime.InferenceSession(model)
        return {"peak": memory.peak(), "seconds": median_seconds(lambda: session.run(None, feeds))}

    result = in_fresh_process(plain, model="model.onnx")

The function runs in a new interpreter, so that nothing an earlier row left behind (a grown heap, library text, ONNX
Runtime's thread pools) counts for or against it. README.md says how the numbers are meant.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping

__all__ = ["MIB", "FreshProcessError", "PeakMemory", "Result", "in_fresh_process", "interleaved", "median_seconds"]
__all__ += ["peak_method", "read_through"]

MIB = 1 << 20

Result = dict[str, float]
"""What one measurement yields: named numbers, in bytes and seconds."""


# As this program was started. Libraries that a script imports meanwhile may change it for child processes:
# onnxruntime-extensions makes protobuf run in pure Python there, which is slower.
_ENVIRONMENT = dict(os.environ)


class FreshProcessError(RuntimeError):
    """A measurement's own process failed; the message ends with what it wrote to stderr."""


# --- Memory -----------------------------------------------------------------------------------------------------------


def _status_bytes(field: str) -> int:
    """A field of /proc/self/status in bytes (the kernel prints kB)."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _reset_high_water_mark() -> bool:
    try:
        with open("/proc/self/clear_refs", "w") as clear_refs:
            clear_refs.write("5")
        _status_bytes("VmHWM")
    except OSError:
        return False
    return True


def peak_method() -> str:
    """How this machine measures a peak, in words for the line under a table."""
    if _reset_high_water_mark():
        return "the kernel's own high-water mark (VmHWM)"
    return "the highest of samples taken every millisecond, which misses short peaks"


class PeakMemory:
    """Resident memory of this process above a baseline: what it is now, and the highest it has been.

    The baseline is what is resident when the object is made. On Linux the peak is the kernel's own high-water mark,
    of which a process has one: a later ``PeakMemory`` resets it for an earlier one. Elsewhere a thread takes samples.
    """

    def __init__(self) -> None:
        gc.collect()
        self.exact = _reset_high_water_mark()
        self._highest = 0
        if not self.exact:
            threading.Thread(target=self._sample, daemon=True).start()
        self.baseline = self._resident()

    def now(self) -> int:
        """Bytes resident above the baseline."""
        return self._resident() - self.baseline

    def peak(self) -> int:
        """The most bytes that were resident above the baseline."""
        highest = _status_bytes("VmHWM") if self.exact else max(self._highest, self._resident())
        return highest - self.baseline

    def _resident(self) -> int:
        if self.exact:
            return _status_bytes("VmRSS")
        import psutil

        return int(psutil.Process().memory_info().rss)

    def _sample(self) -> None:
        while True:
            self._highest = max(self._highest, self._resident())
            time.sleep(0.001)


# --- Time -------------------------------------------------------------------------------------------------------------


def median_seconds(function: Callable[[], object], *, runs: int = 15, warm_up: int = 2) -> float:
    """The median duration of ``runs`` calls, after ``warm_up`` calls that are not counted."""
    for _ in range(warm_up):
        function()
    durations = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)


def read_through(path: str) -> None:
    """Read a file once from start to end in 16 MiB reads, so that it stands in the page cache."""
    buffer = bytearray(16 * MIB)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


# --- Processes --------------------------------------------------------------------------------------------------------


def in_fresh_process(
    function: Callable[..., Result],
    *,
    timeout_seconds: float = 900,
    environment: Mapping[str, str] | None = None,
    **arguments: object,
) -> Result:
    """Call ``function(**arguments)`` in a new interpreter and return what it returns.

    ``function`` stands at the top level of a script or module file; arguments and result must be JSON.
    ``environment`` adds variables to those that this program was started with.

    Raises:
        FreshProcessError: the process failed or did not end in time.
    """
    label = f"{function.__name__}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
    with tempfile.TemporaryDirectory(prefix="measure-") as scratch:
        answer = os.path.join(scratch, "result.json")
        command = [sys.executable, os.path.abspath(__file__), function.__code__.co_filename, function.__name__]
        command += [json.dumps(arguments), answer]
        try:
            done = subprocess.run(
                command,
                env={**_ENVIRONMENT, **(environment or {})},
                capture_output=True,
                text=True,
                timeout=timeout_seconds,
            )
        except subprocess.TimeoutExpired as error:
            raise FreshProcessError(f"{label} did not end in {timeout_seconds:.0f} s") from error
        if done.returncode != 0 or not os.path.exists(answer):
            raise FreshProcessError(f"{label} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
        with open(answer) as file:
            result: Result = json.load(file)
    return result


def interleaved(rows: Mapping[str, Callable[[], Result]], *, rounds: int) -> dict[str, Result]:
    """Measure every row ``rounds`` times, in turn, and combine the results of a row.

    Numbers whose name starts with ``peak`` or ``difference`` are bounds: the highest counts. Of others the median.
    Rows take turns so that a slow spell of the machine hits all of them and ratios between rows keep their meaning.
    """
    measured: dict[str, list[Result]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, measure in rows.items():
            measured[name].append(measure())
    return {name: _combined(results) for name, results in measured.items()}


def _combined(results: Iterable[Result]) -> Result:
    results = list(results)
    combine: dict[str, Callable[[list[float]], float]] = {
        key: max if key.startswith(("peak", "difference")) else statistics.median for key in results[0]
    }
    return {key: how([r[key] for r in results]) for key, how in combine.items()}


def _call_in_this_process(path: str, function: str, arguments: str, answer: str) -> None:
    """The new interpreter's part: import the file, call the function, write down what it returns."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("measured", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["measured"] = module
    spec.loader.exec_module(module)
    result = getattr(module, function)(**json.loads(arguments))
    with open(answer, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    _call_in_this_process(*sys.argv[1:])
