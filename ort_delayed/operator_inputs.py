"""Which inputs of which operators must stay constants: what ONNX Runtime or shape inference reads while loading.

Sources: for the operators of ONNX, the inputs whose values change what ``onnx.shape_inference`` infers (found by
running it with and without them on every node test of onnx 1.23) and the Slice, Range and Resize families, which
need several at once; for scales and zero points, what ONNX Runtime's quantisation fusions ask of them; for
``com.microsoft``, what ONNX Runtime's CPU kernels and shape inference look up when they are made.
"""

from __future__ import annotations

import onnx

__all__ = ["reason_body_stays", "reason_to_stay_constant"]

_SHAPE = "shape inference reads it while loading"
_QUANTISATION = "ONNX Runtime's quantised kernels are chosen by its value"

_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")

# Operator of ONNX: the inputs, by index, that shape inference or a kernel's choice reads, and what they are called.
_ONNX_INPUTS: dict[str, dict[int, str]] = {
    "AffineGrid": {1: "size"},
    "BlackmanWindow": {0: "size"},
    "CenterCropPad": {1: "shape"},
    "Clip": {1: "min", 2: "max"},
    "Col2Im": {1: "image_shape", 2: "block_shape"},
    "ConstantOfShape": {0: "input"},
    "CumSum": {1: "axis"},
    "DFT": {1: "dft_length", 2: "axis"},
    "Dropout": {1: "ratio", 2: "training_mode"},
    "Expand": {1: "shape"},
    "HammingWindow": {0: "size"},
    "HannWindow": {0: "size"},
    "If": {0: "cond"},
    "Loop": {0: "M", 1: "cond"},
    "MelWeightMatrix": dict(enumerate(("num_mel_bins", "dft_length", "sample_rate", "lower_edge", "upper_edge"))),
    "NonMaxSuppression": {2: "max_output_boxes_per_class", 3: "iou_threshold", 4: "score_threshold"},
    "OneHot": {1: "depth"},
    "Pad": {1: "pads", 2: "constant_value", 3: "axes"},
    "Range": {0: "start", 1: "limit", 2: "delta"},
    "Reshape": {1: "shape"},
    "Resize": {1: "roi or scales", 2: "scales", 3: "sizes"},
    "STFT": {1: "frame_step", 3: "frame_length"},
    "SequenceAt": {1: "position"},
    "Slice": {1: "starts", 2: "ends", 3: "axes", 4: "steps"},
    "Split": {1: "split"},
    "SplitToSequence": {1: "split"},
    "Squeeze": {1: "axes"},
    "Tile": {1: "repeats", 2: "axis"},
    "TopK": {1: "K"},
    "Trilu": {1: "k"},
    "Unsqueeze": {1: "axes"},
    "Upsample": {1: "scales"},
    **{f"Reduce{kind}": {1: "axes"} for kind in _REDUCTIONS},
}

# Quantised operators: the inputs that are scales or zero points.
_ONNX_QUANTISATION: dict[str, tuple[int, ...]] = {
    "ConvInteger": (2, 3),
    "DequantizeLinear": (1, 2),
    "MatMulInteger": (2, 3),
    "QLinearConv": (1, 2, 4, 5, 6, 7),
    "QLinearMatMul": (1, 2, 4, 5, 6, 7),
    "QuantizeLinear": (1, 2),
}

_MICROSOFT_INPUTS: dict[str, dict[int, str]] = {
    "ConvTransposeWithDynamicPads": {2: "Pads"},
    "CropAndResize": {3: "crop_size"},
    "ExpandDims": {1: "axis"},
    "MatMulFpQ4": {2: "B_shape"},
    "Pad": {1: "pads", 2: "value"},
    "Range": {0: "start", 1: "limit", 2: "delta"},
    "Trilu": {1: "k"},
}

_MICROSOFT_QUANTISATION: dict[str, tuple[int, ...]] = {
    "DequantizeLinear": (1, 2),
    "DynamicQuantizeLSTM": (8, 9, 10, 11),
    "DynamicQuantizeMatMul": (2, 3),
    "MatMulIntegerToFloat": (2, 3, 4, 5),
    "QAttention": (3, 4, 6, 7),
    "QEmbedLayerNormalization": tuple(range(8, 18)),
    "QGemm": (1, 2, 4, 5, 7, 8),
    "QLinearAdd": (1, 2, 4, 5, 6, 7),
    "QLinearAveragePool": (1, 2, 3, 4),
    "QLinearConv": (1, 2, 4, 5, 6, 7),
    "QLinearGlobalAveragePool": (1, 2, 3, 4),
    "QLinearLeakyRelu": (1, 2, 3, 4),
    "QLinearMul": (1, 2, 4, 5, 6, 7),
    "QLinearReduceMean": (1, 2, 3, 4),
    "QLinearSigmoid": (1, 2, 3, 4),
    "QLinearSoftmax": (1, 2, 3, 4),
    "QLinearWhere": (2, 3, 5, 6, 7, 8),
    "QuantizeLinear": (1, 2),
}

# Text generation takes its decoder as a body and moves that body's initializers elsewhere itself.
_GENERATORS = ("BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch")

_KNOWN_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc", "ai.rt")


def reason_to_stay_constant(node: onnx.NodeProto, index: int) -> str | None:
    """Why input ``index`` of a node must stay a constant, as words for a report; None where it is data.

    An operator of a domain that is not ONNX's or ONNX Runtime's own may look up anything when its kernel is made, so
    all that it reads stays.
    """
    domain, operator = node.domain, node.op_type
    if domain not in _KNOWN_DOMAINS:
        return f"{domain}::{operator} reads it: what an operator of that domain needs while loading is not known"
    microsoft = domain == "com.microsoft"
    name = (_MICROSOFT_INPUTS if microsoft else _ONNX_INPUTS).get(operator, {}).get(index)
    if name is not None:
        return f"{operator} reads it as its input '{name}': {_SHAPE}"
    scales = (_MICROSOFT_QUANTISATION if microsoft else _ONNX_QUANTISATION).get(operator, ())
    if operator == "QLinearConcat" and (index < 2 or index % 3 != 2):
        scales = (index,)
    # The scales of blocks are as many as the weight has blocks, and choose nothing.
    if index in scales and not any(a.name == "block_size" and a.i > 0 for a in node.attribute):
        return f"{operator} reads it as a scale or zero point: {_QUANTISATION}"
    if operator in _GENERATORS and microsoft:
        return f"{operator} reads it: {_SHAPE}"
    return None


def reason_body_stays(holder: onnx.NodeProto) -> str | None:
    """Why the constants in a body of ``holder`` stay there; None for the bodies that run as graphs do."""
    if holder.domain in ("", "ai.onnx") and holder.op_type in ("If", "Loop", "Scan"):
        return None
    return f"it stands in a body of {holder.op_type}, which ONNX Runtime does not run as a graph of its own"
