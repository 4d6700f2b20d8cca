"""Giving initializers names that no other graph of the model uses.

``SessionOptions.add_initializer`` goes by name alone: one name overrides the initializers that are called so in both
branches of an If, and the constants that ONNX Runtime makes of Constant nodes.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from ort_delayed.graphs import NamePool, bodies, iter_graphs

__all__ = ["make_names_unique", "rename_shadowing_values", "rename_value"]


def make_names_unique(
    model: onnx.ModelProto, installed: Iterable[tuple[onnx.GraphProto | None, onnx.TensorProto]]
) -> None:
    """Rename values, so that the name of each installed initializer means nothing else in any graph of the model.

    The main graph keeps its names. An initializer that is installed in a body gets a free name, and a constant in a
    body that is called as one installed in the main graph does.

    Args:
        model: changed in place.
        installed: the body, or None for the main graph, and the proto of each initializer.
    """
    pool = NamePool(model)
    main_names: set[str] = set()
    for graph, tensor in installed:
        if graph is None:
            main_names.add(tensor.name)
        elif tensor.name not in {i.name for i in graph.input}:
            rename_value(graph, tensor.name, pool.fresh(tensor.name))
    _, *inner = iter_graphs(model.graph)
    for body in inner:
        for name in [n for n in _constants(body) if n in main_names]:
            rename_value(body, name, pool.fresh(name))


def rename_shadowing_values(model: onnx.ModelProto) -> None:
    """Rename what nodes of a body yield under a name that a value around it has.

    ONNX Runtime writes such models (the Casts that it inserts around float16 are called after what they cast, in a body
    and in the bodies within), and refuses to load them.
    """
    pool = NamePool(model)
    pending: list[tuple[onnx.GraphProto, set[str]]] = [(model.graph, set())]
    while pending:
        graph, outer = pending.pop()
        for name in sorted({o for node in graph.node for o in node.output if o} & outer):
            rename_value(graph, name, pool.fresh(name))
        names = outer | _defined(graph)
        pending.extend((body, names) for node in graph.node for body in bodies(node))


def rename_value(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Rename the value ``old`` of a graph, which defines it, in the graph and in all bodies that capture it."""
    for tensor in graph.initializer:
        if tensor.name == old:
            tensor.name = new
    for value in (*graph.output, *graph.value_info):
        if value.name == old:
            value.name = new
    for annotation in graph.quantization_annotation:
        if annotation.tensor_name == old:
            annotation.tensor_name = new
        for entry in annotation.quant_parameter_tensor_names:
            if entry.value == old:
                entry.value = new
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == old:
                    names[index] = new
        for body in bodies(node):
            if old not in _defined(body):
                rename_value(body, old, new)


def _constants(graph: onnx.GraphProto) -> list[str]:
    names = [t.name for t in graph.initializer]
    return names + [o for n in graph.node if n.op_type == "Constant" and n.domain in ("", "ai.onnx") for o in n.output]


def _defined(graph: onnx.GraphProto) -> set[str]:
    names = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    return names.union(*(node.output for node in graph.node))
