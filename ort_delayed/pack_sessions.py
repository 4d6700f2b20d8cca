"""What packing has ONNX Runtime do: optimise a model, name the types of its values, pack the weights of a piece."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx
import onnxruntime

from ort_delayed.external_files import EXTERNAL_DIRECTORY_ENTRY
from ort_delayed.graphs import bodies, captured_names, iter_graphs
from ort_delayed.pack_pieces import element_of
from ort_delayed.unique_names import rename_shadowing_values

__all__ = ["OPTIMIZATION_LEVELS", "SavedModel", "optimize_model", "pack_piece", "value_types"]

OPTIMIZATION_LEVELS = {
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}

# Session config entries, from onnxruntime_session_options_config_keys.h.
_NO_PREPACKING = "session.disable_prepacking"
_SAVE_PREPACKED = "session.save_external_prepacked_constant_initializers"
_SAVED_EXTERNAL_FILE = "session.optimized_model_external_initializers_file_name"
_SAVED_EXTERNAL_LEAST = "session.optimized_model_external_initializers_min_size_in_bytes"

_ERROR = 3  # log severity: that a model optimised for this machine suits this machine only is in the manifest


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A model that ONNX Runtime wrote.

    Attributes:
        model: its proto; external locations are relative to the directory of ``data_path``.
        data_path: the file with its external data; it does not exist where there is none.
    """

    model: onnx.ModelProto
    data_path: str


def optimize_model(
    model: bytes, external_directory: str, scratch: str, *, optimize: str, least_bytes: int
) -> SavedModel:
    """Have ONNX Runtime optimise a model and write the result into ``scratch``. Nothing is packed.

    Args:
        model: the serialized model. (Given by path, ONNX Runtime 1.23 looks for external data beside it only.)
        external_directory: what its external locations are relative to.
        scratch: a directory for the result.
        optimize: a key of ``OPTIMIZATION_LEVELS``.
        least_bytes: initializers of at least so many bytes become external data.

    Raises:
        Exception: what onnxruntime says of a model that it cannot load.
    """
    options = _options(OPTIMIZATION_LEVELS[optimize])
    options.add_session_config_entry(EXTERNAL_DIRECTORY_ENTRY, external_directory)
    options.add_session_config_entry(_NO_PREPACKING, "1")
    saved = _saved(model, options, os.path.join(scratch, "optimized"), least_bytes)
    _drop_duplicates(saved.model)
    rename_shadowing_values(saved.model)
    return saved


def pack_piece(model: onnx.ModelProto, scratch: str, stem: str) -> SavedModel:
    """Have ONNX Runtime pack the weights of a piece; their entries in the result say where the packed bytes are.

    Args:
        model: the piece; its external locations are relative to ``scratch``.
        scratch: a directory for the result.
        stem: begins the names of the files that are written there.

    Raises:
        Exception: what onnxruntime says, for instance because a kernel packs what it cannot save.
    """
    path = os.path.join(scratch, f"{stem}_raw.onnx")
    with open(path, "wb") as file:
        file.write(model.SerializeToString())
    options = _options(OPTIMIZATION_LEVELS["none"])
    options.add_session_config_entry(_SAVE_PREPACKED, "1")
    return _saved(path, options, os.path.join(scratch, stem), 0)


def value_types(model: onnx.ModelProto, directory: str, wanted: Collection[int]) -> dict[int, dict[str, str]]:
    """ONNX Runtime's type strings of all values that nodes yield or graphs take, for the graphs whose ``id`` is wanted.

    Args:
        model: a model that ONNX Runtime wrote. It writes no types of inner values, but infers them when it loads.
        directory: what external locations are relative to.
        wanted: ids of the model's graph and of bodies.
    """
    types: dict[int, dict[str, str]] = {}
    _add_types(model, model.graph, {}, {}, directory, wanted, types)
    return types


def _drop_duplicates(model: onnx.ModelProto) -> None:
    """ONNX Runtime 1.23 writes a body's initializers twice: with the source's external data, then with its own."""
    for graph in iter_graphs(model.graph):
        last = {tensor.name: index for index, tensor in enumerate(graph.initializer)}
        for index in reversed([i for i, t in enumerate(graph.initializer) if last[t.name] != i]):
            del graph.initializer[index]


def _add_types(
    model: onnx.ModelProto,
    graph: onnx.GraphProto,
    outer: Mapping[str, str],
    outer_weights: Mapping[str, onnx.TensorProto],
    directory: str,
    wanted: Collection[int],
    types: dict[int, dict[str, str]],
) -> None:
    if not any(id(g) in wanted for g in iter_graphs(graph)):
        return
    if any(element_of(outer[name]) is None for name in captured_names(graph) if name in outer):
        return  # a body that captures a sequence: its weights are packed when a session is made
    alone = _standing_alone(model, graph, outer, outer_weights)
    options = _options(OPTIMIZATION_LEVELS["none"])
    options.add_session_config_entry(_NO_PREPACKING, "1")
    options.add_session_config_entry(EXTERNAL_DIRECTORY_ENTRY, directory)
    session = onnxruntime.InferenceSession(alone.SerializeToString(), options, enable_fallback=0)
    found = {v.name: v.type for v in (*session.get_inputs(), *session.get_outputs())}
    del session
    types[id(graph)] = found
    weights = {**outer_weights, **{t.name: t for t in graph.initializer}}
    for node in graph.node:
        for body in bodies(node):
            _add_types(model, body, {**outer, **found}, weights, directory, wanted, types)


def _standing_alone(
    model: onnx.ModelProto,
    graph: onnx.GraphProto,
    outer: Mapping[str, str],
    outer_weights: Mapping[str, onnx.TensorProto],
) -> onnx.ModelProto:
    """The graph as a model that yields every value; what a body captures are its inputs or initializers."""
    alone = onnx.ModelProto(ir_version=model.ir_version)
    alone.opset_import.extend(model.opset_import)
    alone.functions.extend(model.functions)
    alone.graph.CopyFrom(graph)
    for name in sorted(captured_names(graph)):
        if name in outer_weights:
            alone.graph.initializer.append(outer_weights[name])
        elif name in outer:
            alone.graph.input.add(name=name).type.tensor_type.elem_type = element_of(outer[name]) or 0
    yielded = {o.name for o in graph.output}
    # A graph that yields one of its inputs or a captured value would need a node for it.
    produced = {name for node in graph.node for name in node.output if name}
    for index in reversed([i for i, o in enumerate(alone.graph.output) if o.name not in produced]):
        del alone.graph.output[index]
    alone.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(produced - yielded))
    return alone


def _options(level: onnxruntime.GraphOptimizationLevel) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = _ERROR
    return options


def _saved(model: str | bytes, options: onnxruntime.SessionOptions, stem: str, least_bytes: int) -> SavedModel:
    saved = SavedModel(onnx.ModelProto(), f"{stem}.data")
    options.optimized_model_filepath = f"{stem}.onnx"
    options.add_session_config_entry(_SAVED_EXTERNAL_FILE, os.path.basename(saved.data_path))
    options.add_session_config_entry(_SAVED_EXTERNAL_LEAST, str(least_bytes))
    onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"], enable_fallback=0)
    with open(f"{stem}.onnx", "rb") as file:
        saved.model.ParseFromString(file.read())
    return saved
