"""Streaming weights within a RAM budget: the peak of a callback that touches every view; discovering a huge header.

    python benchmarks/streaming_loader.py [--layers 64] [--layer-mib 16] [--tensors 100000] [--rounds 3]

Each row runs in a fresh process. The budget of a streaming row is set to just what is promised: the largest layer group
and 8 MiB. README.md says how the numbers are meant.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import struct
import tempfile
import time
from functools import partial

import numpy as np
import onnx
from measure import MIB, Result, in_fresh_process, interleaved, peak_method, read_through
from tables import format_table

SLACK_BYTES = 8 * MIB
EMBEDDING_LAYERS = 4
DISCOVERY_SECONDS = 3.0


# --- What the rows do -------------------------------------------------------------------------------------------------


def measure_stream(source: str, budget: int) -> Result:
    """Stream everything to a callback that touches every page of every view."""
    # The peak window and not a mark of our own: the loader resets the process's mark, and folds it into windows.
    from ort_delayed.loader import StreamedLayerGroup, StreamingWeightLoader, current_rss_bytes
    from ort_delayed.loader.resident_memory import PeakWindow

    baseline = current_rss_bytes() or 0
    window = PeakWindow()

    def touch(group: StreamedLayerGroup) -> None:
        for view in group.tensors.values():
            view.view(np.uint8).max()

    start = time.perf_counter()
    loader = StreamingWeightLoader(source, ram_budget=budget)
    report = loader.stream(touch)
    seconds = time.perf_counter() - start
    assert report.peak_ram.within_budget
    return {"seconds": seconds, "peak": (window.read() or 0) - baseline, "bytes": report.bytes_mapped}


def measure_whole(source: str, budget: int) -> Result:
    """For comparison: the safetensors library loads the whole file, then every page is touched."""
    from safetensors.numpy import load_file

    from ort_delayed.loader import current_rss_bytes
    from ort_delayed.loader.resident_memory import PeakWindow

    baseline = current_rss_bytes() or 0
    window = PeakWindow()
    start = time.perf_counter()
    arrays = load_file(source)
    for array in arrays.values():
        array.view(np.uint8).max()
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "peak": (window.read() or 0) - baseline,
        "bytes": sum(a.nbytes for a in arrays.values()),
    }


def measure_discovery(source: str) -> Result:
    """Find every tensor of a source and group them, within a budget of 1 GiB."""
    from ort_delayed.loader import StreamingWeightLoader, current_rss_bytes
    from ort_delayed.loader.resident_memory import PeakWindow

    baseline = current_rss_bytes() or 0
    window = PeakWindow()
    start = time.perf_counter()
    loader = StreamingWeightLoader(source, ram_budget=1 << 30)
    groups = loader.layer_groups
    seconds = time.perf_counter() - start
    peak = (window.read() or 0) - baseline
    report = loader.stream(lambda group: None) if len(groups) < 1000 else None
    counted = report.peak_ram.peak_incremental_bytes if report else loader.plan.retained_bytes
    return {
        "seconds": seconds,
        "peak": peak,
        "groups": len(groups),
        "retained": loader.plan.retained_bytes,
        "counted": counted,
    }


# --- What they read ---------------------------------------------------------------------------------------------------


def write_weights(directory: str, layers: int, layer_bytes: int) -> dict[str, str]:
    """The same weights as one safetensors file, as an index and four shards, and as an ONNX model's external data."""
    sizes = {"model.embed_tokens.weight": EMBEDDING_LAYERS * layer_bytes}
    sizes |= {f"model.layers.{i}.{part}.weight": layer_bytes // 2 for i in range(layers) for part in ("up", "down")}
    whole = os.path.join(directory, "model.safetensors")
    start = _write_safetensors(whole, sizes)
    shards = os.path.join(directory, "shards")
    os.mkdir(shards)
    weight_map = {}
    for k in range(4):
        part = dict(list(sizes.items())[k::4])
        name = f"model-{k + 1:05d}-of-00004.safetensors"
        _write_safetensors(os.path.join(shards, name), part)
        weight_map |= dict.fromkeys(part, name)
        read_through(os.path.join(shards, name))
    with open(os.path.join(shards, "model.safetensors.index.json"), "w") as index:
        json.dump({"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}, index)
    read_through(whole)
    return {"whole": whole, "shards": shards, "onnx": _write_model(directory, sizes, start)}


def _write_safetensors(path: str, sizes: dict[str, int]) -> int:
    header, offset = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "F32", "shape": [size // 4], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    rng = np.random.default_rng(1)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for size in sizes.values():
            file.write(rng.standard_normal(size // 4, np.float32).tobytes())
    return 8 + len(text)


def _write_model(directory: str, sizes: dict[str, int], offset: int) -> str:
    initializers = []
    for name, size in sizes.items():
        tensor = onnx.TensorProto(name=name, dims=[size // 4], data_type=onnx.TensorProto.FLOAT)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", "model.safetensors"), ("offset", offset), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        initializers.append(tensor)
        offset += size
    path = os.path.join(directory, "model.onnx")
    graph = onnx.helper.make_graph([], "weights", [], [], initializers)
    onnx.save_model(onnx.helper.make_model(graph), path)
    return path


def write_headers(directory: str, tensors: int) -> dict[str, str]:
    """Files of ``tensors`` tiny tensors: in 100 layers, and each a module of its own."""
    paths = {}
    for title, pattern in (
        ("in 100 layers", "model.layers.{}.mlp.experts.{}.down_proj.weight"),
        ("in as many groups", "part{}.module{}.weight"),
    ):
        header = {
            pattern.format(i % 100, i // 100): {"dtype": "F32", "shape": [2], "data_offsets": [8 * i, 8 * i + 8]}
            for i in range(tensors)
        }
        text = json.dumps(header).encode()
        paths[title] = os.path.join(directory, f"{title.replace(' ', '-')}.safetensors")
        with open(paths[title], "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text + bytes(8 * tensors))
    return paths


# --- Tables -----------------------------------------------------------------------------------------------------------


def main() -> int:
    """Measure, print the tables; 1 where a promise is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=64, help="layers of the streamed weights (default 64)")
    parser.add_argument("--layer-mib", type=int, default=16, help="MiB of each; the embeddings have four times that")
    parser.add_argument("--tensors", type=int, default=100_000, help="tensors in the huge header (default 100000)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each row is measured (default 3)")
    parser.add_argument("--directory", help="where the files are written (default: a temporary directory)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ort-delayed-bench-", dir=arguments.directory) as directory:
        largest = EMBEDDING_LAYERS * arguments.layer_mib * MIB
        sources = write_weights(directory, arguments.layers, arguments.layer_mib * MIB)
        streams = {
            "safetensors library, the whole file": partial(
                in_fresh_process, measure_whole, source=sources["whole"], budget=0
            ),
            **{
                f"streamed, {title}": partial(
                    in_fresh_process, measure_stream, source=sources[key], budget=largest + SLACK_BYTES
                )
                for key, title in (("whole", "one file"), ("shards", "four shards"), ("onnx", "ONNX external data"))
            },
        }
        streamed = interleaved(streams, rounds=arguments.rounds)
        headers = write_headers(directory, arguments.tensors)
        found = interleaved(
            {title: partial(in_fresh_process, measure_discovery, source=path) for title, path in headers.items()},
            rounds=arguments.rounds,
        )
    met = [print_streamed(streamed, largest), print_discovery(found, arguments.tensors)]
    print(f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}.")
    print(f"Fresh processes, {arguments.rounds} rounds in turn, page cache warm; peak: {peak_method()}.")
    return 0 if all(met) else 1


def print_streamed(measured: dict[str, Result], largest: int) -> bool:
    """The table of streaming rows; whether each kept its promise."""
    promise = largest + SLACK_BYTES
    rows, met = [], []
    for name, r in measured.items():
        kept = r["peak"] <= promise
        is_ours = name.startswith("streamed")
        if is_ours:
            met.append(kept)
        verdict = ("met" if kept else "MISSED") if is_ours else ""
        promised = f"<= {promise / MIB:.1f}" if is_ours else ""
        rows.append(
            [name, f"{r['bytes'] / MIB:.0f}", f"{r['seconds']:.3f}", f"{r['peak'] / MIB:.1f}", promised, verdict]
        )
    print(format_table(["every view touched", "MiB", "s", "peak, MiB", "promised", ""], rows) + "\n")
    return all(met)


def print_discovery(measured: dict[str, Result], tensors: int) -> bool:
    """The table of discovery rows; whether each kept its promise."""
    rows, met = [], []
    for name, r in measured.items():
        met.append(r["seconds"] < DISCOVERY_SECONDS and r["counted"] >= r["retained"])
        sizes = [f"{r[key] / MIB:.1f}" for key in ("peak", "retained")]
        verdict = "met" if met[-1] else "MISSED"
        rows.append(
            [name, f"{r['groups']:.0f}", f"{r['seconds']:.2f}", *sizes, f"< {DISCOVERY_SECONDS:.0f} s", verdict]
        )
    title = f"{tensors} tensors in one header"
    print(format_table([title, "groups", "s", "peak, MiB", "kept, MiB", "promised", ""], rows) + "\n")
    return all(met)


if __name__ == "__main__":
    raise SystemExit(main())
