"""Generated models, run in every way that there is: the same numbers, and the same bits where the kernels are the same.

Which ways have the same kernels: all of one graph at ORT_DISABLE_ALL without prepacking (plain, ``file``, ``cpu``,
installed); plain onnxruntime without prepacking, a session under a budget and an installed one; default plain
onnxruntime, the restored model and the packed one. Announcing every weight that can be changes none of the last two.
onnx.reference computes otherwise, and comes close.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from fuzzing import fuzz, lengths
from random_models import GeneratedModel, generated_models
from trial_worker import TrialWorker


def write(directory: Path, made: GeneratedModel) -> Path:
    """The model as ``case.onnx``, its inputs beside it, its weights in ``weights.bin``."""
    (directory / "weights.bin").unlink(missing_ok=True)
    (directory / "weights.bin").write_bytes(made.data)
    np.savez(directory / "case.npz", **made.feeds)
    (directory / "case.onnx").write_bytes(made.model.SerializeToString())
    return directory / "case.onnx"


@lengths(36, 1500)
def test_every_way_to_run_a_model_gives_the_same_numbers(worker: TrialWorker, tmp_path: Path, examples: int) -> None:
    seen: set[str] = set()
    ways: dict[str, int] = {}

    def trial(made: GeneratedModel) -> None:
        for way, said in worker.run("every_way", write(tmp_path, made)).items():
            ways[way] = ways.get(way, 0) + (1 if said == "done" else int(said))
        seen.update(n.op_type for n in made.model.graph.node)

    fuzz(examples, generated_models(), trial)
    # What is generated is what was meant: models of all kinds, many with weights that are worth installing.
    assert {"If", "Loop", "MatMul", "Gemm", "Gather", "Cast", "F0"} <= seen
    assert ways["plain"] >= examples
    assert ways["installed"] > examples // 3
    assert ways["announcements"] > examples


@pytest.mark.parametrize("examples", [30])
def test_generated_models_are_valid(examples: int, tmp_path: Path) -> None:
    def trial(made: GeneratedModel) -> None:
        onnx.checker.check_model(str(write(tmp_path, made)), full_check=True)

    fuzz(examples, generated_models(), trial)
