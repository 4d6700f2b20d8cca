"""Trials of one case each, for fuzzing: every public way into the project, tried on a file that may be anything.

In a process of its own, :func:`main` is a worker: it reads a line of JSON a trial from standard input, tries it, and
answers with a line: what came of each step, and what is wrong, descriptors that stay open included.
:class:`trial_worker.TrialWorker` is the other end. A trial that takes the process down is known by its case, which its
parent wrote to a file before.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import io
import json
import os
import resource
import shutil
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnxruntime
import safetensors
from onnx.reference import ReferenceEvaluator

import ort_delayed
import ort_delayed.ops
from ort_delayed.checking import check_weights
from ort_delayed.clock import install_clock
from ort_delayed.inspecting import inspect_weights
from ort_delayed.loader.external_data import has_external_data
from ort_delayed.loader.onnx_files import iter_initializers
from ort_delayed.loader.safetensors_files import read_shard
from ort_delayed.ops.kernel import Binding
from ort_delayed.pacing import possible_paces, possible_ticks
from ort_delayed.planning import plan_session

__all__ = ["TRIALS", "is_documented", "tried"]

_MEMORY_BYTES = 4 << 30  # of address space, so that a claim to a terabyte is refused here and not by the machine
_BUDGET = 1 << 29
_SECONDS_PER_RUN = 5.0
Trial = Callable[[Path], object]

# ValueError and RuntimeError themselves, not whatever derives from them: a UnicodeDecodeError or a RecursionError is a
# fault that nobody thought of. What our own modules and onnxruntime's define is documented, and so is OSError.
_DOCUMENTED = (ValueError, RuntimeError, MemoryError)


def is_documented(error: BaseException) -> bool:
    """Whether an error is of a kind that the documentation names."""
    kind = type(error)
    return (
        kind in _DOCUMENTED
        or isinstance(error, OSError)
        or kind.__module__.split(".")[0] in ("ort_delayed", "onnxruntime")
        # A session under a budget says it of bytes that are no model.
        or kind.__name__ == "DecodeError"
        or _comes_from_onnxruntime(error)
    )


def _comes_from_onnxruntime(error: BaseException) -> bool:
    """Whether onnxruntime itself raised it: its messages quote names that are not UTF-8, which Python refuses."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals.get("__name__", "").split(".")[0] == "onnxruntime"


def tried(step: Callable[[], object]) -> str:
    """``done``, or the type of the documented error with which ``step`` refused; any other error is raised."""
    try:
        step()
    except Exception as error:
        if not is_documented(error):
            raise
        # What an error says must be text that can be shown.
        str(error).encode("utf-8", "surrogatepass")
        return type(error).__name__
    return "done"


# The trials


def read_model(path: Path) -> Mapping[str, str]:
    """What only reads a model or writes another one; no session is made."""
    out = path.parent / "out"
    found = {
        "inspect": tried(lambda: inspect_weights(path)),
        "check": tried(lambda: check_weights(path)),
        "plan": tried(lambda: plan_session(path, _BUDGET)),
        "stream": tried(lambda: ort_delayed.StreamingWeightLoader(path, ram_budget=_BUDGET).stream(lambda group: None)),
        "convert": tried(lambda: ort_delayed.convert_model(path, out / "c.onnx", min_bytes=1, overwrite=True)),
        "verify": tried(lambda: ort_delayed.verify_packed_model(path)),
    }
    for name in ("c.onnx", path.name):
        source = out / name if name == "c.onnx" else path
        if source.exists():
            destination = out / f"r_{name}"
            found[f"restore {name}"] = tried(lambda s=source, d=destination: _restored(s, d))  # type: ignore[misc]
    return found


def _restored(source: Path, destination: Path) -> None:
    ort_delayed.restore_model(source, destination, overwrite=True)


