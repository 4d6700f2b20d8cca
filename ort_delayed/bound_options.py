"""Session options that belong to one model: the weights installed in them are those of that model and no other.

``SessionOptions.add_initializer`` cannot be undone and goes by name, and the config entry that names the directory of
external data redirects every load. Another model on the same options would silently get this one's weights.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnxruntime

from ort_delayed.install_errors import OptionsInUseError
from ort_delayed.loader.errors import ShardFormatError
from ort_delayed.loader.files import FileIdentity
from ort_delayed.loader.process_lock import ProcessLock
from ort_delayed.ops.kernel import Binding

__all__ = ["BoundModel", "bind", "bound_model", "claimed", "model_digest", "refuse_bound"]

_ADVICE = "use new SessionOptions for another model, and InstalledModel.model with these"


@dataclass(frozen=True, eq=False, slots=True)
class BoundModel:
    """The model that session options belong to.

    Attributes:
        digest: of the model's bytes, see :func:`model_digest`.
        binding: the payloads of its delayed nodes, or None where it has none.
        identities: the weight files, which ONNX Runtime's optimizers read, as they were when they were installed.
    """

    digest: bytes
    binding: Binding | None
    identities: Mapping[str, FileIdentity]

    def check(self, model: Any) -> bytes:
        """The model, if it is the one that the options belong to and its files are what was installed.

        Raises:
            OptionsInUseError: another model, or a path.
            ShardFormatError: a weight file has changed or is gone.
        """
        if not isinstance(model, bytes) or model_digest(model) != self.digest:
            raise OptionsInUseError(f"weights have been installed in these session options: {_ADVICE}")
        self.check_files()
        return model

    def check_files(self) -> None:
        """Refuse weight files that are no longer those whose bytes were installed.

        Raises:
            ShardFormatError: a weight file has changed or is gone.
        """
        for path, expected in self.identities.items():
            try:
                found = FileIdentity.of(path)
            except OSError as error:
                raise ShardFormatError(f"{_stale(path)} cannot be read any more ({error.strerror})") from error
            if found != expected:
                raise ShardFormatError(
                    f"{_stale(path)} has changed since. ONNX Runtime's optimizers read the file: install the weights "
                    "again, with new SessionOptions, once nothing writes to it"
                )


def _stale(path: str) -> str:
    return f"the weight file '{path}', from which weights have been installed,"


def model_digest(model: bytes) -> bytes:
    """What stands for a model's bytes, which the registry does not keep alive."""
    return hashlib.blake2b(model, digest_size=16).digest()


_lock = ProcessLock()
_bound: weakref.WeakKeyDictionary[Any, BoundModel | None] = weakref.WeakKeyDictionary()  # None: being bound now


def bound_model(options: onnxruntime.SessionOptions) -> BoundModel | None:
    """The model that the options belong to; None where they are free.

    Raises:
        OptionsInUseError: weights are being installed in them now, or an installation stopped half-way.
    """
    with _lock:
        bound = _bound.get(options)
        if bound is None and options in _bound:
            raise OptionsInUseError(f"weights are being installed in these session options: {_ADVICE}")
        return bound


def refuse_bound(options: onnxruntime.SessionOptions) -> None:
    """Refuse options that belong to a model already.

    Raises:
        OptionsInUseError: they do.
    """
    if bound_model(options) is not None:
        raise OptionsInUseError(f"weights have been installed in these session options already: {_ADVICE}")


@contextmanager
def claimed(options: onnxruntime.SessionOptions) -> Iterator[None]:
    """While weights are being installed in ``options``, nobody else binds them; they are free again unless bound.

    Raises:
        OptionsInUseError: the options belong to a model already.
    """
    with _lock:
        if options in _bound:
            raise OptionsInUseError(f"weights have been installed in these session options already: {_ADVICE}")
        _bound[options] = None
    try:
        yield
    except BaseException:
        with _lock:
            if _bound.get(options) is None:
                _bound.pop(options, None)
        raise


def bind(options: onnxruntime.SessionOptions, model: BoundModel) -> None:
    """Let claimed ``options`` belong to ``model`` from now on."""
    with _lock:
        _bound[options] = model
