"""A model file's skeleton: its proto with the large inline values left in the file, and the way back.

Parsing a model file whole takes its size twice (the bytes and the proto), writing it twice again. A skeleton takes
what the graph takes: values of ``LIFTED_BYTES`` and more are not read; each leaves a mark that says where it stands
in the file, and is streamed to wherever it belongs. Writing a skeleton puts the values that are still marked back
inline, so what nobody touched comes out as it was.

Sources: the protobuf wire format (tag, varint, length-delimited fields) and the field numbers of onnx.proto.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import onnx
from google.protobuf.message import DecodeError

from ort_delayed.loader.files import FileIdentity, open_weights
from ort_delayed.loader.model_texts import fault_in_texts, parse_model
from ort_delayed.loader.reading import ShortReadError, read_into

__all__ = ["LIFTED_BYTES", "FileRange", "LiftedValue", "NotAModelError", "Skeleton", "serialized_pieces"]

LIFTED_BYTES = 64 << 10
"""Inline values of at least so many bytes stay in the file."""

_WINDOW_BYTES = 256 << 10
_LARGEST_MESSAGE = 2**31 - 1
_DEEPEST_MESSAGE = 100  # protobuf's own limit

# Which field of which message holds which message: the ways that lead to a TensorProto.
_CHILDREN: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
}
_RAW_DATA, _FLOAT_DATA, _DOUBLE_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 9, 4, 10, 13, 14
# float_data and double_data are packed: on the wire they are the raw little-endian bytes, NaN payloads included.
_LIFTABLE = (_RAW_DATA, _FLOAT_DATA, _DOUBLE_DATA)
_VALUE_FIELDS = frozenset({_FLOAT_DATA, 5, 6, 7, _RAW_DATA, _DOUBLE_DATA, 11, _EXTERNAL_DATA, _DATA_LOCATION})


class NotAModelError(ValueError):
    """A file is not an ONNX model in protobuf form."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of the skeleton's file: the first one and how many."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LiftedValue:
    """The value of a tensor that stayed in the file: the proto field that holds it, and its bytes."""

    field: str
    range: FileRange


_FIELD_NAMES = {_RAW_DATA: "raw_data", _FLOAT_DATA: "float_data", _DOUBLE_DATA: "double_data"}
_FIELD_NUMBERS = {name: number for number, name in _FIELD_NAMES.items()}


