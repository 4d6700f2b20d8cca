"""Which cases the benchmarks' plans have, and what their limits come to."""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import cases
from cases import PLANS, Case, Limit, Model, Sizes, Way


def test_a_limit_is_reckoned_from_the_weights() -> None:
    sizes = Sizes(weights=1000, largest=100, group=300)
    assert Limit(weights=0.5, largest=3, group=1).bytes(sizes) == 500 + 300 + 300
    assert Limit(mib=2).bytes(sizes) == 2 << 20


def test_a_budget_is_its_own_limit() -> None:
    way = cases.budget(25)
    assert way.name == "budget 25 %"
    assert cases.limit(way, activations=True) == way.budget == Limit(weights=0.25)


@pytest.mark.parametrize(("way", "is_held"), [(cases.FILE, True), (cases.CPU, True), (cases.PLAIN, False)])
def test_what_is_promised_without_a_budget_leaves_activations_out(way: Way, is_held: bool) -> None:
    assert (cases.limit(way, activations=False) is not None) == is_held
    assert cases.limit(way, activations=True) is None


def test_another_library_is_held_to_nothing() -> None:
    others = [way for way in cases.LOADERS if way.opener.startswith(("openmed", "load_file", "readinto"))]
    assert len(others) == 5
    assert all(cases.limit(way, activations=False) is None for way in others)


def test_a_model_is_called_by_its_dimensions() -> None:
    assert Model("chain", (64, 2048)).name == "chain 64x2048"
    assert Model("decoder").name == "decoder"


@pytest.mark.parametrize("name", PLANS)
def test_cases_of_a_plan_are_told_apart(name: str) -> None:
    keys = [case.key for case in PLANS[name]().cases]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", PLANS)
def test_every_case_is_measured_beside_its_reference(name: str) -> None:
    plan = PLANS[name]()
    groups: dict[tuple[str, int, str], list[Case]] = {}
    for case in plan.cases:
        groups.setdefault(case.key[:3], []).append(case)
    for group in groups.values():
        ways = {case.way.name for case in group}
        for case in group:
            assert case.way.reference in ways, case.key
            assert not case.way.same_as or case.way.same_as in ways, case.key


@pytest.mark.parametrize("name", PLANS)
def test_a_group_is_measured_in_one_piece(name: str) -> None:
    groups = [case.key[:3] for case in PLANS[name]().cases]
    changes = sum(a != b for a, b in itertools.pairwise(groups))
    assert changes == len(set(groups)) - 1


def test_the_quick_plan_has_no_times_and_needs_no_package() -> None:
    plan = PLANS["quick"]()
    assert not plan.times
    assert not any(case.way.needs or case.model.kind == "minilm" for case in plan.cases)
    kinds = {case.model.kind for case in plan.cases}
    assert kinds == {"chain", "decoder", "int8", "float16", "convolutional", "lstm"}


def test_the_full_plan_goes_from_few_weights_to_many_and_from_little_to_much() -> None:
    chains = {case.model.dimensions for case in PLANS["full"]().cases if case.model.kind == "chain"}
    assert {10, 5000} <= {count for count, side in chains if side == 256}
    sizes = [count * side * side * 4 / 2**30 for count, side in chains if side == 2048]
    assert min(sizes) < 0.1
    assert max(sizes) == 4
