"""Reading payloads wherever they stand: what a model claims is compared with the file first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from weighted_models import model, node, save, value

from ort_delayed.loader.element_types import element_type_from_dtype
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.ops.errors import DelayedInitializerShortReadError
from ort_delayed.payload_files import PayloadReader
from ort_delayed.skeletons import Skeleton


def test_a_claim_to_an_exabyte_takes_no_memory(tmp_path: Path) -> None:
    path = save(model([node("Identity", ["x"], ["y"])], [value("x", [1])], [value("y", [1])]), tmp_path / "m.onnx")
    (tmp_path / "w.bin").write_bytes(bytes(8))
    uint8 = element_type_from_dtype(np.dtype(np.uint8))
    assert uint8 is not None
    with Skeleton(path) as skeleton, PayloadReader(skeleton) as reader:
        for file, offset, found in (("w.bin", 5, 3), ("w.bin", 9, 0), ("m.onnx", 0, path.stat().st_size)):
            claimed = TensorOnDisk("w", str(tmp_path / file), offset, 2**60, (2**60,), uint8)
            with pytest.raises(DelayedInitializerShortReadError) as caught:
                reader.read(claimed)
            assert (caught.value.expected_bytes, caught.value.found_bytes) == (2**60, found)
        assert reader.read(TensorOnDisk("w", str(tmp_path / "w.bin"), 1, 7, (7,), uint8)) == bytes(7)