def run_model(path: Path) -> Mapping[str, str]:
    """Sessions of every kind on a model, and a run of each that can be made; the numbers must agree."""
    restored = path.parent / "restored.onnx"
    found = {"restore": tried(lambda: _restored(path, restored))}
    outputs: dict[str, list[Any]] = {}

    def run(name: str, make: Callable[[], onnxruntime.InferenceSession]) -> None:
        def step() -> None:
            session = make()
            outputs[name] = _run(session)

        found[name] = tried(step)

    run("session", lambda: ort_delayed.InferenceSession(str(path), _unoptimised()))
    run("bytes", lambda: ort_delayed.InferenceSession(path.read_bytes(), _unoptimised(), weights_dir=path.parent))
    run("plain session", lambda: _prepared(path))
    run("budget", lambda: ort_delayed.InferenceSession(str(path), _unoptimised(), ram_budget=_BUDGET))
    run("installed", lambda: _installed(path))
    if found["restore"] == "done":
        run("restored", lambda: onnxruntime.InferenceSession(str(restored), _unoptimised(), enable_fallback=0))
    _check_agreement(outputs)
    return found


def pack_model(path: Path) -> Mapping[str, str]:
    """Packing, checking and running what came of it."""
    packed = path.parent / "out" / "packed.onnx"
    found = {"pack": tried(lambda: ort_delayed.pack_model(path, packed, overwrite=True))}
    if found["pack"] == "done":
        found["verify"] = tried(lambda: ort_delayed.verify_packed_model(packed))
        found["run"] = tried(lambda: _run(ort_delayed.InferenceSession(str(packed))))
    return found


def packed_model(path: Path) -> Mapping[str, str]:
    """A packed model that was tampered with: all that looks at its manifest, with and without a budget."""
    return {
        "verify": tried(lambda: ort_delayed.verify_packed_model(path)),
        "check": tried(lambda: check_weights(path)),
        "inspect": tried(lambda: inspect_weights(path)),
        "plan": tried(lambda: plan_session(path, _BUDGET)),
        "run": tried(lambda: _run(ort_delayed.InferenceSession(str(path)))),
        "budget": tried(lambda: _run(ort_delayed.InferenceSession(str(path), ram_budget=_BUDGET))),
        "convert": tried(lambda: ort_delayed.convert_model(path, path.parent / "out" / "c.onnx", overwrite=True)),
    }


def external_data(path: Path) -> Mapping[str, str]:
    """Plain onnxruntime and every kind of session on a model with external data: who accepts it gives the same values.

    What a converted or packed model holds is what onnxruntime makes of the source; where it refuses that, so may we.
    """
    outputs: dict[str, list[Any]] = {}
    found: dict[str, str] = {}

    def run(name: str, make: Callable[[], onnxruntime.InferenceSession]) -> None:
        def step() -> None:
            session = make()
            outputs[name] = _run(session)

        found[name] = tried(step)

    def converted(device: str) -> onnxruntime.InferenceSession:
        made = path.parent / "out" / "converted.onnx"
        ort_delayed.convert_model(path, made, min_bytes=1, load_device=device, overwrite=True)
        return ort_delayed.InferenceSession(str(made), _unoptimised())

    def packed() -> onnxruntime.InferenceSession:
        made = path.parent / "out" / "packed.onnx"
        ort_delayed.pack_model(path, made, overwrite=True)
        return ort_delayed.InferenceSession(str(made))

    run("plain", lambda: onnxruntime.InferenceSession(str(path), _unoptimised(), enable_fallback=0))
    run("budget", lambda: ort_delayed.InferenceSession(str(path), _unoptimised(), ram_budget=_BUDGET))
    run("installed", lambda: _installed(path))
    run("file", lambda: converted("file"))
    run("cpu", lambda: converted("cpu"))
    run("packed", packed)
    _check_agreement(outputs)
    found["check"] = "done" if tried(lambda: _demand(bool(check_weights(path)))) == "done" else "refused"
    return found


