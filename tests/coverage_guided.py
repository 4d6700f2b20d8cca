"""Coverage-guided fuzzing of what parses files, with atheris. A program, since atheris ends its process.

``python coverage_guided.py TARGET SECONDS DIRECTORY``: the corpus, the case that is being tried and the one that failed
are in the directory. The targets are trials that make no session: a crash of onnxruntime would say nothing here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["TARGETS"]

ROOT = Path(__file__).resolve().parent.parent

TARGETS = {
    "models": ("model", "case.onnx"),
    "checkpoints": ("safetensors_file", "case.safetensors"),
    "indexes": ("stream_weights", "model.safetensors.index.json"),
    "manifests": ("manifest", "manifest.json"),
}
"""The trial and the name of the file that the bytes are written to."""


def seeds(target: str) -> Iterator[bytes]:
    """What the corpus begins with."""
    import onnx
    from checkpoints import bits, entry

    from ort_delayed.pack_manifest import MANIFEST_KEY, PackManifest, current_environment, write_manifest

    if target == "models":
        yield from (path.read_bytes() for path in sorted((ROOT / "models").glob("*.onnx")))
    elif target == "checkpoints":
        for header in ({}, {"a": entry(0, 8), "b": entry(8, 10, [2, 1], "BF16"), "__metadata__": {"tied": "a"}}):
            text = json.dumps(header).encode()
            yield len(text).to_bytes(8, "little") + text + bits("uint8", (10 * bool(header),)).tobytes()
    elif target == "indexes":
        yield json.dumps({"metadata": {"total_size": 8}, "weight_map": {"a": "s1.safetensors"}}).encode()
    else:
        model = onnx.ModelProto()
        manifest = PackManifest("p", "d", current_environment(), "all", True, False, "data", 8, 0, 8, ())
        write_manifest(model, manifest)
        yield next(p.value for p in model.metadata_props if p.key == MANIFEST_KEY).encode()


def prepare(target: str, directory: Path) -> None:
    """Write the corpus, and the files that cases refer to."""
    import shutil

    import numpy as np
    from checkpoints import save_safetensors

    (directory / "corpus").mkdir()
    (directory / "out").mkdir()
    for number, content in enumerate(seeds(target)):
        (directory / "corpus" / f"seed{number}").write_bytes(content)
    for path in (ROOT / "models").glob("*.bin"):
        shutil.copy(path, directory)
    save_safetensors(directory / "s1.safetensors", {"a": np.zeros(2, np.float32)})


def model(path: Path) -> object:
    """Whatever reads a model without writing anything: writing takes most of the time, and is not what is looked at."""
    import onnxruntime
    from trials import tried

    from ort_delayed import prepare_model
    from ort_delayed.checking import check_weights
    from ort_delayed.inspecting import inspect_weights

    options = onnxruntime.SessionOptions()
    steps = (lambda: inspect_weights(path), lambda: check_weights(path), lambda: prepare_model(path, options))
    return [tried(step) for step in steps]


def manifest(path: Path) -> object:
    """The manifest alone, without the model around it."""
    import onnx
    from trials import tried

    from ort_delayed.pack_manifest import MANIFEST_KEY, check_manifest, read_manifest

    model = onnx.ModelProto()
    try:
        model.metadata_props.add(key=MANIFEST_KEY, value=path.read_bytes().decode())
    except ValueError:
        return None  # a proto takes text only

    def read() -> None:
        found = read_manifest(model)
        assert found is not None
        check_manifest(found, str(path.parent))

    return tried(read)


def main(target: str, seconds: str, directory: Path) -> None:
    import atheris

    with atheris.instrument_imports(include=["ort_delayed"]):
        import trials

        import ort_delayed  # noqa: F401

    prepare(target, directory)
    name, file = TARGETS[target]
    trial: Callable[[Path], object] = {"manifest": manifest, "model": model}.get(name) or trials.TRIALS[name]
    path = directory / file

    def one(data: bytes) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        trial(path)

    settings = [f"-max_total_time={seconds}", f"-artifact_prefix={directory}/", "-timeout=60", "-rss_limit_mb=4096"]
    atheris.Setup([sys.argv[0], *settings, "-print_final_stats=1", "-max_len=8192", str(directory / "corpus")], one)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.path += [str(ROOT)]
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