class Skeleton:
    """An open model file and its proto, large inline values left in the file. Close it, or use it in ``with``.

    Attributes:
        path: the file, absolute; links in its directory are resolved, one in the last place is not.
        directory: the directory that relative locations of the model refer to, links resolved.
        fd: the open file; it stays the same file whatever happens to the path meanwhile.
        model: the proto. Marked tensors have no value in it; :meth:`lifted` says where it stands.
    """

    def __init__(self, path: str | os.PathLike[str], *, any_texts: bool = False) -> None:
        """Open and read a model file.

        Args:
            path: the file.
            any_texts: whether names that are not UTF-8 are left in the proto, as bytes, for the caller to find.

        Raises:
            NotAModelError: the file is no ONNX model in protobuf form, or has names that are not UTF-8.
            OSError: the file cannot be opened; only regular files are.
        """
        given = os.path.abspath(os.fspath(path))
        self.directory = os.path.realpath(os.path.dirname(given))
        self.path = os.path.join(self.directory, os.path.basename(given))
        # A model file may carry anything as text; only a key that nobody could know marks a value.
        self._key = f"ort_delayed.lifted.{secrets.token_hex(16)}"
        try:
            self.fd = open_weights(self.path)
        except IsADirectoryError as error:
            said = "a directory was given where a model file is needed"
            raise IsADirectoryError(errno.EISDIR, said, self.path) from error
        try:
            self._identity = FileIdentity.of(self.fd)
            self.model = self._parse()
            fault = None if any_texts else fault_in_texts(self.model)
            if fault is not None:
                raise NotAModelError(f"'{self.path}' is not an ONNX model: {fault}")
        except BaseException:
            os.close(self.fd)
            raise

    def __enter__(self) -> Skeleton:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def lifted(self, tensor: onnx.TensorProto) -> LiftedValue | None:
        """Where the value of ``tensor`` stands in the file, or None where the proto holds it."""
        for entry in tensor.external_data:
            if entry.key == self._key:
                field, offset, nbytes = entry.value.split(":")
                return LiftedValue(field, FileRange(int(offset), int(nbytes)))
        return None

    def check_unchanged(self) -> None:
        """Refuse a file that was rewritten in place since it was opened.

        Raises:
            RuntimeError: size or time of change differ; what was read may be a mixture.
        """
        if FileIdentity.of(self.fd) != self._identity:
            raise RuntimeError(f"model file '{self.path}' was changed while it was being read; nothing was written")

    def pieces(self) -> Iterator[bytes | FileRange]:
        """The serialized model in pieces, marked values put back inline. See :func:`serialized_pieces`."""
        return serialized_pieces(self.model, self._key)

    def _parse(self) -> onnx.ModelProto:
        source = _Source(self.fd, self._identity.size)
        if source.read(4, min(8, source.size)) == b"ORTM":
            raise NotAModelError(f"'{self.path}' is a model in ORT format; only ONNX files (protobuf) can be converted")
        try:
            slim = bytes(_slim(source, 0, source.size, "model", self._key))
            model = parse_model(slim)
        except (DecodeError, _WireError, ShortReadError) as error:
            if _is_safetensors(source):
                raise NotAModelError(
                    f"'{self.path}' is a safetensors file, which holds weights and no model: give the .onnx model that "
                    "they belong to"
                ) from error
            raise NotAModelError(f"'{self.path}' is not an ONNX model: {error}") from error
        if not model.HasField("graph"):
            raise NotAModelError(f"'{self.path}' is not an ONNX model: it holds no graph")
        return model


