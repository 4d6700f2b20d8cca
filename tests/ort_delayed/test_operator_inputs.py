"""The table of inputs that must stay constants, against what onnx's shape inference and ONNX Runtime really do."""

import functools
import warnings

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, shape_inference
from weighted_models import initializer, model, node, run_delayed, run_plain, same_bits, save, value

from ort_delayed import convert_model
from ort_delayed.operator_inputs import reason_body_stays, reason_to_stay_constant


@functools.cache
def cases():
    """One of onnx's own node tests for each operator and set of inputs: model, and array by input name."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    chosen = {}
    for case in found:
        nodes = case.model.graph.node if case.model is not None else ()
        if len(nodes) != 1 or not case.data_sets:
            continue
        arrays = dict(zip((i.name for i in case.model.graph.input), case.data_sets[0][0], strict=False))
        if all(isinstance(a, np.ndarray) and a.dtype.kind in "biuf" for a in arrays.values()):
            key = (nodes[0].domain, nodes[0].op_type, tuple(bool(name) for name in nodes[0].input))
            chosen.setdefault(key, (case.model, arrays))
    return chosen


def with_constants(made, arrays, names):
    """The model with the named inputs as initializers."""
    changed = onnx.ModelProto.FromString(made.SerializeToString())
    changed.ir_version = 10
    inputs = [i for i in made.graph.input if i.name not in names]
    del changed.graph.input[:]
    changed.graph.input.extend(inputs)
    changed.graph.initializer.extend(numpy_helper.from_array(arrays[name], name) for name in sorted(names))
    return changed


def inferred(made):
    """What shape inference says about the outputs when the model declares none."""
    for output in made.graph.output:
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.ClearField("shape")
    return [o.type.SerializeToString() for o in shape_inference.infer_shapes(made, data_prop=True).graph.output]


def test_every_input_whose_value_changes_an_inferred_shape_is_in_the_table():
    changing = set()
    for (domain, operator, _), (made, arrays) in cases().items():
        asked = made.graph.node[0]
        known = inferred(with_constants(made, arrays, set(arrays)))
        for index, name in enumerate(asked.input):
            if name and name in arrays and inferred(with_constants(made, arrays, arrays.keys() - {name})) != known:
                changing.add((domain, operator, index))
                assert reason_to_stay_constant(asked, index) is not None, (domain, operator, index)
    # What the test means to find is there.
    assert {("", "Reshape", 1), ("", "Slice", 1), ("", "Resize", 3), ("", "Unsqueeze", 1)} <= changing
    assert len(changing) > 30


def test_onnx_runtime_runs_every_operator_on_delayed_inputs(tmp_path):
    """All that the table lets go is delayed: ONNX Runtime's kernels take it, and nearly all give the same bits."""
    ran, others = 0, set()
    for (domain, operator, _), (made, arrays) in cases().items():
        changed = with_constants(made, arrays, set(list(arrays)[1:]))
        changed.graph.name = "case"
        inputs = {i.name: arrays[i.name] for i in changed.graph.input}
        source = save(changed, tmp_path / "m.onnx")
        try:
            expected = run_plain(source, inputs)
        except Exception:
            continue  # an operator or a type that ONNX Runtime's CPU provider does not have
        report = convert_model(source, tmp_path / "converted.onnx", min_bytes=1, overwrite=True)
        if report.count("written") == 0:
            continue
        found = run_delayed(tmp_path / "converted.onnx", inputs)
        ran += 1
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=1e-5, atol=1e-5)
        if not same_bits(found, expected):
            others.add((domain, operator))
    assert ran > 60
    # Kernels that prepare a constant weight beforehand may add in another order.
    assert others <= {("", name) for name in ("Conv", "ConvTranspose", "GRU", "Gemm", "LSTM", "MatMul", "RNN")}


def floats(*shape):
    return (np.random.default_rng(0).standard_normal(shape) * 0.1).astype(np.float32)


def bytes8(*shape, dtype=np.uint8):
    return np.random.default_rng(1).integers(0, 100, shape).astype(dtype)


SCALE, ZERO, SIGNED_ZERO = np.float32(0.02), np.uint8(3), np.int8(0)
LSTM_SCALE, LSTM_ZERO = np.full(1, 0.01, np.float32), np.zeros(1, np.int8)
TOKENS = np.ones((1, 4), np.int32)
WEIGHT8 = bytes8(32, 16, dtype=np.int8)

