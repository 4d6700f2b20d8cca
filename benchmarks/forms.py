"""The files that the ways of running a model open: its forms, made once before anything is measured.

external     as its maker writes it: large weights in one external file
file, cpu    converted to delayed initializers, which read the same external file
packed       by ort_delayed.pack_model
stock        weights delivered by a custom op of onnxruntime-extensions that returns its array
checkpoint   the large weights alone, as one .safetensors file
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import kind_models
import model_makers
import numpy as np
import onnx
from cases import Model, Sizes
from measure import in_fresh_process
from onnx import TensorProto, helper
from stock_op import STOCK_DOMAIN, STOCK_OP

__all__ = ["Prepared", "UnavailableModelError", "prepare", "throw_away_forms"]

_THROW_AWAY = Model("chain", (2, 64))
_PACKAGE_MISSING = "its package is not installed (--minilm names the file)"


class UnavailableModelError(RuntimeError):
    """A model cannot be made here; the message says why."""


class Prepared:
    """A model's forms: the path that each is opened by, and all files that may be read then; sizes of its weights."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.sizes = Sizes(**answer["sizes"])
        self._forms: dict[str, list[str]] = answer["forms"]

    def path(self, form: str) -> str:
        """What a way of running opens."""
        return self._forms[form][0]

    def files(self, form: str) -> list[str]:
        """That, and the files it refers to."""
        return self._forms[form]


def prepare(
    model: Model, forms: Iterable[str], directory: Path, *, minilm: Path | None = None, timeout_seconds: float = 3600
) -> Prepared:
    """Make a model, unless it is there, and its forms, in a process of its own.

    Raises:
        UnavailableModelError: the model is one of a package that is not installed.
    """
    if model.kind == "minilm" and minilm is None:
        raise UnavailableModelError(_PACKAGE_MISSING)
    answer: Any = in_fresh_process(
        make_forms,
        kind=model.kind,
        dimensions=model.dimensions,
        forms=sorted(set(forms) | {"external"}),
        directory=str(directory),
        minilm=str(minilm or ""),
        timeout_seconds=timeout_seconds,
    )
    return Prepared(answer)


def throw_away_forms(forms: Iterable[str], directory: Path) -> Prepared:
    """The forms of a tiny model, for the session that every sample makes first and throws away."""
    return prepare(_THROW_AWAY, forms, directory / "throw-away")


def make_forms(kind: str, dimensions: Sequence[int], forms: Sequence[str], directory: str, minilm: str) -> Any:
    """In a process of its own: make the model and its forms; where they are, and how large the weights."""
    place = Path(directory)
    model = _make(kind, tuple(dimensions), place, minilm)
    external = [str(path) for path in model_makers.external_files(model)]
    tensors = _external_tensors(model)
    made = {}
    for form in forms:
        path = _FORMS[form](model, tensors)
        # A converted or packed model has a data file beside it, whose name begins with its own.
        own = sorted(str(p) for p in path.parent.glob(f"{path.name}.*") if p.suffix != ".json")
        made[form] = [str(path), *own, *([] if form in ("packed", "checkpoint") else external)]
    return {"forms": made, "sizes": vars(_sizes(tensors))}


def _make(kind: str, dimensions: tuple[int, ...], directory: Path, minilm: str) -> Path:
    if kind == "chain":
        return model_makers.chain(*dimensions, directory=directory)
    if kind == "decoder":
        return model_makers.decoder(model_makers.DecoderSize(*dimensions), directory=directory)
    if kind == "minilm":
        return model_makers.external_copy(Path(minilm), directory=directory)
    made: Path = getattr(kind_models, kind)(*dimensions, directory=directory)
    return made


def _external_tensors(model: Path) -> list[tuple[TensorProto, str, int, int]]:
    """A model's external initializers, each with its file, offset and length."""
    found = []
    for tensor in onnx.load(os.fspath(model), load_external_data=False).graph.initializer:
        entries = {e.key: e.value for e in tensor.external_data}
        if entries:
            path = str(model.parent / entries["location"])
            found.append((tensor, path, int(entries.get("offset", 0)), int(entries["length"])))
    return found


def _sizes(tensors: Sequence[tuple[TensorProto, str, int, int]]) -> Sizes:
    from ort_delayed.loader.layers import group_names

    nbytes = {tensor.name: length for tensor, _, _, length in tensors}
    groups = [sum(nbytes[name] for name in names) for _, names in group_names(nbytes)]
    return Sizes(sum(nbytes.values()), max(nbytes.values()), max(groups))


# --- Forms ------------------------------------------------------------------------------------------------------------


def _external(model: Path, tensors: object) -> Path:
    return model


def _file(model: Path, tensors: object) -> Path:
    return _converted(model, "file")


def _cpu(model: Path, tensors: object) -> Path:
    return _converted(model, "cpu")


def _converted(model: Path, load_device: str) -> Path:
    import ort_delayed

    path = model.with_name(f"{model.stem}-{load_device}.onnx")
    ort_delayed.convert_model(model, path, load_device=load_device, overwrite=True)
    return path


def _packed(model: Path, tensors: object) -> Path:
    import ort_delayed

    path = model.with_name(f"{model.stem}-packed.onnx")
    ort_delayed.pack_model(model, path, overwrite=True)
    return path


def _stock(model: Path, tensors: Sequence[tuple[TensorProto, str, int, int]]) -> Path:
    """The model with custom ops for its weights, and beside it what each op has to return."""
    path = model.with_name(f"{model.stem}-stock.onnx")
    if any(tensor.data_type != TensorProto.FLOAT for tensor, *_ in tensors):
        raise ValueError("the stock custom op of the benchmark returns float32")
    proto = onnx.load(os.fspath(model), load_external_data=False)
    names = {tensor.name for tensor, *_ in tensors}
    kept = [t for t in proto.graph.initializer if t.name not in names]
    nodes = [
        helper.make_node(STOCK_OP, [], [tensor.name], domain=STOCK_DOMAIN, index=i)
        for i, (tensor, *_) in enumerate(tensors)
    ]
    # In front of all others, where ONNX Runtime runs each right before its use, as it does with ours.
    nodes += list(proto.graph.node)
    for values, field in ((nodes, proto.graph.node), (kept, proto.graph.initializer)):
        del field[:]
        field.extend(values)
    proto.opset_import.append(helper.make_opsetid(STOCK_DOMAIN, 1))
    path.write_bytes(proto.SerializeToString())
    arrays = [[file, offset, list(tensor.dims)] for tensor, file, offset, _ in tensors]
    Path(f"{path}.json").write_text(json.dumps(arrays))
    return path


def _checkpoint(model: Path, tensors: Sequence[tuple[TensorProto, str, int, int]]) -> Path:
    """The external tensors in one safetensors file, written in pieces, so that it may be larger than memory."""
    path = model.with_suffix(".safetensors")
    header, at = {}, 0
    for tensor, _, _, length in tensors:
        kind = _SAFETENSORS[tensor.data_type]
        header[tensor.name] = {"dtype": kind, "shape": list(tensor.dims), "data_offsets": [at, at + length]}
        at += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, source, offset, length in tensors:
            file.write(np.memmap(source, np.uint8, "r", offset, (length,)).data)
    return path


_SAFETENSORS = {TensorProto.FLOAT: "F32", TensorProto.FLOAT16: "F16", TensorProto.INT8: "I8"}
_FORMS = {"external": _external, "file": _file, "cpu": _cpu, "packed": _packed}
_FORMS |= {"stock": _stock, "checkpoint": _checkpoint}
