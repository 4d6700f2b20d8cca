"""Who reads each value: deep models too; what follows from it is in the tests of converting and restoring."""

from __future__ import annotations

from delayed_models import function, model, node, value

from ort_delayed.value_uses import find_uses, iter_scopes


def test_a_chain_of_functions_longer_than_the_recursion_limit() -> None:
    functions = [function("F0", ["a"], ["b"], [node("Neg", ["a"], ["b"])])]
    for i in range(1, 3000):
        nodes = [node(f"F{i - 1}", ["a"], ["t"], domain="local"), node("Neg", ["t"], ["b"])]
        functions.append(function(f"F{i}", ["a"], ["b"], nodes))
    made = model([node("F2999", ["x"], ["y"], domain="local")], [value("x", [1])], [value("y", [1])])
    made.functions.extend(functions)
    scopes = list(iter_scopes(made))
    uses = find_uses(made, scopes)
    # In the order of a run: what the innermost function reads comes before what is done with its result.
    innermost, outermost = (next(s for s in scopes if s.label == f"function local::{f}") for f in ("F0", "F2999"))
    assert uses.order[outermost, "a"] < uses.order[innermost, "a"] < uses.order[outermost, "t"]