MICROSOFT = {
    "Attention": ([floats(1, 4, 16), floats(16, 48), floats(48)], {"num_heads": 2}),
    "BiasGelu": ([floats(4, 8), floats(8)], {}),
    "DynamicQuantizeLSTM": (
        [floats(3, 1, 8), bytes8(1, 8, 64, dtype=np.int8), bytes8(1, 16, 64, dtype=np.int8), floats(1, 128)]
        + [None] * 4
        + [LSTM_SCALE, LSTM_ZERO] * 2,
        {"hidden_size": 16},
    ),
    "DynamicQuantizeMatMul": ([floats(4, 32), WEIGHT8, SCALE, SIGNED_ZERO, floats(16)], {}),
    "EmbedLayerNormalization": (
        [TOKENS, TOKENS, floats(10, 16), floats(8, 16), floats(2, 16), floats(16), floats(16)],
        {},
    ),
    "FusedConv": ([floats(1, 4, 6, 6), floats(4, 4, 3, 3), floats(4)], {"activation": "Relu"}),
    "FusedGemm": ([floats(4, 32), floats(32, 16), floats(16)], {"activation": "Relu"}),
    "FusedMatMul": ([floats(4, 32), floats(32, 16)], {"alpha": 0.5}),
    "GatherBlockQuantized": (
        [bytes8(16, 32), np.array([1, 2]), floats(16, 2), bytes8(16, 2)],
        {"bits": 8, "block_size": 16, "gather_axis": 0, "quantize_axis": 1},
    ),
    "MatMulBnb4": ([floats(4, 64), bytes8(512), floats(16)], {"K": 64, "N": 16, "block_size": 64, "quant_type": 1}),
    "MatMulIntegerToFloat": ([bytes8(4, 32), WEIGHT8, SCALE, SCALE, ZERO, SIGNED_ZERO, floats(16)], {}),
    "MatMulNBits": (
        [floats(4, 64), bytes8(16, 2, 16), floats(16, 2), bytes8(16, 1)],
        {"K": 64, "N": 16, "bits": 4, "block_size": 32},
    ),
    "QAttention": (
        [bytes8(1, 4, 16), bytes8(16, 48, dtype=np.int8), floats(48), SCALE, SCALE, None, ZERO, SIGNED_ZERO],
        {"num_heads": 2},
    ),
    "QGemm": (
        [bytes8(4, 32), SCALE, ZERO, WEIGHT8, SCALE, SIGNED_ZERO, np.arange(16, dtype=np.int32), SCALE, ZERO],
        {},
    ),
    "QLinearAdd": ([bytes8(4, 8), SCALE, ZERO, bytes8(4, 8), SCALE, ZERO, SCALE, ZERO], {}),
    "QLinearConcat": ([SCALE, ZERO, bytes8(4, 8), SCALE, ZERO, bytes8(4, 8), SCALE, ZERO], {"axis": 0}),
    # A crash, if its zero points are no constants.
    "QLinearWhere": (
        [np.ones((4, 8), bool), bytes8(4, 8), SCALE, ZERO, bytes8(4, 8), SCALE, ZERO, SCALE, ZERO],
        {},
    ),
    "SkipLayerNormalization": ([floats(1, 4, 16), floats(1, 4, 16), floats(16), floats(16), floats(16)], {}),
}


@pytest.mark.parametrize("operator", MICROSOFT)
def test_operators_of_onnx_runtime_run_on_delayed_weights(tmp_path, operator):
    arrays, attributes = MICROSOFT[operator]
    names = [f"i{index}" if array is not None else "" for index, array in enumerate(arrays)]
    outputs = ["y", "unused"][: 1 + (operator == "EmbedLayerNormalization")]
    # QLinearConcat begins with the scale of its output.
    data = 2 if operator == "QLinearConcat" else 0
    made = model(
        [node(operator, names, outputs, domain="com.microsoft", **attributes)],
        [value(names[data], arrays[data].shape, helper.np_dtype_to_tensor_dtype(arrays[data].dtype))],
        [helper.make_empty_tensor_value_info("y")],
        [initializer(n, np.asarray(a)) for n, a in zip(names, arrays, strict=True) if n and n != names[data]],
    )
    source = save(made, tmp_path / "m.onnx")
    report = convert_model(source, tmp_path / "converted.onnx", min_bytes=1)
    assert report.count("written") > 0
    scalars = {n for n, a in zip(names, arrays, strict=True) if n and np.asarray(a).ndim == 0}
    assert {t.name for t in report.tensors if t.action == "kept"} >= scalars
    inputs = {names[data]: arrays[data]}
    assert same_bits(run_delayed(tmp_path / "converted.onnx", inputs), run_plain(source, inputs))


def test_scales_stay_and_the_scales_of_blocks_do_not():
    plain = node("DequantizeLinear", ["x", "scale", "zero"], ["y"], axis=1)
    blocks = node("DequantizeLinear", ["x", "scale", "zero"], ["y"], axis=1, block_size=32)
    assert "as a scale or zero point" in (reason_to_stay_constant(plain, 1) or "")
    assert reason_to_stay_constant(plain, 0) is None
    assert reason_to_stay_constant(blocks, 1) is None


def test_text_generation_keeps_what_it_reads_and_its_bodies():
    search = node("BeamSearch", ["ids"], ["y"], domain="com.microsoft")
    assert reason_to_stay_constant(search, 7) is not None
    assert reason_body_stays(search) is not None
    assert reason_body_stays(node("If", ["c"], ["y"])) is None
