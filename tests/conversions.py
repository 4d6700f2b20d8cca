"""What tests of conversions share: a model of vectors, and converting, running and restoring one."""

import onnx
from weighted_models import (
    model,
    node,
    run_delayed,
    run_plain,
    same_bits,
    value,
    weights,
)

from ort_delayed import convert_model, restore_model
from ort_delayed.ops.attributes import is_delayed, read_attributes

__all__ = ["N", "X", "check_runs", "converted_nodes", "vector_model"]

N = 1100  # elements of a float32 vector just above the default min_bytes
X = {"x": weights(N, seed=9)}


def vector_model(*tensors, **settings):
    """``y`` is the sum of ``x`` and every tensor (``w0``, ``w1``...), one Add a tensor."""
    nodes, last = [], "x"
    for index, tensor in enumerate(tensors):
        nodes.append(node("Add", [last, tensor.name], [f"y{index}"], name=f"add {index}"))
        last = f"y{index}"
    return model(nodes, [value("x", [N])], [value(last, [N])], tensors, **settings)


def converted_nodes(path):
    """The delayed nodes of the main graph by output name, with their attributes."""
    graph = onnx.load(path, load_external_data=False).graph
    return {n.output[0]: read_attributes(n) for n in graph.node if is_delayed(n)}


def check_runs(source, tmp_path, inputs=X, **options):
    """Convert, run, restore, run: all as the source; returns the conversion's report."""
    report = convert_model(source, tmp_path / "converted.onnx", **options)
    expected = run_plain(source, inputs)
    assert same_bits(run_delayed(tmp_path / "converted.onnx", inputs), expected)
    restore_model(tmp_path / "converted.onnx", tmp_path / "restored.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "restored.onnx"))
    assert same_bits(run_plain(tmp_path / "restored.onnx", inputs), expected)
    return report
