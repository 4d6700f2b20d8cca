"""Weights on disk: where each tensor's bytes are, how they are read, and how they are streamed within a RAM budget.

Knows no ONNX Runtime.
"""

from ort_delayed.loader.budget import RamBudget, RamBudgetExceeded, RamProbeUnavailable
from ort_delayed.loader.element_types import ElementType
from ort_delayed.loader.errors import BufferReleaseError, LocalWeightsRequired, ShardFormatError
from ort_delayed.loader.layers import LayerGroup, LayerGroupSpec, group_tensors
from ort_delayed.loader.mapping import StreamedLayerGroup, map_group
from ort_delayed.loader.probe import PeakRamProbe, PeakRamReport
from ort_delayed.loader.resident_memory import current_rss_bytes
from ort_delayed.loader.sources import DiscoveredWeights, discover_weights, local_source
from ort_delayed.loader.streaming import LoadPlan, LoadProgress, StreamingLoadReport, StreamingWeightLoader
from ort_delayed.loader.tensor_on_disk import TensorOnDisk

__all__ = [
    "BufferReleaseError",
    "DiscoveredWeights",
    "ElementType",
    "LayerGroup",
    "LayerGroupSpec",
    "LoadPlan",
    "LoadProgress",
    "LocalWeightsRequired",
    "PeakRamProbe",
    "PeakRamReport",
    "RamBudget",
    "RamBudgetExceeded",
    "RamProbeUnavailable",
    "ShardFormatError",
    "StreamedLayerGroup",
    "StreamingLoadReport",
    "StreamingWeightLoader",
    "TensorOnDisk",
    "current_rss_bytes",
    "discover_weights",
    "group_tensors",
    "local_source",
    "map_group",
]