def _is_safetensors(source: _Source) -> bool:
    if source.size < 10:
        return False
    start = source.read(0, 9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") <= source.size - 8


def serialized_pieces(model: onnx.ModelProto, key: str) -> Iterator[bytes | FileRange]:
    """The wire form of a skeleton: bytes as they are, and ranges of its file where a marked value goes.

    Raises:
        ValueError: the model would pass 2 GiB, more than a protobuf message can hold.
    """
    data = model.SerializeToString()
    pieces, size = _splice(data, 0, len(data), "model", key.encode())
    if size > _LARGEST_MESSAGE:
        raise ValueError(f"the model would take {size} bytes inline, an ONNX file can hold at most {_LARGEST_MESSAGE}")
    return iter(pieces)


class _WireError(Exception):
    """Bytes that are no protobuf message."""


class _Source:
    """Reads a file by position through one window, so that a walk over headers costs few system calls."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._fd = fd
        self._start = 0
        self._window = b""

    def read(self, start: int, end: int) -> bytes:
        """The bytes from ``start`` up to ``end``; fewer where the window allows no more than the file has."""
        if not self._start <= start <= end <= self._start + len(self._window):
            if end - start > _WINDOW_BYTES:
                return self._fetch(start, end)
            self._window = self._fetch(start, min(start + _WINDOW_BYTES, self.size))
            self._start = start
        return self._window[start - self._start : end - self._start]

    def _fetch(self, start: int, end: int) -> bytes:
        buffer = bytearray(max(0, end - start))
        read_into(self._fd, memoryview(buffer), start)
        return bytes(buffer)


class _Bytes:
    """The same for bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._data = data

    def read(self, start: int, end: int) -> bytes:
        return self._data[start:end]


@dataclass(frozen=True, slots=True)
class _Field:
    """One field on the wire: number, wire type, first byte of the tag, of the content, and behind it."""

    number: int
    wire: int
    start: int
    content: int
    end: int


def _fields(source: _Source | _Bytes, start: int, end: int) -> Iterator[_Field]:
    position = start
    while position < end:
        tag, content = _varint(source, position, end)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            _, stop = _varint(source, content, end)
        elif wire == 2:
            length, content = _varint(source, content, end)
            stop = content + length
        elif wire in (1, 5):
            stop = content + (8 if wire == 1 else 4)
        else:
            raise _WireError(f"wire type {wire} at byte {position}")
        if stop > end or number == 0:
            raise _WireError(f"field {number} at byte {position} ends at byte {stop}, its message at byte {end}")
        yield _Field(number, wire, position, content, stop)
        position = stop


def _varint(source: _Source | _Bytes, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    for byte in source.read(position, min(position + 10, end)):
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7
    raise _WireError(f"no number ends before byte {position}")


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _delimited(number: int, content: bytes | bytearray) -> bytes:
    return _encoded(number << 3 | 2) + _encoded(len(content)) + content


def _slim(source: _Source, start: int, end: int, kind: str, key: str, depth: int = 0) -> bytearray:
    """The message from ``start`` to ``end`` without its large values; runs of other fields are copied at once."""
    if depth > _DEEPEST_MESSAGE:
        raise _WireError(f"messages in messages, more than {_DEEPEST_MESSAGE} of them, at byte {start}")
    if kind == "tensor":
        return _slim_tensor(source, start, end, key)
    out = bytearray()
    copied = start
    for field in _fields(source, start, end):
        child = _CHILDREN[kind].get(field.number)
        if child is not None and field.wire == 2 and field.end - field.content >= LIFTED_BYTES:
            out += source.read(copied, field.start)
            out += _delimited(field.number, _slim(source, field.content, field.end, child, key, depth + 1))
            copied = field.end
    out += source.read(copied, end)
    return out


def _slim_tensor(source: _Source, start: int, end: int, key: str) -> bytearray:
    fields = list(_fields(source, start, end))
    values = [f for f in fields if f.number in _VALUE_FIELDS and not _says_inline(source, f)]
    # A tensor with more than one value field is malformed, or in pieces: it is left to the parser.
    large = values[0] if len(values) == 1 else None
    if large is None or large.number not in _LIFTABLE or large.wire != 2 or large.end - large.content < LIFTED_BYTES:
        return bytearray(source.read(start, end))
    out = bytearray(source.read(start, large.start))
    out += source.read(large.end, end)
    place = f"{_FIELD_NAMES[large.number]}:{large.content}:{large.end - large.content}"
    out += _delimited(_EXTERNAL_DATA, _delimited(1, key.encode()) + _delimited(2, place.encode()))
    return out


def _says_inline(source: _Source, field: _Field) -> bool:
    # onnx.load leaves it in what was external before: the location of the data, which is the default one.
    return field.number == _DATA_LOCATION and field.wire == 0 and _varint(source, field.content, field.end)[0] == 0


def _splice(data: bytes, start: int, end: int, kind: str, key: bytes) -> tuple[list[bytes | FileRange], int]:
    """The message with marked values back in place, as pieces, and its size; lengths of all messages above follow."""
    if data.find(key, start, end) < 0:
        return [data[start:end]], end - start
    source = _Bytes(data)
    pieces: list[bytes | FileRange] = []
    size = 0
    copied = start
    for field in _fields(source, start, end):
        number, child = field.number, _CHILDREN.get(kind, {}).get(field.number)
        is_mark = kind == "tensor" and number == _EXTERNAL_DATA
        if not (child or is_mark) or field.wire != 2 or data.find(key, field.content, field.end) < 0:
            continue
        pieces.append(data[copied : field.start])
        if child:
            inner, inner_size = _splice(data, field.content, field.end, child, key)
        else:
            number, inner, inner_size = _marked(data[field.content : field.end])
        head = _encoded(number << 3 | 2) + _encoded(inner_size)
        pieces += [head, *inner]
        size += field.start - copied + len(head) + inner_size
        copied = field.end
    pieces.append(data[copied:end])
    return pieces, size + end - copied


def _marked(entry: bytes) -> tuple[int, list[bytes | FileRange], int]:
    field, offset, nbytes = onnx.StringStringEntryProto.FromString(entry).value.split(":")
    return _FIELD_NUMBERS[field], [FileRange(int(offset), int(nbytes))], int(nbytes)
