"""Writes a model whose large weights go to one external file as they come, so that it may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["FLOAT", "INT64", "GraphWriter", "made", "value_info", "write_external"]

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
_PAGE = 4096


@contextmanager
def made(directory: Path, name: str) -> Iterator[tuple[Path, bool]]:
    """The model's path, and whether it has still to be made; a model that was not finished is made again."""
    directory.mkdir(parents=True, exist_ok=True)
    path, finished = directory / f"{name}.onnx", directory / f"{name}.finished"
    new = not finished.exists()
    yield path, new
    if new:
        finished.touch()


def value_info(name: str, shape: Sequence[int | str], kind: int = FLOAT) -> onnx.ValueInfoProto:
    """An input or output of a graph."""
    return helper.make_tensor_value_info(name, kind, shape)


def write_external(data: BinaryIO, values: np.ndarray, name: str) -> TensorProto:
    """Write values to an open data file, on a page of their own; the initializer that refers to them."""
    data.write(b"\0" * (-data.tell() % _PAGE))
    tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(values.dtype), dims=values.shape)
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": Path(data.name).name, "offset": str(data.tell()), "length": str(values.nbytes)}
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    values.tofile(data)
    return tensor


@dataclass
class GraphWriter:
    """A graph that is being written; weights go to the file beside the model as they come, the same ones every time."""

    path: Path
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[TensorProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._data = open(self.path.with_suffix(".bin"), "wb")  # noqa: SIM115  (closed by `save`)

    def random(self, *shape: int) -> np.ndarray:
        """Seeded numbers, normally distributed."""
        return self._random.standard_normal(shape, np.float32)

    def uniform(self, *shape: int) -> np.ndarray:
        """Seeded numbers between -1 and 1."""
        return self._random.random(shape, np.float32) * 2 - 1

    def inline(self, values: np.ndarray, name: str) -> str:
        """An initializer in the model itself; its name."""
        self.initializers.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def external(self, values: np.ndarray, name: str) -> str:
        """An initializer in the file beside the model; its name."""
        self.initializers.append(write_external(self._data, values, name))
        return name

    def constant(self, values: object, kind: type = np.int64) -> str:
        """A small inline initializer that nobody calls by name."""
        return self.inline(np.array(values, kind), f"constant_{len(self.initializers)}")

    def add(self, op_type: str, *inputs: str, output: str | None = None, **attributes: object) -> str:
        """A node; the name of its output."""
        name = f"{op_type}_{len(self.nodes)}"
        output = output or f"{name}_output"
        self.nodes.append(helper.make_node(op_type, inputs, [output], name, **attributes))
        return output

    def add_node(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """A node with several outputs."""
        self.nodes.append(helper.make_node(op_type, inputs, outputs, f"{op_type}_{len(self.nodes)}"))

    def bias(self, width: int, name: str, kind: type = np.float32) -> str:
        """A small inline vector."""
        return self.inline((self.random(width) * np.float32(0.01)).astype(kind), name)

    @staticmethod
    def last(output: str, i: int, count: int) -> str | None:
        """The name of the model's output for the last of ``count`` layers, None (any name) for the others."""
        return output if i == count - 1 else None

    def save(self, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]) -> None:
        """Write the model, once all weights are written."""
        self._data.close()
        graph = helper.make_graph(self.nodes, self.path.stem, inputs, outputs, self.initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        self.path.write_bytes(model.SerializeToString())
