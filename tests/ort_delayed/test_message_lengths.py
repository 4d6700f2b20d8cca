"""Messages about a model quote what stands in it: escaped, and short however much it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from weighted_models import external, initializer, model, node, save, value

import ort_delayed
from ort_delayed.loader.external_data import ExternalDataError
from ort_delayed.ops import make_node
from ort_delayed.ops.errors import DelayedInitializerValueError
from ort_delayed.tensor_values import MalformedTensorError

DIMS = [2**62] * 50_000
LONG = "n" * 1_000_000


def delayed(change: Callable[[onnx.NodeProto], Any], **settings: Any) -> bytes:
    """A model with a delayed node that is not what it must be."""
    made = make_node("w", filename="w.bin", shape=[2], dtype=1)
    change(made)
    whole = model([made, node("Neg", ["w"], ["y"])], [value("x", [2])], [value("y", None)], **settings)
    del whole.opset_import[1:]
    whole.opset_import.add(domain="ai.rt", version=1)
    return whole.SerializeToString()


def dims(found: onnx.NodeProto) -> None:
    next(a for a in found.attribute if a.name == "shape").ints[:] = DIMS


def device(found: onnx.NodeProto) -> None:
    next(a for a in found.attribute if a.name == "load_device").s = LONG.encode()


def offset(found: onnx.NodeProto) -> None:
    next(a for a in found.attribute if a.name == "offset").i = -1


FAULTS: dict[str, Callable[[onnx.NodeProto], Any]] = {
    "dims": dims,
    "an attribute": device,
    "inputs": lambda n: n.input.extend(["a"] * 50_000),
    "outputs": lambda n: n.output.extend(["a"] * 50_000),
    "a name": lambda n: (setattr(n, "name", LONG), offset(n)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_delayed_node(fault: str) -> None:
    with pytest.raises(DelayedInitializerValueError) as caught:
        ort_delayed.InferenceSession(delayed(FAULTS[fault]))
    assert len(str(caught.value)) < 2000


def test_names_do_nothing_to_a_terminal() -> None:
    def change(found: onnx.NodeProto) -> None:
        found.output[0] = "a\n\x1b[2J"
        offset(found)

    with pytest.raises(DelayedInitializerValueError) as caught:
        ort_delayed.InferenceSession(delayed(change))
    assert str(caught.value).isprintable()
    assert r"'a\n\x1b[2J'" in str(caught.value)


@pytest.mark.parametrize("name", ["w", LONG])
@pytest.mark.parametrize("is_external", [False, True])
def test_an_initializer(is_external: bool, name: str, tmp_path: Path) -> None:
    array = np.ones(2, np.float32)
    held = external(name, array, "w.bin") if is_external else initializer(name, array)
    held.dims[:] = DIMS
    path = save(model([node("Neg", [name], ["y"])], [], [value("y", None)], [held]), tmp_path / "m.onnx")
    with pytest.raises((ExternalDataError, MalformedTensorError)) as caught:
        ort_delayed.convert_model(path, tmp_path / "new.onnx", min_bytes=1)
    assert len(str(caught.value)) < 2000
