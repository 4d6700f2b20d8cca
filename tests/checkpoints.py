"""Small checkpoints for tests: safetensors files byte by byte, indexes, ONNX models with external data."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import safetensors
from onnx import TensorProto, helper

Array = npt.NDArray[np.generic]

SAFETENSORS_NAMES = {
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}


def library_knows(dtype: str) -> bool:
    """Whether the installed safetensors library knows this type; the newest came with 0.7 and 0.8."""
    text = json.dumps({"a": entry(0, 0, [0], dtype)}).encode()
    try:
        safetensors.deserialize(struct.pack("<Q", len(text)) + text)
    except safetensors.SafetensorError:
        return False
    return True


def raw_safetensors(path: Path, header: object, data: bytes, *, length: int | None = None) -> Path:
    """A file with this header (an object for JSON, or bytes as they stand) and data, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(start: int, end: int, shape: Iterable[int] | None = None, dtype: str = "F32") -> dict[str, object]:
    """One tensor of a header; the shape is by default that of the range in float32."""
    return {
        "dtype": dtype,
        "shape": [(end - start) // 4] if shape is None else list(shape),
        "data_offsets": [start, end],
    }


def save_safetensors(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> Path:
    """A valid file with these tensors in this order, any numpy or ml_dtypes type, and no padding."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    data = bytearray()
    for name, array in tensors.items():
        header[name] = entry(len(data), len(data) + array.nbytes, array.shape, SAFETENSORS_NAMES[array.dtype.name])
        data += array.tobytes()
    return raw_safetensors(path, header, bytes(data))


def save_index(
    path: Path, shards: Mapping[str, Mapping[str, Array]], *, metadata: Mapping[str, object] | None = None
) -> Path:
    """Shards beside ``path``, which becomes their index."""
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    for shard, tensors in shards.items():
        save_safetensors(path.parent / shard, tensors)
    total = sum(a.nbytes for tensors in shards.values() for a in tensors.values())
    content = {"metadata": {"total_size": total} if metadata is None else dict(metadata), "weight_map": weight_map}
    path.write_text(json.dumps(content))
    return path


def bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """An array of random bytes, NaN payloads and all, as this numpy or ml_dtypes type."""
    wanted = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape)) * wanted.itemsize
    values = rng.integers(0, 2 if dtype == "bool" else 256, count, dtype=np.uint8)
    return np.frombuffer(values.tobytes(), wanted).reshape(shape)


def classifier_weights(layers: int = 3, width: int = 8, vocabulary: int = 16, tags: int = 5) -> dict[str, Array]:
    """The weights of a small token classifier: embeddings, layers, a norm, a head; in no useful order."""
    rng = np.random.default_rng(7)

    def f32(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    weights = {"classifier.weight": f32(width, tags), "classifier.bias": f32(tags), "norm.weight": f32(width)}
    for i in reversed(range(layers)):
        weights[f"encoder.layer.{i}.dense.weight"] = f32(width, width)
        weights[f"encoder.layer.{i}.dense.bias"] = f32(width)
    weights["embeddings.word_embeddings.weight"] = f32(vocabulary, width)
    return weights


def decode_spans(weights: Mapping[str, Array], tokens: Iterable[int]) -> list[tuple[int, int, int]]:
    """Runs the token classifier; the spans (first token, token behind the last, tag) of equal tags other than 0."""
    hidden = weights["embeddings.word_embeddings.weight"][list(tokens)]
    i = 0
    while f"encoder.layer.{i}.dense.weight" in weights:
        hidden = np.tanh(hidden @ weights[f"encoder.layer.{i}.dense.weight"] + weights[f"encoder.layer.{i}.dense.bias"])
        i += 1
    logits = (hidden * weights["norm.weight"]) @ weights["classifier.weight"] + weights["classifier.bias"]
    found = [int(t) for t in logits.argmax(-1)]
    spans = []
    start = 0
    for end in range(1, len(found) + 1):
        if end == len(found) or found[end] != found[start]:
            if found[start]:
                spans.append((start, end, found[start]))
            start = end
    return spans


def external_initializer(name: str, array: Array, location: str, offset: int, length: int | None = None) -> TensorProto:
    """An initializer whose bytes stand at ``offset`` of ``location``."""
    tensor = TensorProto(name=name, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype))
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in [
        ("location", location),
        ("offset", offset),
        ("length", array.nbytes if length is None else length),
    ]:
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def save_onnx(path: Path, tensors: Mapping[str, Array], *, location: str = "weights.bin", align: int = 1) -> Path:
    """A model whose initializers stand one behind the other in one file beside it."""
    data = bytearray()
    initializers = []
    for name, array in tensors.items():
        data += bytes(-len(data) % align)
        initializers.append(external_initializer(name, array, location, len(data)))
        data += array.tobytes()
    (path.parent / location).parent.mkdir(parents=True, exist_ok=True)
    (path.parent / location).write_bytes(data)
    return save_graph(path, initializers)


def save_graph(path: Path, initializers: Iterable[TensorProto], nodes: Iterable[onnx.NodeProto] = ()) -> Path:
    """A model with these initializers and nodes; it need not be runnable."""
    graph = helper.make_graph(list(nodes), "g", [], [], list(initializers))
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return path
