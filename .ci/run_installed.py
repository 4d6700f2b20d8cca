"""Runs a tiny model with delayed initializers on the package that this interpreter imports.

    python - [PREFIX] < .ci/run_installed.py

Read from standard input, so that the working directory is on ``sys.path`` as it is for ``python -c``. With PREFIX the
package must have been imported from below it.
"""

import os
import sys
import tempfile

import numpy as np
import onnx

import ort_delayed
from ort_delayed.ops import make_node

if len(sys.argv) > 1:
    prefix = os.path.realpath(sys.argv[1])
    assert os.path.realpath(ort_delayed.__file__).startswith(prefix + os.sep), ort_delayed.__file__

with tempfile.TemporaryDirectory() as directory:
    weights = np.arange(6, dtype=np.float32).reshape(3, 2)
    weights.tofile(os.path.join(directory, "weights.bin"))
    nodes = [
        make_node(mode, filename="weights.bin", shape=[3, 2], dtype=onnx.TensorProto.FLOAT, load_device=mode)
        for mode in ("cpu", "file")
    ]
    nodes += [onnx.helper.make_node("MatMul", ["x", mode], [f"y_{mode}"]) for mode in ("cpu", "file")]
    floats = onnx.TensorProto.FLOAT
    inputs = [onnx.helper.make_tensor_value_info("x", floats, [1, 3])]
    outputs = [onnx.helper.make_tensor_value_info(f"y_{mode}", floats, [1, 2]) for mode in ("cpu", "file")]
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("ai.rt", 1)]
    graph = onnx.helper.make_graph(nodes, "tiny", inputs, outputs)
    path = os.path.join(directory, "tiny.onnx")
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    x = np.ones((1, 3), np.float32)
    for y in ort_delayed.InferenceSession(path).run(None, {"x": x}):
        np.testing.assert_array_equal(y, x @ weights)
print(f"ran with {os.path.dirname(ort_delayed.__file__)}")
