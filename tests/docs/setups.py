"""What snippets of the documentation find when they run: files in the working directory, and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from checkpoints import save_safetensors
from stand_ins import encoder, encoder_weights, feeds, write_stand_ins

import ort_delayed

__all__ = ["SETUPS"]

Names = dict[str, Any]
MODELS = Path(__file__).resolve().parents[2] / "models"


def standard(directory: Path) -> Names:
    """The stand-ins (see stand_ins.py) and ``feeds``; directories that pages name."""
    write_stand_ins(directory)
    (directory / "directory/of/the/model").mkdir(parents=True)
    (directory / "models").symlink_to(MODELS)
    return {"feeds": feeds()}


def delayed(directory: Path) -> Names:
    """The same, with ``delayed.onnx`` converted already, and a plain ``model.onnx`` whose weights are inline."""
    names = standard(directory)
    ort_delayed.convert_model(directory / "inline.onnx", directory / "delayed.onnx")
    return names


def packed(directory: Path) -> Names:
    """The same, with ``packed.onnx`` packed already."""
    from ort_delayed.packing import pack_model

    names = standard(directory)
    pack_model(directory / "model.onnx", directory / "packed.onnx")
    return names


def renamed(directory: Path) -> Names:
    """A model in which one weight is called ``val_79``, its checkpoint, ``options`` and ``budget``."""
    model = encoder()
    old, new = "encoder.layer.0.dense.weight", "val_79"
    for tensor in model.graph.initializer:
        tensor.name = new if tensor.name == old else tensor.name
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = new if name == old else name
    onnx.save_model(model, directory / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    save_safetensors(directory / "checkpoint" / "model.safetensors", encoder_weights())
    budget = ort_delayed.RamBudget.from_mib(64)
    return {"feeds": feeds(), "options": onnxruntime.SessionOptions(), "budget": budget, "np": np}


SETUPS = {f.__name__: f for f in (standard, delayed, packed, renamed)}
