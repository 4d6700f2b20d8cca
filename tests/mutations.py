"""Damaged inputs for fuzzing: strategies that change the bytes of a file, or the fields of a proto, in a few places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

__all__ = ["INTERESTING_INTEGERS", "INTERESTING_TEXTS", "changed_bytes", "changed_proto"]

_EDGES = [s * 2**b + d for b in (7, 8, 15, 16, 31, 32, 62, 63) for s in (1, -1) for d in (-1, 0, 1)]
INTERESTING_INTEGERS = sorted({0, 1, 2, 3, 7, 255, 4096, *_EDGES})
_SPELLED_NUMBERS = ["-1", "0", " 8", "8 ", "+8", "1_0", "0x10", "1e3", "٣", "9" * 40, "9" * 5000]
_ODD_PATHS = ["..", "../..", "/", "/dev/zero", "/proc/self/mem", ".", "https://h/x", "n" * 300]
_KNOWN_NAMES = ["ai.rt", "DelayedInitializer", "DelayedInitializer_after_float32", "If", "Loop", "Identity", "Constant"]
INTERESTING_TEXTS = ["", " ", "\0", "a\0b", "x", "\x1b[2J", "é\u202e", "'\"\n", "file"]
INTERESTING_TEXTS += [*_SPELLED_NUMBERS, *_ODD_PATHS, *_KNOWN_NAMES]
_BLOBS = [b"", b"\0", b"\xff", b"\xff" * 9 + b"\x01", b"\x80" * 12, b"\x0a\xff\xff\xff\xff\x07", b"{", b"[" * 64]
_BLOBS.append(b"\xed\xa0\x80")  # a surrogate, which UTF-8 does not have
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes, *, most: int = 4) -> bytes:
    """``content`` with bits flipped, ranges cut out, doubled or overwritten, or its end missing."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, most))):
        start = draw(st.integers(0, max(0, len(data) - 1)))
        end = min(len(data), start + draw(st.integers(1, 16)))
        kind = draw(st.sampled_from(["bit", "byte", "cut", "double", "insert", "overwrite", "truncate"]))
        if kind == "bit" and data:
            data[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "byte" and data:
            data[start] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[start:end]
        elif kind == "double":
            data[start:start] = data[start:end]
        elif kind == "insert":
            data[start:start] = draw(st.sampled_from(_BLOBS))
        elif kind == "overwrite":
            blob = draw(st.sampled_from(_BLOBS))
            data[start : start + len(blob)] = blob
        elif kind == "truncate":
            del data[start:]
    return bytes(data)


@st.composite
def changed_proto(draw: st.DrawFn, proto: Message, *, least: int = 1, most: int = 3) -> bytes:
    """The wire form of ``proto`` with fields changed: extreme numbers, names of other things, parts doubled or missing.

    Sometimes a text is not UTF-8 in the end, which no proto can be made to hold.
    """
    made = type(proto)()
    made.CopyFrom(proto)
    texts = sorted(set(_texts(made)))
    for _ in range(draw(st.integers(least, most))):
        _change(draw, made, texts)
    wire = made.SerializePartialToString()
    if texts and draw(st.integers(0, 15)) == 0:
        old = draw(st.sampled_from(texts)).encode()
        if old:
            wire = wire.replace(old, b"\xff" * len(old), draw(st.sampled_from([1, -1])))
    return wire


def _change(draw: st.DrawFn, root: Message, texts: Sequence[str]) -> None:
    messages = list(_messages(root))
    message = draw(st.sampled_from(range(len(messages))))
    holder = messages[message]
    used = [f for f, _ in holder.ListFields()]
    # Mostly what is there; what is not matters as well.
    field = draw(st.sampled_from(used if used and draw(st.integers(0, 3)) else list(holder.DESCRIPTOR.fields)))
    if _is_repeated(field):
        _change_list(draw, holder, field, messages, texts)
    elif draw(st.integers(0, 4)) == 0:
        holder.ClearField(field.name)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        getattr(holder, field.name).CopyFrom(_another(draw, field, messages))
    else:
        setattr(holder, field.name, _scalar(draw, field, texts))


def _change_list(
    draw: st.DrawFn, holder: Message, field: FieldDescriptor, messages: Sequence[Message], texts: Sequence[str]
) -> None:
    values = getattr(holder, field.name)
    index = draw(st.integers(0, max(0, len(values) - 1)))
    is_message = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
    kind = draw(st.sampled_from(["remove", "add", "replace", "double", "swap", "clear"]))
    if kind == "remove" and len(values):
        del values[index]
    elif kind == "clear":
        del values[:]
    elif kind == "double" and len(values):
        values.extend([values[index]])
    elif kind == "swap" and len(values) > 1:
        other = draw(st.integers(0, len(values) - 1))
        kept = list(values)
        kept[index], kept[other] = kept[other], kept[index]
        copies = [_copy(v) for v in kept] if is_message else kept
        del values[:]
        values.extend(copies)
    elif kind == "replace" and len(values):
        if is_message:
            values[index].CopyFrom(_another(draw, field, messages))
        else:
            values[index] = _scalar(draw, field, texts)
    elif is_message:
        values.extend([_another(draw, field, messages)])
    else:
        values.extend([_scalar(draw, field, texts)])


def _scalar(draw: st.DrawFn, field: FieldDescriptor, texts: Sequence[str]) -> Any:
    if field.cpp_type in _RANGES:
        least, most = _RANGES[field.cpp_type]
        return min(max(draw(st.sampled_from(INTERESTING_INTEGERS) | st.integers(-2, 40)), least), most)
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return draw(st.sampled_from([v.number for v in field.enum_type.values]))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return draw(st.sampled_from([*_BLOBS, *(t.encode() for t in (*INTERESTING_TEXTS, *texts))]))
        return draw(st.sampled_from([*texts, *INTERESTING_TEXTS]))
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return draw(st.booleans())
    return draw(st.sampled_from([0.0, -1.5, 1e30, float("inf"), float("nan")]))


def _another(draw: st.DrawFn, field: FieldDescriptor, messages: Sequence[Message]) -> Message:
    """A message of the field's type from elsewhere in the tree, or an empty one."""
    alike = [m for m in messages if m.DESCRIPTOR is field.message_type]
    if alike and draw(st.integers(0, 4)):
        return _copy(draw(st.sampled_from(range(len(alike))).map(alike.__getitem__)))
    return messages[0].__class__() if field.message_type is messages[0].DESCRIPTOR else _empty(field)


def _empty(field: FieldDescriptor) -> Message:
    from google.protobuf import message_factory

    made: Message = message_factory.GetMessageClass(field.message_type)()
    return made


def _copy(message: Message) -> Message:
    made = type(message)()
    made.CopyFrom(message)
    return made


def _is_repeated(field: FieldDescriptor) -> bool:
    # The newest protobuf has no `label` any more, older ones no `is_repeated`.
    found = getattr(field, "is_repeated", None)
    return bool(field.label == FieldDescriptor.LABEL_REPEATED if found is None else found)


def _messages(root: Message) -> Iterator[Message]:
    pending = [root]
    while pending:
        message = pending.pop()
        yield message
        for field, value in message.ListFields():
            if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
                pending.extend(value if _is_repeated(field) else [value])


def _texts(root: Message) -> Iterator[str]:
    for message in _messages(root):
        for field, value in message.ListFields():
            if field.type == FieldDescriptor.TYPE_STRING:
                yield from value if _is_repeated(field) else [value]
