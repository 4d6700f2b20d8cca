"""What can stand in the way of installing weights into a session, each with its own type."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["InstallError", "OptionsInUseError", "OptionsSpoiledError", "WeightMismatchError"]


class InstallError(ValueError):
    """Weights cannot be installed; the session options are as they were, unless the message says otherwise."""


class OptionsInUseError(InstallError):
    """The session options belong to another model already, or to another form of this one."""


class OptionsSpoiledError(InstallError):
    """Some weights have been added to the session options and others could not be: nothing can use them any more."""


class WeightMismatchError(InstallError):
    """Names, element types or shapes of the weights are not what the model needs. Nothing has been copied.

    Attributes:
        missing: initializers for which the weights have no tensor, by name.
        unknown: tensors of the weights that no initializer takes, by name; and names that only ``name_map`` knows.
        mismatched: initializers whose tensor has another element type or shape, or a type that cannot be installed.
        transposed: those of ``mismatched`` and ``missing`` for which the weights have a tensor of the reversed shape.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unknown: Sequence[str] = (),
        mismatched: Sequence[str] = (),
        transposed: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unknown = tuple(unknown)
        self.mismatched = tuple(mismatched)
        self.transposed = tuple(transposed)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are copied and sent between processes by calling the type with `args`, which are not all of ours.
        return (_rebuild, (type(self), str(self), dict(self.__dict__)))


def _rebuild(kind: type[WeightMismatchError], message: str, state: dict[str, tuple[str, ...]]) -> WeightMismatchError:
    return kind(message, **state)
