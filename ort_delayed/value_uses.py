"""Who reads each value of a model: through inner graphs, Identity nodes and calls of model-local functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import onnx

from ort_delayed.graphs import bodies
from ort_delayed.operator_inputs import reason_to_stay_constant

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

__all__ = ["Scope", "Uses", "find_uses", "iter_scopes"]

FunctionKey = tuple[str, str, str]


@dataclass(frozen=True, eq=False, slots=True)
class Scope:
    """A node list with the names that stand in it: a graph, a body, or a model-local function.

    Attributes:
        label: how reports name it.
        graph: the graph, or None for a function.
        function: the function, or None for a graph.
        parent: the scope around a body, whose names it can read; None for the main graph and for functions.
        holder: the node that a body belongs to, or None.
    """

    label: str
    graph: onnx.GraphProto | None = None
    function: onnx.FunctionProto | None = None
    parent: Scope | None = None
    holder: onnx.NodeProto | None = None

    @property
    def nodes(self) -> RepeatedCompositeFieldContainer[onnx.NodeProto]:
        """The live node list."""
        holder = self.graph if self.graph is not None else self.function
        assert holder is not None
        return holder.node

    @property
    def root(self) -> Scope:
        """The main graph or the function that the scope stands in."""
        return self if self.parent is None else self.parent.root


def iter_scopes(model: onnx.ModelProto) -> Iterator[Scope]:
    """The main graph, its bodies at any depth, then every function and its bodies; outer before inner."""
    yield from _with_bodies(Scope("main graph", graph=model.graph))
    for function in model.functions:
        yield from _with_bodies(Scope(f"function {_qualified(function.domain, function.name)}", function=function))


def _with_bodies(scope: Scope) -> Iterator[Scope]:
    yield scope
    for number, node in enumerate(scope.nodes):
        for body in bodies(node):
            label = f"{node.op_type} {node.name or f'#{number}'!r} {body.name or 'body'!r}"
            if scope.parent is not None or scope.function is not None:
                label = f"{scope.label} / {label}"
            yield from _with_bodies(Scope(label, graph=body, parent=scope, holder=node))


@dataclass(frozen=True, slots=True)
class _Use:
    """One reader: input ``index`` of ``node`` in ``scope``, or a graph's output where ``node`` is None."""

    scope: Scope
    node: onnx.NodeProto | None
    index: int = 0


@dataclass(slots=True)
class Uses:
    """The readers of every value, and the values in order of their first use in a run."""

    order: dict[tuple[Scope, str], int] = field(default_factory=dict)
    _readers: dict[tuple[Scope, str], list[_Use]] = field(default_factory=dict)
    _functions: dict[FunctionKey, Scope] = field(default_factory=dict)

    def is_read(self, scope: Scope, name: str) -> bool:
        """Whether any node reads the value, or a graph yields it."""
        return (scope, name) in self._readers

    def is_output(self, scope: Scope, name: str) -> bool:
        """Whether a graph yields the value under its own name."""
        return any(use.node is None for use in self._readers.get((scope, name), ()))

    def reason_to_stay_constant(self, scope: Scope, name: str) -> str | None:
        """Why ONNX Runtime or shape inference needs the value while loading; None where it does not."""
        pending = [(scope, name)]
        seen = set(pending)
        while pending:
            for use in self._readers.get(pending.pop(), ()):
                if use.node is None:
                    continue
                for place in self._passed_on(use):
                    if place not in seen:
                        seen.add(place)
                        pending.append(place)
                if _key(use.node) not in self._functions:
                    reason = reason_to_stay_constant(use.node, use.index)
                    if reason is not None:
                        return reason
        return None

    def _passed_on(self, use: _Use) -> Iterator[tuple[Scope, str]]:
        """Where a node hands its input on unchanged: behind an Identity, inside a model-local function."""
        node = use.node
        if node is None:
            return
        called = self._functions.get(_key(node))
        if called is not None and called.function is not None:
            if use.index < len(called.function.input):
                yield called, called.function.input[use.index]
        elif node.op_type == "Identity" and node.domain in ("", "ai.onnx") and node.output:
            yield use.scope, node.output[0]


def find_uses(model: onnx.ModelProto, scopes: Sequence[Scope]) -> Uses:
    """Walk the model in the order in which it runs and note every reader."""
    return _Walk(scopes).walk()


class _Walk:
    def __init__(self, scopes: Sequence[Scope]) -> None:
        self._uses = Uses()
        self._defined = {scope: _defined_names(scope) for scope in scopes}
        self._bodies = {id(scope.graph): scope for scope in scopes if scope.graph is not None}
        self._roots = [scope for scope in scopes if scope.parent is None]
        for scope in self._roots:
            if scope.function is not None:
                key = (scope.function.domain, scope.function.name, scope.function.overload)
                self._uses._functions[key] = scope
        self._visited: set[Scope] = set()

    def walk(self) -> Uses:
        # Functions are visited where they are first called; the ones that nobody calls come last.
        for scope in self._roots:
            self._visit(scope)
        return self._uses

    def _visit(self, scope: Scope) -> None:
        # Not by recursion: a model can hold a chain of thousands of functions, each calling the next.
        pending = [self._steps(scope)]
        while pending:
            inner = next(pending[-1], None)
            if inner is None:
                pending.pop()
            else:
                pending.append(self._steps(inner))

    def _steps(self, scope: Scope) -> Iterator[Scope]:
        """Note what a scope reads; yields each scope that runs meanwhile, when it does."""
        if scope in self._visited:
            return
        self._visited.add(scope)
        for node in scope.nodes:
            for index, name in enumerate(node.input):
                self._note(scope, name, _Use(scope, node, index))
            for body in bodies(node):
                yield self._bodies[id(body)]
            called = self._uses._functions.get(_key(node))
            if called is not None:
                yield called
        outputs = [o.name for o in scope.graph.output] if scope.graph is not None else _function_outputs(scope)
        for name in outputs:
            self._note(scope, name, _Use(scope, None))

    def _note(self, scope: Scope, name: str, use: _Use) -> None:
        place: Scope | None = scope
        while place is not None and name not in self._defined[place]:
            place = place.parent
        if place is None or not name:
            return
        self._uses.order.setdefault((place, name), len(self._uses.order))
        self._uses._readers.setdefault((place, name), []).append(use)


def _function_outputs(scope: Scope) -> list[str]:
    return list(scope.function.output) if scope.function is not None else []


def _defined_names(scope: Scope) -> set[str]:
    names = {output for node in scope.nodes for output in node.output}
    if scope.graph is not None:
        names.update(i.name for i in scope.graph.input)
        names.update(t.name for t in scope.graph.initializer)
        names.update(t.values.name for t in scope.graph.sparse_initializer)
    elif scope.function is not None:
        names.update(scope.function.input)
    return names


def _key(node: onnx.NodeProto) -> FunctionKey:
    return (node.domain, node.op_type, node.overload)


def _qualified(domain: str, name: str) -> str:
    return f"{domain or 'ai.onnx'}::{name}"
