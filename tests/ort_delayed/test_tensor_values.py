"""Raw bytes of tensors from every field that ONNX has for them."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from weighted_models import typed

from ort_delayed.tensor_values import MalformedTensorError, float_list_bytes, inline_bytes

NAN_BITS = np.array([0x7F800001, 0xFFC00123, 1, 0x80000000, 0x3F800000], np.uint32)

ARRAYS = {
    "float32": NAN_BITS.view(np.float32),
    "float64": np.array([0x7FF0000000000001, 1, 1 << 63], np.uint64).view(np.float64),
    "float16": np.array([0x7C01, 0x8001, 0x3C00], np.uint16).view(np.float16),
    "int8": np.array([-128, -1, 127], np.int8),
    "uint8": np.array([0, 255], np.uint8),
    "int16": np.array([-(2**15), 2**15 - 1], np.int16),
    "uint16": np.array([0, 2**16 - 1], np.uint16),
    "int32": np.array([-(2**31), 2**31 - 1], np.int32),
    "uint32": np.array([0, 2**32 - 1], np.uint32),
    "int64": np.array([-(2**63), 2**63 - 1], np.int64),
    "uint64": np.array([0, 2**64 - 1, 2**53 + 1], np.uint64),
    "bool": np.array([True, False, True]),
}


def on_the_wire(field: int, dtype: int, values: np.ndarray) -> onnx.TensorProto:
    """A tensor parsed from packed values: Python floats on the way would change a signalling NaN."""
    header = TensorProto(name="w", data_type=dtype, dims=values.shape).SerializeToString()
    data = values.tobytes()
    return TensorProto.FromString(header + bytes([field << 3 | 2, len(data)]) + data)


@pytest.mark.parametrize("name", ARRAYS)
def test_raw_values_are_the_bytes_themselves(name):
    assert inline_bytes(numpy_helper.from_array(ARRAYS[name], "w")) == ARRAYS[name].tobytes()


@pytest.mark.parametrize("name", sorted(ARRAYS.keys() - {"float32", "float64"}))
def test_typed_values_are_narrowed_to_the_bytes(name):
    assert inline_bytes(typed("w", ARRAYS[name])) == ARRAYS[name].tobytes()


def test_typed_floats_keep_every_bit():
    assert inline_bytes(on_the_wire(4, TensorProto.FLOAT, ARRAYS["float32"])) == ARRAYS["float32"].tobytes()
    assert inline_bytes(on_the_wire(10, TensorProto.DOUBLE, ARRAYS["float64"])) == ARRAYS["float64"].tobytes()


def test_typed_complex_values_are_pairs():
    array = np.array([1 + 2j, 3 - 4j], np.complex64)
    assert inline_bytes(helper.make_tensor("w", TensorProto.COMPLEX64, [2], array)) == array.tobytes()
    wide = array.astype(np.complex128)
    assert inline_bytes(helper.make_tensor("w", TensorProto.COMPLEX128, [2], wide)) == wide.tobytes()


def test_out_of_range_values_wrap_as_onnx_runtime_casts_them():
    tensor = TensorProto(name="w", data_type=TensorProto.INT8, dims=[3], int32_data=[300, -129, 5])
    assert inline_bytes(tensor) == np.array([44, 127, 5], np.int8).tobytes()
    flags = TensorProto(name="w", data_type=TensorProto.BOOL, dims=[3], int32_data=[0, 2, 256])
    assert inline_bytes(flags) == bytes([0, 1, 1])


def test_lists_of_floats_keep_every_bit():
    wire = b"".join(b"\x3d" + bits.tobytes() for bits in NAN_BITS)
    attribute = onnx.AttributeProto.FromString(onnx.AttributeProto(name="value_floats").SerializeToString() + wire)
    assert float_list_bytes(attribute) == NAN_BITS.tobytes()


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_wrong_number_of_values_is_refused(count):
    raw = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], raw_data=bytes(4 * count))
    with pytest.raises(MalformedTensorError, match=rf"'w' .*\[3\] holds {4 * count} bytes of values, 12 are needed"):
        inline_bytes(raw)
    listed = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], float_data=[0.0] * count)
    with pytest.raises(MalformedTensorError, match="12 are needed"):
        inline_bytes(listed)


def test_a_type_without_raw_bytes_is_refused():
    with pytest.raises(MalformedTensorError, match="data_type is 8"):
        inline_bytes(TensorProto(name="w", data_type=TensorProto.STRING, dims=[1], string_data=[b"a"]))
