"""What the tests of a hostile world work on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from trial_worker import TrialWorker


@pytest.fixture(scope="module")
def worker() -> Iterator[TrialWorker]:
    """The process that a module's cases are tried in."""
    with TrialWorker() as made:
        yield made
        if made.upstream:
            print(f"{len(made.upstream)} of {made.trials} cases kill plain onnxruntime too")
