"""ort_delayed/prepacked_entries.py: the entries about packed bytes, read and written."""

from __future__ import annotations

import onnx
import pytest

from ort_delayed.prepacked_entries import (
    PackedBuffer,
    PackedWeight,
    PrepackedEntryError,
    packed_weights,
    set_packed_weights,
)


def tensor(*entries: tuple[str, str]) -> onnx.TensorProto:
    made = onnx.TensorProto(name="w", data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", "data"), ("offset", "0"), *entries):
        made.external_data.add(key=key, value=value)
    return made


def test_an_entry_as_onnxruntime_writes_it() -> None:
    (found,) = packed_weights(tensor(("prepacked_0", "FusedGemm+3768020039991512728|16777216;4096;0")))
    assert found == PackedWeight("FusedGemm+3768020039991512728", (PackedBuffer(16777216, 4096, "0"),))
    assert found.op_type == "FusedGemm"
    assert found.nbytes == 4096


def test_several_buffers_and_several_kernels_in_the_order_of_their_numbers() -> None:
    entries = [(f"prepacked_{n}", f"Op{n}+1|{n};1;0|{n + 100};2;7") for n in (10, 2)]
    found = packed_weights(tensor(*entries))
    assert [w.op_type for w in found] == ["Op2", "Op10"]
    assert found[0].buffers == (PackedBuffer(2, 1, "0"), PackedBuffer(102, 2, "7"))
    assert found[0].nbytes == 3


def test_no_entries() -> None:
    assert packed_weights(tensor()) == ()


def test_what_is_written_is_read_back_and_other_entries_stay() -> None:
    proto = tensor(("prepacked_0", "A+1|0;1;0"), ("checksum", "abc"))
    weights = [PackedWeight("B+2", (PackedBuffer(64, 3, "1"),)), PackedWeight("C+3", (PackedBuffer(128, 4, "0"),))]
    set_packed_weights(proto, weights)
    assert packed_weights(proto) == tuple(weights)
    others = [(e.key, e.value) for e in proto.external_data if not e.key.startswith("prepacked_")]
    assert others == [("location", "data"), ("offset", "0"), ("checksum", "abc")]
    set_packed_weights(proto, [])
    assert packed_weights(proto) == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prepacked_0", "A+1"),
        ("prepacked_0", "A|0;1;0"),
        ("prepacked_0", "A+1|0;1"),
        ("prepacked_0", "A+1|0;1;0;0"),
        ("prepacked_0", "A+1|-1;1;0"),
        ("prepacked_0", "A+1|0;x;0"),
        ("prepacked_0", ""),
        ("prepacked_x", "A+1|0;1;0"),
    ],
)
def test_another_form_is_refused_with_what_was_found(key: str, value: str) -> None:
    with pytest.raises(PrepackedEntryError, match=r"initializer 'w'.*must be 'KEY\|OFFSET;LENGTH;FLAG") as error:
        packed_weights(tensor((key, value)))
    assert repr(value) in str(error.value)
