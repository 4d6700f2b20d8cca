"""Fixtures and settings for all tests."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import hypothesis
import numpy as np
import onnxruntime
import pytest

# With this directory on the path, tests/ort_delayed would pass for a namespace package; a real one has precedence,
# wherever on the path it stands. Behind everything else, so that an installed package is tested where there is one.
sys.path.append(str(Path(__file__).resolve().parent.parent))

# Every example makes sessions; the shared machines of continuous integration are slow now and then.
hypothesis.settings.register_profile(
    "ort_delayed", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("ort_delayed")
# A shell that starts `make test &` has it ignore interrupts, and all its children with it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Runs that fail are what many tests are about: ONNX Runtime need not log each one.
onnxruntime.set_default_logger_severity(4)


@pytest.fixture
def weight() -> np.ndarray:
    """A matrix, [3, 3] of float32, that no other has the same product with."""
    return np.arange(1, 10, dtype=np.float32).reshape(3, 3)


@pytest.fixture
def x() -> np.ndarray:
    """An input for models that multiply it with a [3, 3] weight."""
    return np.array([[1, -2, 3], [0.5, 0, -1]], np.float32)