def every_way(path: Path) -> Mapping[str, str]:
    """A model that is known to run, in every way: each must run it, with the same numbers.

    The inputs stand beside the model. ``hostile/test_differential.py`` says which ways give the same bits.
    """
    with np.load(path.with_suffix(".npz")) as stored:
        feeds = dict(stored)
    out = path.parent / "out"
    outside = out / "outside.onnx"
    onnx.save_model(onnx.load(path), outside, save_as_external_data=True, location="o.bin", size_threshold=64)
    # Values of Constant nodes may be external as well, and are not installed.
    saved = onnx.load(outside, load_external_data=False)
    has_outside = any(map(has_external_data, iter_initializers(saved.graph)))
    names = {d: str(out / f"{d}.onnx") for d in ("file", "cpu", "restored", "packed")}
    for device in ("file", "cpu"):
        ort_delayed.convert_model(path, names[device], min_bytes=1, load_device=device)
    ort_delayed.restore_model(names["file"], names["restored"])
    ort_delayed.pack_model(path, names["packed"])

    def run(session: onnxruntime.InferenceSession) -> list[Any]:
        outputs: list[Any] = session.run(None, feeds)
        return outputs

    def plain(model: str, options: onnxruntime.SessionOptions) -> list[Any]:
        return run(onnxruntime.InferenceSession(model, options, enable_fallback=0))

    def ours(model: str, options: onnxruntime.SessionOptions, **settings: Any) -> list[Any]:
        return run(ort_delayed.InferenceSession(model, options, **settings))

    def installed(options: onnxruntime.SessionOptions) -> list[Any]:
        return run(ort_delayed.stream_install(str(outside), options, ram_budget=_BUDGET).create_session())

    def reference(model: str) -> list[Any]:
        op = ort_delayed.ops.DelayedInitializer.in_directory(out)
        # The evaluator does not hand new operators on to the functions of a model, nor the inliner their imports.
        inlined = onnx.inliner.inline_local_functions(onnx.load(model))
        if all(opset.domain != "ai.rt" for opset in inlined.opset_import):
            inlined.opset_import.add(domain="ai.rt", version=1)
        outputs: list[Any] = ReferenceEvaluator(inlined, new_ops=[op]).run(None, feeds)
        return outputs

    def announced(model: str, options: onnxruntime.SessionOptions, *, is_optimized: bool) -> list[Any]:
        """With a tick before every weight that may have one."""
        made, binding, called = onnx.load(model), Binding(), []
        paces = possible_paces(made, {t.name for t in made.graph.initializer}, is_optimized=is_optimized)
        names = sorted(possible_ticks(made.graph) | set(paces))
        install_clock(made, {n: functools.partial(called.append, n) for n in names}, binding, None, paces)
        ort_delayed.register_custom_ops(options)
        outputs = run(onnxruntime.InferenceSession(made.SerializeToString(), options, enable_fallback=0))
        binding.close()
        # Optimizers leave out a node whose result nobody takes.
        assert len(called) == len(set(called))
        announcements.append(len(called))
        return outputs

    announcements: list[int] = []
    same_kernels: dict[str, dict[str, list[Any]]] = {
        "default": {
            "plain": plain(str(path), _single_threaded()),
            "restored": plain(names["restored"], _single_threaded()),
            "packed": ours(names["packed"], _single_threaded()),
            "packed, plain": plain(names["packed"], _single_threaded(optimised=False)),
            "packed, budget": ours(names["packed"], _single_threaded(), ram_budget=_BUDGET),
            "packed, announced": announced(names["packed"], _single_threaded(optimised=False), is_optimized=True),
        },
        "not prepacked": {
            "plain, not prepacked": plain(str(path), _single_threaded(prepacked=False)),
            "budget": ours(str(path), _single_threaded(), ram_budget=_BUDGET),
            "announced": announced(str(path), _single_threaded(prepacked=False), is_optimized=False),
        },
        "unoptimised": {
            "plain, unoptimised": plain(str(path), _unoptimised()),
            **{d: ours(names[d], _unoptimised()) for d in ("file", "cpu")},
            "file, budget": ours(names["file"], _unoptimised(), ram_budget=_BUDGET),
        },
        "optimised": {d: ours(names[d], _single_threaded()) for d in ("file", "cpu")},
        "reference": {"reference": reference(str(path)), "reference, file": reference(names["file"])},
    }
    if has_outside:
        same_kernels["not prepacked"]["installed"] = installed(_single_threaded())
        same_kernels["unoptimised"]["installed, unoptimised"] = installed(_unoptimised())
    first = same_kernels["default"]["plain"]
    for of, outputs in same_kernels.items():
        _check_agreement(outputs)
        assert _close(next(iter(outputs.values())), first), (
            f"{of!r} is not close to default onnxruntime:\n{outputs}\n{first}"
        )
    return {name: "done" for outputs in same_kernels.values() for name in outputs} | {
        "announcements": str(sum(announcements))
    }


