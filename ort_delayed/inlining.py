"""Inlining the model-local functions that deliver or take delayed weights.

ONNX Runtime inlines functions itself, but appends their nodes to the node list, which makes all delayed nodes of all
calls run first. Inlined beforehand, they can be put where each loads right before its use.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator

import onnx
import onnx.inliner
from google.protobuf.message import DecodeError, EncodeError

from ort_delayed.graphs import bodies, iter_graphs, iter_nodes, read_names
from ort_delayed.ops.attributes import is_delayed
from ort_delayed.ops.errors import DelayedInitializerValueError
from ort_delayed.ordering import order_nodes

__all__ = ["inline_delayed_functions"]

FunctionId = tuple[str, str]
Overload = tuple[str, str, str]
_DETACH_BYTES = 4096
_MOST_NODES = 250_000


def inline_delayed_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with every function inlined that holds a delayed node, directly or not, or is given one's value.

    The model itself is returned where there is none. Everything else, other functions included, stays as it was.
    """
    while wanted := _wanted(model):
        _complete_imports(model, wanted)
        _complete_calls(model)
        # The inliner is a C++ function that gets the model serialized: weights do not have to make that journey.
        mark = secrets.token_bytes(16)  # no value of the model can be taken for it
        payloads = _detach(model, mark)
        inlined = _inlined(model, wanted)
        _attach(model, payloads, mark)
        _attach(inlined, payloads, mark)
        model = inlined
    return model


def _wanted(model: onnx.ModelProto) -> set[FunctionId]:
    functions = {(f.domain, f.name) for f in model.functions}
    if not functions:
        return set()
    wanted = _holding(model.functions)
    called = {(n.domain, n.op_type) for n in _called_nodes(model)}
    given = {(n.domain, n.op_type) for n in _given_delayed_values(model.graph, set(), set())}
    return (wanted | (given & functions)) & called


def _inlined(model: onnx.ModelProto, wanted: set[FunctionId]) -> onnx.ModelProto:
    """The model with the wanted functions inlined.

    Raises:
        DelayedInitializerValueError: they call each other in a circle, too deeply or too often, or a call does not
            fit its function.
    """
    _check_size(model, wanted)
    try:
        made: onnx.ModelProto = onnx.inliner.inline_selected_functions(model, sorted(wanted))
    except (RuntimeError, ValueError, onnx.checker.ValidationError, DecodeError, EncodeError) as error:
        named = ", ".join(f"'{domain}::{name}'" for domain, name in sorted(wanted)[:3])
        more = f" and {len(wanted) - 3} more" if len(wanted) > 3 else ""
        raise DelayedInitializerValueError(
            f"the functions that deliver or take delayed weights ({named}{more}) cannot be inlined: {error}"
        ) from error
    return made


def _check_size(model: onnx.ModelProto, wanted: set[FunctionId]) -> None:
    """Refuse functions that grow beyond all bounds: each calling the next one twice, thirty of them make 2**30 nodes.

    A circle of calls is refused as well: onnx's inliner before 1.22 dies of it.
    """
    bodies_of = {(f.domain, f.name, f.overload): f.node for f in model.functions if (f.domain, f.name) in wanted}
    twice = Counter((f.domain, f.name, f.overload) for f in model.functions if (f.domain, f.name) in wanted)
    if twice and max(twice.values()) > 1:
        (domain, name, _), _ = twice.most_common(1)[0]
        raise DelayedInitializerValueError(
            f"the function '{domain}::{name}' cannot be inlined: the model defines it twice"
        )
    size: dict[Overload, int] = {}
    calls: dict[Overload, Counter[Overload]] = {}
    callers: dict[Overload, list[Overload]] = {key: [] for key in bodies_of}
    for key, nodes in bodies_of.items():
        reached = Counter((n.domain, n.op_type, n.overload) for n in iter_nodes(nodes))
        size[key] = reached.total()
        calls[key] = Counter({called: number for called, number in reached.items() if called in bodies_of})
        for called in calls[key]:
            callers[called].append(key)
    waiting = {key: len(called) for key, called in calls.items()}
    ready = [key for key, number in waiting.items() if not number]
    while ready:
        key = ready.pop()
        for caller in callers[key]:
            # The sum stops growing once it is too large: it would become a number of thousands of digits.
            size[caller] = min(size[caller] + calls[caller][key] * size[key], _MOST_NODES + 1)
            waiting[caller] -= 1
            if not waiting[caller]:
                ready.append(caller)
    circle = [f"'{domain}::{name}'" for (domain, name, _), number in waiting.items() if number]
    if circle:
        raise DelayedInitializerValueError(
            f"the functions that deliver or take delayed weights ({', '.join(circle[:3])}) cannot be inlined: "
            "Cycle of calls"
        )
    total = sum(size.get((n.domain, n.op_type, n.overload), 1) for n in iter_nodes(model.graph.node))
    if total > _MOST_NODES:
        raise DelayedInitializerValueError(
            f"the functions that deliver or take delayed weights cannot be inlined: the model would have more than "
            f"{_MOST_NODES} nodes"
        )


