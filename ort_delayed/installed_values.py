"""The OrtValues that hold installed weights: made so that ONNX Runtime uses them in place, and their lifetime.

ONNX Runtime keeps a raw pointer to what ``SessionOptions.add_initializer`` is given, until a session is made; the
session shares the tensor itself from then on. So the values are tied to the options object, which every
``onnxruntime.InferenceSession`` keeps, and each tensor owns its memory, which a session therefore keeps as well.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np
import onnxruntime
from onnxruntime.capi import _pybind_state

from ort_delayed.install_errors import InstallError, OptionsSpoiledError
from ort_delayed.loader.element_types import ElementType
from ort_delayed.loader.tensor_on_disk import TensorOnDisk

__all__ = ["InstalledValues", "can_carry"]


def can_carry(element_type: ElementType) -> bool:
    """Whether this onnxruntime has values of an element type that can be installed with their logical shape."""
    try:
        _new_value(element_type, (3,))
    except (RuntimeError, TypeError):
        return False
    return True


class InstalledValues:
    """Values by initializer name, until :meth:`close`, or as long as the options that they are tied to."""

    def __init__(self) -> None:
        self._values: dict[str, onnxruntime.OrtValue] = {}

    def allocate(self, tensor: TensorOnDisk) -> memoryview:
        """Make a value for ``tensor`` and return its memory, ``tensor.nbytes`` writable bytes that are not set yet.

        The memory is the value's own: it is not to be used after :meth:`close`.
        """
        value = _new_value(tensor.element_type, tensor.shape)
        self._values[tensor.name] = value
        return _memory(value, tensor.nbytes)

    def share(self, name: str, other: str) -> None:
        """Let the initializer ``name`` use the value of ``other``; tied weights are held once."""
        self._values[name] = self._values[other]

    def add_to(self, options: onnxruntime.SessionOptions) -> None:
        """Add every value to ``options`` and tie the values to them. This cannot be undone.

        Raises:
            InstallError: the options have an initializer of the first name already; they are as they were.
            OptionsSpoiledError: they have one of another name; they cannot be used any more.
        """
        # Tied first: what has been added must not go, even if a later one cannot be added. Not at exit, where the
        # process takes everything with it and a session may still run on another thread.
        tie = weakref.finalize(options, self._values.clear)
        tie.atexit = False
        for number, (name, value) in enumerate(self._values.items()):
            try:
                options.add_initializer(name, value)
            except RuntimeError as error:
                reason = f"initializer '{name}' cannot be added to the session options ({error})"
                if number == 0:
                    tie.detach()
                    raise InstallError(f"{reason}: they have one of that name already, or refuse it") from error
                self._values = {}  # whoever closes this, the options keep what they have
                raise OptionsSpoiledError(
                    f"{reason}, after others have been: these session options cannot be used any more, use new ones"
                ) from error

    def close(self) -> None:
        """Give up all values; for a failure before :meth:`add_to`."""
        self._values.clear()


def _new_value(element_type: ElementType, shape: Sequence[int]) -> onnxruntime.OrtValue:
    owned = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(shape), element_type.onnx)
    # add_initializer takes no value that owns its buffer. One that refers to such a value through DLPack is taken,
    # and keeps it alive, also inside a session whose every Python object is gone. It has the logical shape of types
    # below a byte too, which a value on a numpy array has not.
    try:
        shared = onnxruntime.OrtValue(_pybind_state.OrtValue.from_dlpack(owned._ortvalue.to_dlpack()))
        if (shared.element_type(), shared.shape()) == (owned.element_type(), owned.shape()):
            return shared
    except RuntimeError:
        if element_type.dtype is None:
            raise
    # Old releases have no DLPack for float8 and take bool for uint8. The array keeps the value, the value the array.
    array = np.frombuffer(_memory(owned, element_type.nbytes(shape)), f"u{element_type.bits // 8}").reshape(shape)
    value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, element_type.onnx)
    value.ort_delayed_memory = owned
    return value


def _memory(value: onnxruntime.OrtValue, nbytes: int) -> memoryview:
    if nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * nbytes).from_address(value.data_ptr())).cast("B")
