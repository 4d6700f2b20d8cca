"""What packing starts from: any model, as a small proto whose weights all stand in files and are read from there.

Delayed nodes become initializers. Large inline values stay where they are, in the model file, which then serves as
their external file: ONNX Runtime maps it, so a model of inline weights takes no more memory than one of external ones.
"""

from __future__ import annotations

import hashlib
import os

import onnx

from ort_delayed.external_files import external_tensors, real_location
from ort_delayed.graphs import iter_graphs, iter_nodes
from ort_delayed.loader.external_data import external_tensor, nameable, set_external_data
from ort_delayed.loader.files import confining_directories, open_weights
from ort_delayed.loader.reading import PIECE_BYTES, read_into
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.pack_manifest import MANIFEST_KEY
from ort_delayed.payload_files import check_payloads
from ort_delayed.restoring import refer_to_payloads
from ort_delayed.skeletons import Skeleton
from ort_delayed.tensor_values import tensor_on_disk

__all__ = ["SourceModel", "read_source"]


class SourceModel:
    """A model to pack, and where its weights are.

    Attributes:
        model: the proto, without delayed nodes; external locations are relative to ``directory``.
        directory: a real directory that all files of the model stand below.
        payloads: every range of a file that the model refers to.
        digest: BLAKE2b of the model file and of the payloads that stand in other files, hexadecimal.
    """

    def __init__(self, model: onnx.ModelProto, directory: str, payloads: tuple[TensorOnDisk, ...], digest: str) -> None:
        self.model = model
        self.directory = directory
        self.payloads = payloads
        self.digest = digest


def read_source(skeleton: Skeleton) -> SourceModel:
    """Make the proto to pack of an open model file; the skeleton's model is changed.

    Raises:
        DelayedInitializerError: a payload of a delayed node or of external data cannot be read.
        ExternalDataError: external data leads out of the model's directory, or a path is not UTF-8 text.
        MalformedTensorError: a tensor does not hold what its shape needs.
        ValueError: the files of the model have no directory in common (they stand on different drives).
    """
    _name_absolutely(skeleton)
    refer_to_payloads(skeleton)
    model = skeleton.model
    for tensor in _tensors(model):
        _leave_in_file(tensor, skeleton)
    payloads = tuple(external_tensor(t, skeleton.directory) for t in external_tensors(model))
    check_payloads(payloads)
    digest = _digest(skeleton, payloads)
    directory = os.path.commonpath([skeleton.directory, *(os.path.dirname(os.path.realpath(p.path)) for p in payloads)])
    for tensor, payload in zip(external_tensors(model), payloads, strict=True):
        location = os.path.relpath(os.path.realpath(payload.path), directory).replace(os.sep, "/")
        set_external_data(tensor, location, payload.offset, payload.nbytes)
    for index in reversed([i for i, p in enumerate(model.metadata_props) if p.key == MANIFEST_KEY]):
        del model.metadata_props[index]  # of a source that was packed itself
    return SourceModel(model, nameable(directory), payloads, digest)


def _name_absolutely(skeleton: Skeleton) -> None:
    inside = confining_directories(skeleton.directory)
    for tensor in external_tensors(skeleton.model):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = nameable(real_location(tensor.name, entry.value, skeleton.directory, inside))


def _tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Initializers and the values of Constant nodes, in graphs, bodies and functions."""
    tensors = [t for graph in iter_graphs(model.graph) for t in graph.initializer]
    for nodes in (model.graph.node, *(f.node for f in model.functions)):
        for node in iter_nodes(nodes):
            tensors += [a.t for a in node.attribute if a.HasField("t")]
    return tensors


def _leave_in_file(tensor: onnx.TensorProto, skeleton: Skeleton) -> None:
    if skeleton.lifted(tensor) is None:
        return
    stored = tensor_on_disk(tensor, skeleton)
    if stored is not None:
        set_external_data(tensor, skeleton.path, stored.offset, stored.nbytes)


def _digest(skeleton: Skeleton, payloads: tuple[TensorOnDisk, ...]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    buffer = memoryview(bytearray(PIECE_BYTES))

    def add(fd: int, offset: int, nbytes: int) -> None:
        for start in range(0, nbytes, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, nbytes - start)]
            read_into(fd, piece, offset + start)
            digest.update(piece)

    add(skeleton.fd, 0, os.fstat(skeleton.fd).st_size)
    for payload in payloads:
        if payload.path != skeleton.path:
            fd = open_weights(payload.path)
            try:
                add(fd, payload.offset, payload.nbytes)
            finally:
                os.close(fd)
    return digest.hexdigest()
