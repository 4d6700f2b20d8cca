"""Running one test body on many generated cases: a few in every run of the suite, many in ``make soak``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

__all__ = ["fuzz", "lengths"]

Case = TypeVar("Case")
_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def lengths(short: int, long: int) -> pytest.MarkDecorator:
    """Parametrizes ``examples``: how many cases in the suite, and how many in ``make soak``."""
    soak = pytest.param(long, id="soak", marks=pytest.mark.soak)
    return pytest.mark.parametrize("examples", [pytest.param(short, id="short"), soak])


def fuzz(examples: int, cases: st.SearchStrategy[Case], trial: Callable[[Case], object]) -> None:
    """Call ``trial`` with ``examples`` cases. The suite tries the same ones each time, ``make soak`` new ones."""
    soaking = examples >= 1000

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=not soaking,
        database=None,
        print_blob=soaking,
        suppress_health_check=_CHECKS,
        # Explaining a failure tries hundreds of further cases, each of which may end a process.
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
    @given(cases)
    def each(case: Case) -> None:
        trial(case)

    each()