def _complete_imports(model: onnx.ModelProto, wanted: set[FunctionId]) -> None:
    """What a function's nodes need, the graph or the other function that takes them in needs too."""
    needs: dict[FunctionId, dict[str, int]] = {key: {} for key in wanted}
    callers: dict[FunctionId, set[FunctionId]] = {key: set() for key in wanted}
    called: list[tuple[onnx.ModelProto | onnx.FunctionProto, set[FunctionId]]] = []
    for holder, nodes in ((model, model.graph.node), *((f, f.node) for f in model.functions)):
        called.append((holder, {(n.domain, n.op_type) for n in iter_nodes(nodes)} & wanted))
        if isinstance(holder, onnx.FunctionProto) and (holder.domain, holder.name) in wanted:
            key = (holder.domain, holder.name)
            needs[key].update((o.domain, o.version) for o in holder.opset_import)
            for callee in called[-1][1]:
                callers[callee].add(key)
    pending = list(wanted)
    while pending:
        key = pending.pop()
        for caller in callers[key]:
            if not needs[key].keys() <= needs[caller].keys():
                needs[caller] = needs[key] | needs[caller]
                pending.append(caller)
    for holder, callees in called:
        imports = {o.domain for o in holder.opset_import}
        for domain, version in (item for callee in sorted(callees) for item in needs[callee].items()):
            if domain not in imports:
                imports.add(domain)
                holder.opset_import.add(domain=domain, version=version)


def _complete_calls(model: onnx.ModelProto) -> None:
    """Give every call the defaults of the attributes that it leaves out: onnx's inliner does not know defaults."""
    functions = {(f.domain, f.name, f.overload): f for f in model.functions if f.attribute_proto}
    for node in _called_nodes(model):
        function = functions.get((node.domain, node.op_type, node.overload))
        if function is not None:
            given = {a.name for a in node.attribute}
            node.attribute.extend(a for a in function.attribute_proto if a.name not in given)


def _called_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    yield from iter_nodes(model.graph.node)
    for function in model.functions:
        yield from iter_nodes(function.node)


def _holding(functions: Iterable[onnx.FunctionProto]) -> set[FunctionId]:
    """Functions whose body, or the body of a function that it calls, holds a delayed node."""
    holding: set[FunctionId] = set()
    callers: dict[FunctionId, set[FunctionId]] = {}
    pending: list[FunctionId] = []
    for function in functions:
        key = (function.domain, function.name)
        for node in iter_nodes(function.node):
            callers.setdefault((node.domain, node.op_type), set()).add(key)
            if is_delayed(node):
                pending.append(key)
    while pending:
        key = pending.pop()
        if key not in holding:
            holding.add(key)
            pending.extend(callers.get(key, ()))
    return holding


def _given_delayed_values(graph: onnx.GraphProto, constants: set[str], delayed: set[str]) -> Iterator[onnx.NodeProto]:
    """Nodes, in a graph and its bodies, that get what a delayed node yields, or what hangs on such values alone.

    ``constants`` are the names of the graphs around it that depend on no graph input, ``delayed`` those among them
    that a delayed node has part in.
    """
    hidden = {i.name for i in graph.input}
    delayed = delayed - hidden
    order, constants = order_nodes(graph.node, (constants - hidden) | {t.name for t in graph.initializer})
    for node in (graph.node[i] for i in order):
        reads = read_names(node)
        if is_delayed(node) or (reads <= constants and not reads.isdisjoint(delayed)):
            delayed.update(node.output)
    for node in graph.node:
        if not delayed.isdisjoint(node.input):
            yield node
        for body in bodies(node):
            yield from _given_delayed_values(body, constants, delayed)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for graph in iter_graphs(model.graph):
        yield from graph.initializer
    for node in _called_nodes(model):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
    for function in model.functions:
        for node in function.node:
            for body in bodies(node):
                for graph in iter_graphs(body):
                    yield from graph.initializer


def _detach(model: onnx.ModelProto, mark: bytes) -> list[bytes]:
    payloads: list[bytes] = []
    for tensor in _tensors(model):
        if tensor.HasField("raw_data") and len(tensor.raw_data) >= _DETACH_BYTES:
            payloads.append(tensor.raw_data)
            tensor.raw_data = mark + str(len(payloads) - 1).encode()
    return payloads


def _attach(model: onnx.ModelProto, payloads: list[bytes], mark: bytes) -> None:
    if not payloads:
        return
    for tensor in _tensors(model):
        if tensor.HasField("raw_data") and tensor.raw_data.startswith(mark):
            tensor.raw_data = payloads[int(tensor.raw_data[len(mark) :])]
