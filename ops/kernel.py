"""The Python custom ops behind ``ai.rt::DelayedInitializer``, and the process-wide table of handles they look up.

onnxruntime-extensions gives a Python op neither its node's ``shape`` nor a call when the kernel is made, and types
its output by the first op of that name. So a prepared model carries, for each delayed node, an op per element type
and one attribute: an unguessable number under which this table has the payload.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ort_delayed.loader.element_types import ELEMENT_TYPES, ElementType
from ort_delayed.ops.attributes import DOMAIN, OP_TYPE
from ort_delayed.ops.buffers import BufferPool
from ort_delayed.ops.errors import DelayedInitializerError, Payload, payload_error
from ort_delayed.ops.extensions import onnxruntime_extensions
from ort_delayed.ops.payloads import PayloadSource

__all__ = ["HANDLE_ATTRIBUTE", "Binding", "kernel_op_type"]

# Its name is what ONNX Runtime prints when a model that was not prepared reaches the kernel.
HANDLE_ATTRIBUTE: Final = "handle_given_by_ort_delayed_InferenceSession_or_prepare_model"
_ERRORS_KEPT: Final = 64
_LARGEST_ERROR_ID: Final = 50_000
_log = logging.getLogger("ort_delayed")
_GONE: Final = (
    "a delayed initializer cannot be read: the session options that this model was prepared with are gone, and its "
    "payloads with them. Make the session with the options that prepare_model was given, or prepare the model again "
    "with the options that the session is made with"
)


def kernel_op_type(element_type: ElementType, *, waits: bool = False) -> str:
    """The op type, in domain ``ai.rt``, of the kernel that yields ``element_type``.

    One that ``waits`` has an int64 input, which it does not use: it says when the kernel may run.
    """
    if waits:
        return f"{OP_TYPE}_after_{element_type.name}"
    return OP_TYPE if element_type.onnx == 1 else f"{OP_TYPE}_{element_type.name}"


class _Result:
    """What an op returns: shaped so that the extension copies the bytes once.

    The extension calls ``result.flatten().tolist()`` and copies ``item size x elements`` bytes from the array it
    gets. A real array's ``tolist`` would make a Python object of every element, hundreds of times slower, and would
    change uint64 above 2**53 and NaN payloads.
    """

    __slots__ = ("_elements", "shape")

    def __init__(self, shape: tuple[int, ...], elements: npt.NDArray[np.generic]) -> None:
        self.shape = shape
        self._elements = elements

    def flatten(self) -> _Result:
        return self

    def tolist(self) -> npt.NDArray[np.generic]:
        return self._elements


@dataclass(frozen=True, slots=True)
class _Entry:
    source: PayloadSource
    payload: Payload
    binding: _Bound


class _Bound:
    """What the entries of one binding share. It does not know who owns the binding, so it keeps no session alive.

    The table, and the ops that use it, are those of the first import of this module in the process; what makes errors
    is here, so that they are of the types that the importer of this module knows.
    """

    def __init__(self, *, log_failures: bool) -> None:
        self.pool = BufferPool()
        self.lock = threading.Lock()
        self.errors: OrderedDict[int, DelayedInitializerError] = OrderedDict()
        self.log_failures = log_failures

    def failure(self, entry: _Entry, cause: BaseException) -> _Result:
        """The tensor that a failing op yields: one that the Reshape guard behind it cannot take.

        Its shape carries the id of the error: ``{0, id, bytes found}``, without elements. A declared shape that has a
        zero in it takes every empty tensor, so there the failing tensor has elements, of a number that never fits.
        """
        error = payload_error(entry.payload, cause)
        if self.log_failures:
            # Whatever a handler or a filter of the application raises, the error itself must get through.
            with contextlib.suppress(BaseException):
                _log.error("%s", error)
        error_id = self.keep(error)
        shape: tuple[int, ...] = (0, error_id, error.found_bytes or 0)
        if 0 in entry.source.shape:
            shape = _misfit(entry.source.shape, error_id)
        return _Result(shape, np.zeros(math.prod(shape), entry.source.element_type.dtype))

    def keep(self, error: DelayedInitializerError) -> int:
        error_id = next(_table.error_ids) % _LARGEST_ERROR_ID + 1
        with self.lock:
            self.errors[error_id] = error
            while len(self.errors) > _ERRORS_KEPT:
                self.errors.popitem(last=False)
        return error_id


class _Table:
    """Handles to payloads, for the whole process."""

    def __init__(self) -> None:
        self.entries: dict[int, _Entry] = {}
        self.error_ids = itertools.count()

    def invoke(self, element_type: ElementType, handle: int) -> _Result:
        """What an op does. It must not raise: the exception would cross a ``noexcept`` frame and abort the process."""
        entry = None
        try:
            entry = self.entries[handle]
            source = entry.source
            if source.element_type.onnx != element_type.onnx:
                raise TypeError(f"the handle stands for {source.element_type}, the kernel yields {element_type}")
            return _Result(source.shape, source.elements(entry.binding.pool))
        except BaseException as cause:
            try:
                if entry is None:
                    # No session can be asked for this error, and ONNX Runtime's says nothing about why.
                    with contextlib.suppress(BaseException):
                        _log.error(_GONE)
                    return _Result((0, 0), np.empty(0, element_type.dtype))
                return entry.binding.failure(entry, cause)
            except BaseException:
                return _Result((0, 1), np.empty(0, element_type.dtype))


class Binding:
    """The handles of one prepared model. Whoever owns it closes it; then its handles, payloads and buffers are gone."""

    def __init__(self, *, log_failures: bool = False) -> None:
        """Make an empty binding.

        Args:
            log_failures: whether a failing read is also logged (logger ``ort_delayed``), for sessions that cannot
                raise it: plain ``onnxruntime.InferenceSession``.
        """
        self._bound = _Bound(log_failures=log_failures)
        self._handles: list[int] = []

    def add(self, source: PayloadSource, payload: Payload) -> int:
        """Enter a payload and return its handle: unguessable, so that no model can name another's."""
        handle = secrets.randbits(62)
        _table.entries[handle] = _Entry(source, payload, self._bound)
        self._handles.append(handle)
        return handle

    def sources(self) -> list[PayloadSource]:
        """The payloads, in the order in which they were entered."""
        return [_table.entries[handle].source for handle in self._handles]

    def take_error(self, error_id: int) -> DelayedInitializerError | None:
        """The error that a failing op kept under ``error_id``, once."""
        with self._bound.lock:
            return self._bound.errors.pop(error_id, None)

    def trim(self) -> None:
        """Give up large buffers that no run uses."""
        self._bound.pool.trim()

    def close(self) -> None:
        """Forget every handle. Safe to call twice, from any thread, and while the interpreter shuts down."""
        while self._handles:
            _table.entries.pop(self._handles.pop(), None)


