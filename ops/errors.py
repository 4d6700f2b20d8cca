"""What can be wrong with a delayed initializer, each as ``DelayedInitializerError`` and as the natural built-in."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from ort_delayed.loader.files import NotARegularFileError, OutsideDirectoryError
from ort_delayed.loader.quoting import quoted_path
from ort_delayed.loader.reading import ShortReadError

__all__ = [
    "DelayedInitializerError",
    "DelayedInitializerFileNotFoundError",
    "DelayedInitializerIsADirectoryError",
    "DelayedInitializerMemoryError",
    "DelayedInitializerOSError",
    "DelayedInitializerPermissionError",
    "DelayedInitializerShortReadError",
    "DelayedInitializerTypeError",
    "DelayedInitializerValueError",
    "Payload",
    "payload_error",
]


class DelayedInitializerError(Exception):
    """A delayed initializer cannot be used.

    Attributes:
        node: the node, as messages name it, or None where no single node is to blame.
        path: the file, or None where no file is concerned.
        offset: first byte of the payload in the file, or None.
        expected_bytes: bytes that the payload needs, or None.
        found_bytes: bytes that the file held from ``offset`` on, or None where that is not the fault.
    """

    def __init__(
        self,
        message: str,
        *,
        node: str | None = None,
        path: str | None = None,
        offset: int | None = None,
        expected_bytes: int | None = None,
        found_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.node = node
        self.path = path
        self.offset = offset
        self.expected_bytes = expected_bytes
        self.found_bytes = found_bytes

    def __str__(self) -> str:
        # OSError formats itself from errno and filename; these messages are whole sentences already.
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        state = dict(self.__dict__)
        if isinstance(self, OSError):
            state.update(errno=self.errno, filename=self.filename)  # slots of OSError, not in __dict__
        return (_rebuild, (type(self), self.message, state))


class DelayedInitializerValueError(DelayedInitializerError, ValueError):
    """An attribute, a shape or the model's structure is not what the specification allows."""


class DelayedInitializerTypeError(DelayedInitializerError, TypeError):
    """An element type that does not exist, that ONNX Runtime cannot carry, or that contradicts a declaration."""


class DelayedInitializerOSError(DelayedInitializerError, OSError):
    """The file cannot be read: not a regular file, or an error of the operating system."""


class DelayedInitializerFileNotFoundError(DelayedInitializerOSError, FileNotFoundError):
    """The file does not exist."""


class DelayedInitializerIsADirectoryError(DelayedInitializerOSError, IsADirectoryError):
    """The file name leads to a directory."""


class DelayedInitializerPermissionError(DelayedInitializerOSError, PermissionError):
    """The file may not be read, or stands outside the directory that the model is confined to."""


class DelayedInitializerShortReadError(DelayedInitializerError, EOFError):
    """The file ends before the payload does."""


class DelayedInitializerMemoryError(DelayedInitializerError, MemoryError):
    """There is no memory for the payload."""


@dataclass(frozen=True, slots=True)
class Payload:
    """Which bytes a node asks for, for messages: the node, the file, the first byte and how many."""

    node: str
    path: str
    offset: int
    nbytes: int


def payload_error(payload: Payload, cause: BaseException) -> DelayedInitializerError:
    """The typed error that says why ``payload`` could not be read; ``cause`` becomes its ``__cause__``."""
    kind, reason, found = _classify(payload, cause)
    error = kind(
        f"{payload.node}: {reason}: file {quoted_path(payload.path)}, offset {payload.offset}, "
        f"{payload.nbytes} bytes needed" + (f", {found} found" if found is not None else ""),
        node=payload.node,
        path=payload.path,
        offset=payload.offset,
        expected_bytes=payload.nbytes,
        found_bytes=found,
    )
    if isinstance(error, OSError):
        error.errno = getattr(cause, "errno", None) or errno.EIO
        error.filename = payload.path
    # Without its traceback, whose frames would keep buffers alive as long as the error.
    error.__cause__ = cause.with_traceback(None)
    return error


def _classify(payload: Payload, cause: BaseException) -> tuple[type[DelayedInitializerError], str, int | None]:
    if isinstance(cause, ShortReadError):
        return DelayedInitializerShortReadError, "the file is too short", cause.found_bytes
    if isinstance(cause, FileNotFoundError | NotADirectoryError):
        return DelayedInitializerFileNotFoundError, "the file does not exist", None
    if isinstance(cause, IsADirectoryError):
        return DelayedInitializerIsADirectoryError, "the file is a directory", None
    if isinstance(cause, OutsideDirectoryError):
        return DelayedInitializerPermissionError, str(cause.strerror), None
    if isinstance(cause, NotARegularFileError):
        return DelayedInitializerOSError, str(cause.strerror), None
    if isinstance(cause, PermissionError):
        return DelayedInitializerPermissionError, "the file may not be read", None
    if isinstance(cause, MemoryError):
        return DelayedInitializerMemoryError, f"there is no memory for {payload.nbytes} bytes", None
    if isinstance(cause, OSError):
        return DelayedInitializerOSError, f"the file cannot be read ({cause.strerror or cause})", None
    return DelayedInitializerError, f"reading failed ({type(cause).__name__}: {cause})", None


def _rebuild(kind: type[DelayedInitializerError], message: str, state: dict[str, object]) -> DelayedInitializerError:
    error = kind(message)
    for name, value in state.items():
        setattr(error, name, value)
    return error
