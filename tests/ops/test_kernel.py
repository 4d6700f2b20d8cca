"""The kernel behind the op: it never raises, and what a failing one yields never passes for the tensor."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from delayed_models import model, node, value
from onnx import helper

from ort_delayed.loader.element_types import ELEMENT_TYPES, element_type_from_dtype
from ort_delayed.ops import kernel
from ort_delayed.ops.buffers import BufferPool
from ort_delayed.ops.errors import DelayedInitializerError, Payload
from ort_delayed.ops.kernel import Binding, kernel_op_type
from ort_delayed.ops.payloads import HeldPayload

FLOAT32 = element_type_from_dtype(np.dtype("float32"))
INT8 = element_type_from_dtype(np.dtype("int8"))
assert FLOAT32 is not None
assert INT8 is not None
PAYLOAD = Payload("node 'n'", "/w.bin", 0, 12)


class Failing:
    """A payload source that raises."""

    element_type = FLOAT32

    def __init__(self, error: BaseException, shape: tuple[int, ...] = (3,)) -> None:
        self.error, self.shape = error, shape

    def elements(self, pool: BufferPool) -> np.ndarray:
        raise self.error


def test_the_kernels_of_the_carried_types() -> None:
    assert kernel_op_type(FLOAT32) == "DelayedInitializer"
    names = {kernel_op_type(t) for t in ELEMENT_TYPES if t.delayed}
    assert len(names) == 12
    assert "DelayedInitializer_uint64" in names


def test_a_result_hands_its_array_on_unchanged() -> None:
    numbers = np.arange(6, dtype=np.float32)
    binding = Binding()
    result = kernel._table.invoke(FLOAT32, binding.add(HeldPayload(FLOAT32, (2, 3), numbers), PAYLOAD))
    assert result.shape == (2, 3)
    assert result.flatten().tolist() is numbers


@pytest.mark.parametrize(
    "error", [OSError(5, "odd"), MemoryError(), KeyboardInterrupt(), SystemExit(), RecursionError()]
)
def test_whatever_is_raised_becomes_a_tensor_that_does_not_fit(error: BaseException) -> None:
    binding = Binding()
    result = kernel._table.invoke(FLOAT32, binding.add(Failing(error), PAYLOAD))
    assert result.shape[0] == 0
    assert result.flatten().tolist().size == 0
    kept = binding.take_error(result.shape[1])
    assert isinstance(kept, DelayedInitializerError)
    assert kept.__cause__ is error
    assert binding.take_error(result.shape[1]) is None


def test_an_unknown_handle_and_a_wrong_type() -> None:
    assert math.prod(kernel._table.invoke(FLOAT32, 12345).shape) == 0
    binding = Binding()
    handle = binding.add(HeldPayload(FLOAT32, (3,), np.zeros(3, np.float32)), PAYLOAD)
    result = kernel._table.invoke(INT8, handle)
    assert "float32" in str(binding.take_error(result.shape[1]))
    binding.close()
    assert kernel._table.invoke(FLOAT32, handle).shape == (0, 0)
    binding.close()


def test_an_unknown_handle_is_logged_even_by_a_handler_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise KeyboardInterrupt

    handler = Raising()
    logging.getLogger("ort_delayed").addHandler(handler)
    try:
        with caplog.at_level(logging.ERROR, "ort_delayed"):
            assert kernel._table.invoke(FLOAT32, 12345).shape == (0, 0)
    finally:
        logging.getLogger("ort_delayed").removeHandler(handler)
    with caplog.at_level(logging.ERROR, "ort_delayed"):
        kernel._table.invoke(FLOAT32, 12345)
    assert "the session options that this model was prepared with are gone" in caplog.text


def test_handles_are_unguessable_and_distinct() -> None:
    binding = Binding()
    source = HeldPayload(FLOAT32, (1,), np.zeros(1, np.float32))
    handles = [binding.add(source, PAYLOAD) for _ in range(100)]
    assert len(set(handles)) == 100
    assert max(handles) > 2**48
    assert all(0 <= h < 2**63 for h in handles)
    binding.close()
    assert not set(handles) & kernel._table.entries.keys()


def test_errors_that_nobody_fetches_do_not_heap_up() -> None:
    binding = Binding()
    handle = binding.add(Failing(OSError(5, "odd")), PAYLOAD)
    for _ in range(300):
        result = kernel._table.invoke(FLOAT32, handle)
    assert len(binding._bound.errors) <= 64
    assert binding.take_error(result.shape[1]) is not None


def test_a_closed_binding_lets_its_payloads_go() -> None:
    numbers = np.zeros(3, np.float32)
    gone = weakref.ref(numbers)
    binding = Binding()
    binding.add(HeldPayload(FLOAT32, (3,), numbers), PAYLOAD)
    del numbers
    assert gone() is not None
    binding.close()
    gc.collect()
    assert gone() is None


def test_failures_are_logged_where_asked_even_by_a_handler_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("from the handler")

    quiet, loud = Binding(), Binding(log_failures=True)
    with caplog.at_level(logging.ERROR, "ort_delayed"):
        kernel._table.invoke(FLOAT32, quiet.add(Failing(OSError(5, "odd")), PAYLOAD))
        assert not caplog.records
        kernel._table.invoke(FLOAT32, loud.add(Failing(OSError(5, "odd")), PAYLOAD))
        assert "/w.bin" in caplog.text
    handler = Raising()
    logging.getLogger("ort_delayed").addHandler(handler)
    try:
        result = kernel._table.invoke(FLOAT32, loud.add(Failing(OSError(5, "odd")), PAYLOAD))
    finally:
        logging.getLogger("ort_delayed").removeHandler(handler)
    assert "/w.bin" in str(loud.take_error(result.shape[1]))


SHAPES: list[tuple[int, ...]] = [
    (),
    (1,),
    (3,),
    (2, 2),
    (1,) * 8,
    (0,),
    (0, 1),
    (1, 0),
    (0, 2),
    (2, 0),
    (0, 3, 5),
    (5, 0, 3),
    (0, 0),
    (0, 0, 30),
    (2, 3, 0, 5),
    (0, 1, 1, 1, 1, 1, 1, 1),
    (7, 0, 1, 1, 1, 1, 1, 1),
]


def reshape_accepts(shape: Sequence[int], target: Sequence[int], opset: int) -> bool:
    """Whether onnx's own Reshape takes a tensor of ``shape`` to the guard's target."""
    settings = {"allowzero": 1} if opset >= 14 and 0 in target else {}
    made = model(
        [node("Reshape", ["x", "shape"], ["y"], **settings)],
        [value("x", None)],
        [value("y", None)],
        initializers=[helper.make_tensor("shape", onnx.TensorProto.INT64, [len(target)], list(target))],
        opset=opset,
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(made.SerializeToString(), options)
    try:
        session.run(None, {"x": np.zeros(shape, np.float32)})
    except Exception:
        return False
    return True


@pytest.mark.parametrize("opset", [7, 13, 14, 17])
@pytest.mark.parametrize("declared", SHAPES)
def test_no_guard_takes_what_a_failing_op_yields(declared: tuple[int, ...], opset: int, tmp_path: Path) -> None:
    assert reshape_accepts(declared, declared, opset)
    binding = Binding()
    result = kernel._table.invoke(FLOAT32, binding.add(Failing(OSError(5, "odd"), declared), PAYLOAD))
    assert not reshape_accepts(result.shape, declared, opset)
    assert math.prod(result.shape) == result.flatten().tolist().size


@pytest.mark.parametrize("error_id", [1, 2, 3, 4, 5, 6, 10, 15, 30, 49999, 50000])
@pytest.mark.parametrize("declared", [s for s in SHAPES if 0 in s])
def test_misfits_for_shapes_with_a_zero_are_small_and_never_fit(declared: tuple[int, ...], error_id: int) -> None:
    shape = kernel._misfit(declared, error_id)
    assert shape[0] == error_id
    assert len(shape) == len(declared) + 1
    assert 0 < math.prod(shape) <= 5 * error_id
    # Before opset 14 a zero in the target takes the input's dim at its place.
    copied = [d or shape[i] for i, d in enumerate(declared)]
    assert math.prod(copied) != math.prod(shape)
