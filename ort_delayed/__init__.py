"""ort-delayed: ONNX Runtime models whose weights arrive when they are needed."""

import os
import sys
from typing import TYPE_CHECKING

# Importing the package makes ONNX Runtime know the op, and it has to be so: options in which a caller registers
# onnxruntime-extensions afterwards must get it with them. Only the program ``ort-delayed``, in which there are no other
# callers, answers --help without loading ONNX Runtime; its commands import the modules that they need.
if TYPE_CHECKING or os.path.splitext(os.path.basename(sys.argv[0]))[0] != "ort-delayed":
    from ort_delayed.budgeted_source import ModelNotSuitedError
    from ort_delayed.conversion_report import ConversionReport
    from ort_delayed.converting import convert_model
    from ort_delayed.installing import InstalledModel, stream_install
    from ort_delayed.library import get_library_path, register_custom_ops
    from ort_delayed.loader import (
        BufferReleaseError,
        LocalWeightsRequired,
        RamBudget,
        RamBudgetExceeded,
        RamProbeUnavailable,
        ShardFormatError,
        StreamingWeightLoader,
    )
    from ort_delayed.loader.mapped_ranges import MappedFileChanged
    from ort_delayed.memory_plan import MemoryPlan
    from ort_delayed.memory_report import MemoryReport
    from ort_delayed.ops.errors import DelayedInitializerError
    from ort_delayed.pack_manifest import PackCheck, PackManifestError, verify_packed_model
    from ort_delayed.pack_report import PackReport
    from ort_delayed.packed_source import PackedModelError, PackedModelWarning
    from ort_delayed.packing import pack_model
    from ort_delayed.restoring import restore_model
    from ort_delayed.session import InferenceSession, prepare_model

__all__ = [
    "BufferReleaseError",
    "ConversionReport",
    "DelayedInitializerError",
    "InferenceSession",
    "InstalledModel",
    "LocalWeightsRequired",
    "MappedFileChanged",
    "MemoryPlan",
    "MemoryReport",
    "ModelNotSuitedError",
    "PackCheck",
    "PackManifestError",
    "PackReport",
    "PackedModelError",
    "PackedModelWarning",
    "RamBudget",
    "RamBudgetExceeded",
    "RamProbeUnavailable",
    "ShardFormatError",
    "StreamingWeightLoader",
    "convert_model",
    "get_library_path",
    "pack_model",
    "prepare_model",
    "register_custom_ops",
    "restore_model",
    "stream_install",
    "verify_packed_model",
]
