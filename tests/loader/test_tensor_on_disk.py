"""The record of where a tensor's bytes are."""

from __future__ import annotations

import dataclasses

import pytest

from ort_delayed.loader.element_types import ELEMENT_TYPES
from ort_delayed.loader.tensor_on_disk import TensorOnDisk


def test_a_record_is_a_fact() -> None:
    record = TensorOnDisk("w", "/m/w.bin", 5, 12, (3,), ELEMENT_TYPES[0])
    assert record.end == 17
    assert record == TensorOnDisk("w", "/m/w.bin", 5, 12, (3,), ELEMENT_TYPES[0])
    assert hash(record) == hash(dataclasses.replace(record))
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.offset = 6  # type: ignore[misc]
