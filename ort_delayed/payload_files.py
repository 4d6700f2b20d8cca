"""Checking that payloads can be read where they stand, and copying them into a data file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType

import numpy as np
import onnx

from ort_delayed.loader.files import open_weights
from ort_delayed.loader.reading import ShortReadError, check_holds, read_into
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.new_files import CopyBuffer, PendingDataFile
from ort_delayed.ops.errors import DelayedInitializerError, Payload, payload_error
from ort_delayed.skeletons import Skeleton
from ort_delayed.tensor_values import float_list_bytes, inline_bytes

__all__ = ["PayloadReader", "check_payloads", "proto_bytes"]


def check_payloads(payloads: Iterable[TensorOnDisk]) -> None:
    """See that every payload's file exists, can be opened, and is long enough; nothing is read.

    Raises:
        DelayedInitializerError: one cannot be used; it is also the natural built-in error.
    """
    sizes: dict[str, int] = {}
    for payload in payloads:
        try:
            if payload.path not in sizes:
                fd = open_weights(payload.path)
                try:
                    sizes[payload.path] = os.fstat(fd).st_size
                finally:
                    os.close(fd)
            check_holds(sizes[payload.path], payload.offset, payload.nbytes)
        except (OSError, ShortReadError) as error:
            raise _refusal(payload, error) from error


def proto_bytes(proto: onnx.TensorProto | onnx.AttributeProto) -> bytes:
    """The raw bytes of values that the proto holds: of a tensor, or of a Constant node's list of numbers."""
    if isinstance(proto, onnx.TensorProto):
        return inline_bytes(proto)
    if proto.name == "value_floats":
        return float_list_bytes(proto)
    return np.fromiter(proto.ints, "<i8", len(proto.ints)).tobytes()


class PayloadReader:
    """Reads payloads wherever they stand. Use it in ``with``: it keeps the file that was read last open."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        self._buffer = CopyBuffer()
        self._path: str | None = None
        self._fd = -1

    def __enter__(self) -> PayloadReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def append(
        self,
        data: PendingDataFile,
        offset: int,
        stored: TensorOnDisk | None,
        proto: onnx.TensorProto | onnx.AttributeProto | None = None,
    ) -> None:
        """Write a payload at ``offset`` of the data file, unless it stands there already.

        Raises:
            DelayedInitializerError: the payload cannot be read.
            OSError: the data file cannot be written.
        """
        if offset < data.position:
            return  # the same bytes of the same file were planned once
        data.pad_to(offset)
        if stored is not None:
            fd = self._open(stored)
            try:
                self._buffer.copy(fd, stored.offset, stored.nbytes, data)
            except ShortReadError as error:
                raise _refusal(stored, error) from error
        elif proto is not None:
            data.write(proto_bytes(proto))

    def read(self, stored: TensorOnDisk) -> bytes:
        """A payload's bytes, at once: for small ones.

        Raises:
            DelayedInitializerError: the payload cannot be read.
        """
        fd = self._open(stored)
        try:
            check_holds(os.fstat(fd).st_size, stored.offset, stored.nbytes)
            buffer = bytearray(stored.nbytes)
            read_into(fd, memoryview(buffer), stored.offset)
        except (OSError, ShortReadError) as error:
            raise _refusal(stored, error) from error
        return bytes(buffer)

    def _open(self, stored: TensorOnDisk) -> int:
        if stored.path == self._skeleton.path:
            return self._skeleton.fd
        if stored.path != self._path:
            self._close()
            try:
                self._fd = open_weights(stored.path)
            except OSError as error:
                raise _refusal(stored, error) from error
            self._path = stored.path
        return self._fd

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._path = -1, None


def _refusal(stored: TensorOnDisk, error: OSError | ShortReadError) -> DelayedInitializerError:
    return payload_error(Payload(f"tensor '{stored.name}'", stored.path, stored.offset, stored.nbytes), error)
