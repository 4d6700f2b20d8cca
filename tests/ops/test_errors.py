"""The typed errors: which cause becomes which, what they say, and that they travel between processes."""

from __future__ import annotations

import copy
import errno
import pickle

import pytest

from ort_delayed.loader.files import NotARegularFileError, OutsideDirectoryError
from ort_delayed.loader.reading import ShortReadError
from ort_delayed.ops import errors
from ort_delayed.ops.errors import DelayedInitializerError, Payload, payload_error

PAYLOAD = Payload("DelayedInitializer node 'n' (yields 'w')", "/models/w.bin", 64, 256)

CAUSES: list[tuple[BaseException, type[DelayedInitializerError], type[BaseException], str]] = [
    (ShortReadError(64, 256, 100), errors.DelayedInitializerShortReadError, EOFError, "100 found"),
    (
        FileNotFoundError(errno.ENOENT, "gone"),
        errors.DelayedInitializerFileNotFoundError,
        FileNotFoundError,
        "does not exist",
    ),
    (
        NotADirectoryError(errno.ENOTDIR, "a file"),
        errors.DelayedInitializerFileNotFoundError,
        FileNotFoundError,
        "does not exist",
    ),
    (
        IsADirectoryError(errno.EISDIR, "dir"),
        errors.DelayedInitializerIsADirectoryError,
        IsADirectoryError,
        "is a directory",
    ),
    (
        PermissionError(errno.EACCES, "no"),
        errors.DelayedInitializerPermissionError,
        PermissionError,
        "may not be read",
    ),
    (
        OutsideDirectoryError(errno.EACCES, "leads out of it"),
        errors.DelayedInitializerPermissionError,
        PermissionError,
        "leads out of it",
    ),
    (NotARegularFileError(errno.EINVAL, "this is a FIFO"), errors.DelayedInitializerOSError, OSError, "FIFO"),
    (OSError(errno.EIO, "Input/output error"), errors.DelayedInitializerOSError, OSError, "Input/output error"),
    (MemoryError(), errors.DelayedInitializerMemoryError, MemoryError, "no memory for 256 bytes"),
    (ZeroDivisionError("odd"), DelayedInitializerError, Exception, "ZeroDivisionError: odd"),
]


@pytest.mark.parametrize(("cause", "kind", "built_in", "says"), CAUSES)
def test_causes(
    cause: BaseException, kind: type[DelayedInitializerError], built_in: type[BaseException], says: str
) -> None:
    error = payload_error(PAYLOAD, cause)
    assert type(error) is kind
    assert isinstance(error, DelayedInitializerError)
    assert isinstance(error, built_in)
    assert error.__cause__ is cause
    assert says in str(error)
    for part in ("node 'n'", "'/models/w.bin'", "offset 64", "256 bytes needed"):
        assert part in str(error)
    assert (error.node, error.path, error.offset, error.expected_bytes) == (PAYLOAD.node, PAYLOAD.path, 64, 256)
    if isinstance(error, OSError):
        assert error.errno == getattr(cause, "errno", None)
        assert error.filename == "/models/w.bin"


@pytest.mark.parametrize("cause", [c[0] for c in CAUSES])
@pytest.mark.parametrize("travel", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_pickling_and_copying_keep_everything(cause: BaseException, travel: object) -> None:
    error = payload_error(PAYLOAD, cause)
    other = travel(error)  # type: ignore[operator]
    assert type(other) is type(error)
    assert str(other) == str(error)
    for name in ("node", "path", "offset", "expected_bytes", "found_bytes", "errno", "filename"):
        assert getattr(other, name, None) == getattr(error, name, None)


def test_a_cause_keeps_no_frames() -> None:
    try:
        raise FileNotFoundError(errno.ENOENT, "gone")
    except FileNotFoundError as cause:
        error = payload_error(PAYLOAD, cause)
    assert error.__cause__ is not None
    assert error.__cause__.__traceback__ is None
