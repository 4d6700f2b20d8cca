"""The custom-op library: where it is, and registering it in SessionOptions exactly once."""

from __future__ import annotations

import onnx
import onnxruntime
from onnx import helper
from onnxruntime.capi import _pybind_state

from ort_delayed.loader.element_types import ELEMENT_TYPES
from ort_delayed.loader.process_lock import ProcessLock
from ort_delayed.ops.attributes import DOMAIN, OP_VERSION
from ort_delayed.ops.extensions import onnxruntime_extensions
from ort_delayed.ops.kernel import HANDLE_ATTRIBUTE, kernel_op_type

__all__ = ["check_options", "get_library_path", "register_custom_ops"]

_lock = ProcessLock()


def get_library_path() -> str:
    """Path of the custom-op library, for ``SessionOptions.register_custom_ops_library``.

    It is the library of onnxruntime-extensions, in which importing ort_delayed has registered the Python op.
    """
    path: str = onnxruntime_extensions.get_library_path()
    return path


def check_options(sess_options: object) -> None:
    """Refuse what is not session options.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(sess_options, onnxruntime.SessionOptions):
        raise TypeError(f"sess_options must be onnxruntime.SessionOptions, found {type(sess_options).__name__}")


def register_custom_ops(sess_options: onnxruntime.SessionOptions) -> None:
    """Register the custom-op library in ``sess_options``, unless it is registered there already.

    A library that is attached twice to one options object makes every session on it fail, so options in which the
    caller has registered onnxruntime-extensions (for its tokenizers) are left as they are.

    Raises:
        TypeError: these are no session options.
    """
    check_options(sess_options)
    with _lock:
        if not _is_registered(sess_options):
            sess_options.register_custom_ops_library(get_library_path())


def _is_registered(sess_options: onnxruntime.SessionOptions) -> bool:
    # SessionOptions cannot be asked. A C session that is made from them, and never initialized, resolves the ops of
    # its one-node model when it loads it.
    try:
        _pybind_state.InferenceSession(sess_options, _PROBE, False, False)
    except Exception:
        return False
    return True


def _probe_model() -> bytes:
    kernel = kernel_op_type(ELEMENT_TYPES[0])
    node = onnx.NodeProto(op_type=kernel, domain=DOMAIN, output=["y"])
    node.attribute.append(helper.make_attribute(HANDLE_ATTRIBUTE, 0))
    graph = helper.make_graph([node], "probe", [], [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)])
    opsets = [helper.make_opsetid(DOMAIN, OP_VERSION), helper.make_opsetid("", 13)]
    serialized: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return serialized


_PROBE = _probe_model()