def _misfit(declared: tuple[int, ...], error_id: int) -> tuple[int, ...]:
    # Before opset 14 a zero in Reshape's target copies the input's dim at that place. With rank + 1 dims, ones in the
    # middle, the result would have (error_id, or 1) x (product of the declared dims that are not zero) elements.
    fixed = math.prod(d for d in declared if d)
    last = next(n for n in (2, 3, 5) if fixed not in (n, error_id * n))
    return (error_id, *([1] * (len(declared) - 1)), last)


def _make_op(element_type: ElementType) -> Callable[..., _Result]:
    def op(*inputs: object, **attributes: int) -> _Result:
        return _table.invoke(element_type, attributes[HANDLE_ATTRIBUTE])

    return op


def _register() -> _Table:
    """Register two ops per element type, once per process, and return the table.

    Declaring another op in a domain that a session uses makes that session crash on its next run, so an import of
    this module for a second time (reload, a purged ``sys.modules``) has to find what the first one registered. The
    extensions module lives as long as its native op list does, so the table is kept on it.
    """
    anchor = vars(onnxruntime_extensions)
    if "_ort_delayed_table" in anchor:
        table: _Table = anchor["_ort_delayed_table"]
        return table
    table = anchor["_ort_delayed_table"] = _Table()
    types = onnxruntime_extensions.PyCustomOpDef
    for element_type in ELEMENT_TYPES:
        for waits in (False, True) if element_type.delayed else ():
            onnxruntime_extensions.onnx_op(
                op_type=f"{DOMAIN}::{kernel_op_type(element_type, waits=waits)}",
                inputs=[types.dt_int64] if waits else [],
                outputs=[getattr(types, f"dt_{element_type.ort}")],
                attrs={HANDLE_ATTRIBUTE: types.dt_int64},
            )(_make_op(element_type))
    return table


_table: _Table = _register()
