"""The nodes that stand for a delayed node: what is a shape is not fused with what it shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from delayed_models import model, node
from onnx import TensorProto, helper, numpy_helper

import ort_delayed
from ort_delayed.ops import make_node

LEVELS = ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("through", ["directly", "Identity"])
@pytest.mark.parametrize("dtype", [np.int64, np.float32])
@pytest.mark.parametrize("op_type", ["Reshape", "Unsqueeze", "Squeeze"])
def test_a_delayed_shape_shapes_and_is_not_shaped(
    op_type: str, dtype: type[np.generic], through: str, level: str, tmp_path: Path
) -> None:
    data = np.arange(10, 12).astype(dtype).reshape(1, 2)
    given = {"Reshape": [2, 1], "Unsqueeze": [0, 3], "Squeeze": [0]}[op_type]
    expected = {"Reshape": (2, 1), "Unsqueeze": (1, 1, 2, 1), "Squeeze": (2,)}[op_type]
    np.array(given, np.int64).tofile(tmp_path / "shape.bin")
    element_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        make_node("given", filename="shape.bin", shape=[len(given)], dtype=TensorProto.INT64),
        node("Identity", ["given"], ["same"]),
        node(op_type, ["data", "given" if through == "directly" else "same"], ["shaped"]),
        node("Identity", ["shaped"], ["y"]),
    ]
    # With the output's shape declared, ONNX Runtime fuses what it takes for a chain of Reshapes.
    made = model(
        nodes if through == "Identity" else [nodes[0], *nodes[2:]],
        [],
        [helper.make_tensor_value_info("y", element_type, expected)],
        initializers=[numpy_helper.from_array(data, "data")],
    )
    made.graph.value_info.append(helper.make_tensor_value_info("shaped", element_type, expected))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = ort_delayed.InferenceSession(made.SerializeToString(), options, weights_dir=tmp_path, enable_fallback=0)
    (result,) = session.run(None, {})
    assert result.shape == expected
    assert result.ravel().tolist() == [10, 11]
