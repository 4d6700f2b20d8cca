"""The entries by which ONNX Runtime finds a weight that it packed and saved: reading and writing them.

An external initializer has, beside ``location``, ``offset`` and ``length``, an entry ``prepacked_N`` for each kind of
kernel that packs it, with the value ``KEY|OFFSET;LENGTH;FLAG|OFFSET;LENGTH;FLAG...``: the operator's name with a hash
of the packed bytes, then a range of the external file per buffer. (Seen in what onnxruntime writes with
``session.save_external_prepacked_constant_initializers``; tests/upstream watches it.) What the flag means is ONNX
Runtime's affair: it is kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import onnx

__all__ = ["PREFIX", "PackedBuffer", "PackedWeight", "PrepackedEntryError", "packed_weights", "set_packed_weights"]

PREFIX = "prepacked_"
_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)


class PrepackedEntryError(ValueError):
    """A ``prepacked_N`` entry is not of the form that this release of ort_delayed knows."""


@dataclass(frozen=True, slots=True)
class PackedBuffer:
    """One packed buffer of a kernel.

    Attributes:
        offset: its first byte in the external file.
        nbytes: its bytes.
        flag: the third number of its entry, as it stands.
    """

    offset: int
    nbytes: int
    flag: str


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """What one kind of kernel made of a weight.

    Attributes:
        key: operator and hash of the packed bytes, ``"MatMul+3768020039991512728"``.
        buffers: where the bytes stand; a kernel may ask for several.
    """

    key: str
    buffers: tuple[PackedBuffer, ...]

    @property
    def op_type(self) -> str:
        """The operator whose kernel packed it."""
        return self.key.rpartition("+")[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.nbytes for b in self.buffers)


def packed_weights(tensor: onnx.TensorProto) -> tuple[PackedWeight, ...]:
    """The packed forms of an external initializer, in the order of their numbers; none where it has no entries.

    Raises:
        PrepackedEntryError: an entry is of another form.
    """
    entries = [(e.key.removeprefix(PREFIX), e.value) for e in tensor.external_data if e.key.startswith(PREFIX)]
    for number, value in entries:
        if not _NUMBER.fullmatch(number):
            raise _unknown(tensor, number, value)
    return tuple(_parse(tensor, number, value) for number, value in sorted(entries, key=lambda e: int(e[0])))


def set_packed_weights(tensor: onnx.TensorProto, weights: Sequence[PackedWeight]) -> None:
    """Replace the packed forms of an external initializer; its other entries stay."""
    others = [(e.key, e.value) for e in tensor.external_data if not e.key.startswith(PREFIX)]
    del tensor.external_data[:]
    for number, weight in enumerate(weights):
        ranges = [f"{b.offset};{b.nbytes};{b.flag}" for b in weight.buffers]
        others.append((f"{PREFIX}{number}", "|".join([weight.key, *ranges])))
    for key, value in others:
        tensor.external_data.add(key=key, value=value)


def _parse(tensor: onnx.TensorProto, number: str, value: str) -> PackedWeight:
    key, *ranges = value.split("|")
    buffers = []
    for text in ranges:
        fields = text.split(";")
        if len(fields) != 3 or not all(map(_NUMBER.fullmatch, fields)):
            raise _unknown(tensor, number, value)
        buffers.append(PackedBuffer(int(fields[0]), int(fields[1]), fields[2]))
    if "+" not in key or not buffers:
        raise _unknown(tensor, number, value)
    return PackedWeight(key, tuple(buffers))


def _unknown(tensor: onnx.TensorProto, number: str, value: str) -> PrepackedEntryError:
    return PrepackedEntryError(
        f"initializer '{tensor.name}': the external-data entry '{PREFIX}{number}' must be "
        f"'KEY|OFFSET;LENGTH;FLAG|...', found {value!r}; this onnxruntime writes it otherwise than the releases that "
        "ort_delayed knows"
    )