def _close(left: list[Any], right: list[Any]) -> bool:
    """Whether the outputs are those of another order of additions, or of float16 computed in float32."""
    for a, b in zip(left, right, strict=True):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype.kind != "f":
            if not np.array_equal(a, b):
                return False
            continue
        wide, other = a.astype(np.float64), b.astype(np.float64)
        scale = np.max(np.abs(other[np.isfinite(other)]), initial=1e-3)
        tolerance = 3e-2 if a.dtype == np.float16 else 1e-3
        if not np.allclose(wide, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
            return False
    return True


def _demand(condition: bool) -> None:
    if not condition:
        raise ValueError("no")


def _check_agreement(outputs: Mapping[str, list[Any]]) -> None:
    names = list(outputs)
    for name in names[1:]:
        if not _same(outputs[name], outputs[names[0]]):
            raise AssertionError(
                f"outputs of {name!r} and of {names[0]!r} differ:\n{outputs[name]}\n{outputs[names[0]]}"
            )


def default_session(path: Path) -> Mapping[str, str]:
    """Plain onnxruntime with its own settings, which packed weights are for."""
    return {"run": tried(lambda: _run(onnxruntime.InferenceSession(str(path), enable_fallback=0)))}


def plain_session(path: Path) -> Mapping[str, str]:
    """Plain onnxruntime on the same file: what it dies of is not this project's fault."""
    return {"run": tried(lambda: _run(onnxruntime.InferenceSession(str(path), _unoptimised(), enable_fallback=0)))}


def stream_weights(path: Path) -> Mapping[str, str]:
    """A checkpoint, an index or a directory through the loader, and through what reports on it."""
    seen: dict[str, str] = {}

    def consume(group: Any) -> None:
        for name, tensor in group.tensors.items():
            seen[name] = f"{tensor.dtype}{tensor.shape}"

    return {
        "stream": tried(lambda: ort_delayed.StreamingWeightLoader(path, ram_budget=_BUDGET).stream(consume)),
        "inspect": tried(lambda: inspect_weights(path)),
        "check": tried(lambda: check_weights(path)),
    }


def safetensors_file(path: Path) -> Mapping[str, str]:
    """One file, through the safetensors library and through the loader: accepted by both, with the same bytes, or not.

    Two things that the library accepts are refused here, each by name: a tensor without a name, and shapes that no
    array can have.
    """
    stored: dict[str, tuple[list[int], str, bytes]] | None = None
    with contextlib.suppress(safetensors.SafetensorError):
        opened = safetensors.deserialize(path.read_bytes())
        stored = {n: (list(t["shape"]), t["dtype"], bytes(t["data"])) for n, t in opened}
    streamed: dict[str, bytes] = {}

    def consume(group: Any) -> None:
        streamed.update({n: np.asarray(t).tobytes() for n, t in group.tensors.items()})

    records: dict[str, Any] = {}

    def read() -> None:
        records.update({t.name: t for t in read_shard(str(path)).tensors})

    found = {
        "read": tried(read),
        "stream": tried(lambda: ort_delayed.StreamingWeightLoader(path, ram_budget=_BUDGET).stream(consume)),
        "inspect": tried(lambda: inspect_weights(path)),
        "check": tried(lambda: check_weights(path)),
    }
    if stored is None:
        assert found["read"] == "ShardFormatError", f"the library refuses the file, read_shard: {found['read']}"
    elif "" in stored:
        assert found["read"] == "ShardFormatError", "a tensor without a name was accepted"
    else:
        assert found["read"] == "done", f"the library accepts the file, read_shard: {found['read']}"
        content = path.read_bytes()
        ours = {n: (list(t.shape), t.element_type.safetensors, content[t.offset : t.end]) for n, t in records.items()}
        assert ours == stored, f"{ours}\n{stored}"
    if found["stream"] == "done":
        assert stored is not None
        # A tensor may be known by a second name, from the metadata.
        assert {n: streamed[n] for n in stored} == {n: data for n, (_, _, data) in stored.items()}
    return {**found, "library": "refused" if stored is None else "accepted"}


def command_line(path: Path) -> Mapping[str, str]:
    """A command line in this process, in the directory of the file that holds it as JSON."""
    from ort_delayed.cli import main

    arguments = json.loads(path.read_text())
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main(arguments)
            except SystemExit as stopped:
                status = stopped.code if isinstance(stopped.code, int) else 0 if stopped.code is None else 1
    finally:
        os.chdir(before)
    err.flush()
    said = err.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert status in (0, 1, 2), f"exit status {status}\n{said}"
    assert "codec can't" not in said, said
    # The command line adds this line to an error of a kind that nobody expected.
    assert "--debug shows the traceback" not in said, said
    assert "Traceback" not in said or "--debug" in arguments, said
    return {"status": str(status)}


TRIALS: dict[str, Trial] = {
    t.__name__: t
    for t in (
        *(read_model, run_model, pack_model, packed_model, external_data, every_way, plain_session, default_session),
        *(stream_weights, safetensors_file, command_line),
    )
}


# What they share


def _unoptimised() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.intra_op_num_threads = 1
    return options


def _single_threaded(*, prepacked: bool = True, optimised: bool = True) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if not prepacked:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def _prepared(path: Path) -> onnxruntime.InferenceSession:
    options = _unoptimised()
    return onnxruntime.InferenceSession(ort_delayed.prepare_model(path, options), options, enable_fallback=0)


def _installed(path: Path) -> onnxruntime.InferenceSession:
    return ort_delayed.stream_install(str(path), _unoptimised(), ram_budget=_BUDGET).create_session()


def _run(session: onnxruntime.InferenceSession) -> list[Any]:
    """Run a session on made-up inputs; a run that does not end by itself is ended."""
    feeds = {i.name: _made_up(i.type, i.shape) for i in session.get_inputs()}
    options = onnxruntime.RunOptions()
    timer = threading.Timer(_SECONDS_PER_RUN, lambda: setattr(options, "terminate", True))
    timer.start()
    try:
        outputs: list[Any] = session.run(None, feeds, options)
    finally:
        timer.cancel()
    return outputs


def _made_up(kind: str, shape: list[Any]) -> Any:
    names = {"float": "float32", "double": "float64"}
    element = kind.removeprefix("tensor(").removesuffix(")")
    if not kind.startswith("tensor(") or element == "string":
        raise ValueError(f"nothing can be made up for an input of type {kind}")
    dims = [d if isinstance(d, int) and d >= 0 else 2 for d in shape]
    if np.prod(dims, dtype=float) > 1 << 24:
        raise ValueError(f"an input of shape {dims} is too large to be made up")
    dtype = np.dtype(names.get(element, element))
    values = np.arange(int(np.prod(dims, dtype=np.int64))) % 5
    return (values > 1 if dtype.kind == "b" else values).astype(dtype).reshape(dims)


def _same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(_same_values(a, b) for a, b in zip(left, right, strict=True))


def _same_values(a: Any, b: Any) -> bool:
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return str(a) == str(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(a.tolist() == b.tolist() if a.dtype == object else a.tobytes() == b.tobytes())


# The worker


def _descriptors() -> set[str]:
    gc.collect()
    return set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()


def attempt(name: str, path: Path) -> dict[str, Any]:
    """One trial; ``fault`` in the answer says what is wrong with it."""
    before = _descriptors()
    try:
        found = TRIALS[name](path)
    except Exception:
        return {"fault": traceback.format_exc(), "found": {}}
    after = _descriptors()
    # A library may open something for good when it is first used; what grows each time is a leak.
    if len(after) > len(before):
        with contextlib.suppress(Exception):
            TRIALS[name](path)
        if len(_descriptors()) > len(after):
            return {"fault": f"descriptors stay open: {sorted(after - before)}", "found": found}
    return {"fault": None, "found": found}


def _requests() -> Iterator[dict[str, str]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    onnxruntime.set_default_logger_severity(4)
    warnings.simplefilter("ignore")
    gc.freeze()  # what was imported is no garbage, and takes long to be looked through for each case
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what native code prints must not get between the answers
    for request in _requests():
        path = Path(request["path"])
        shutil.rmtree(path.parent / "out", ignore_errors=True)
        (path.parent / "out").mkdir()
        builtins.print(json.dumps(attempt(request["trial"], path)), file=answers, flush=True)
