"""Inputs for a run: from an .npz file, or made up from the shapes that the model declares."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ort_delayed.cli.errors import CommandError, UsageError
from ort_delayed.loader.quoting import quoted

if TYPE_CHECKING:
    from ort_delayed.inspecting import ModelValue

__all__ = ["Feeds", "assumed_axes", "load_feeds", "random_feeds"]

Feeds = Mapping[str, npt.NDArray[np.generic]]


def load_feeds(path: str, inputs: Sequence[ModelValue]) -> Feeds:
    """The arrays of an .npz file, of which each must be an input of the model.

    Raises:
        CommandError: the file is no .npz file, or lacks or has other names than the model takes.
        FileNotFoundError, OSError: it cannot be read.
    """
    try:
        stored = np.load(path, allow_pickle=False)
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array without a name")
        with stored:
            feeds = {name: stored[name] for name in stored.files}
    except (ValueError, EOFError) as error:
        raise CommandError(f"'{path}' is not an .npz file of arrays (numpy.savez): {error}") from error
    wanted = {value.name for value in inputs}
    if wanted != set(feeds):
        raise CommandError(
            f"'{path}' has the arrays {_names(feeds)}, the model takes {_names(wanted)}: "
            f"missing {_names(wanted - set(feeds))}, unknown {_names(set(feeds) - wanted)}"
        )
    for value in inputs:
        found = feeds[value.name]
        if found.dtype.kind in "fiub" and found.dtype.name != value.element_type:
            # ONNX Runtime's own message does not say which input it means.
            raise CommandError(
                f"'{path}': the array '{value.name}' is of type {found.dtype.name}, the model takes "
                f"{value.element_type}"
            )
    return feeds


def assumed_axes(inputs: Sequence[ModelValue], dims: Mapping[str, int]) -> tuple[str, ...]:
    """Names of axes that nobody has given a length, in order; :func:`random_feeds` makes them 1."""
    axes = (axis for value in inputs for axis in value.shape or () if isinstance(axis, str))
    return tuple(dict.fromkeys(axis for axis in axes if axis not in dims))


def random_feeds(inputs: Sequence[ModelValue], dims: Mapping[str, int], seed: int) -> Feeds:
    """Made-up inputs, the same for the same seed.

    Floats are normally distributed. Integers are 0 or 1, which suit every embedding and every mask.

    Args:
        inputs: what the model takes.
        dims: lengths of named axes; the others get 1.
        seed: of the generator.

    Raises:
        UsageError: a name in ``dims`` is no axis of any input.
        CommandError: an input has no shape or a type for which nothing can be made up.
    """
    known = {axis for value in inputs for axis in value.shape or () if isinstance(axis, str)}
    unknown = sorted(set(dims) - known)
    if unknown:
        raise UsageError(f"--dim {unknown[0]}: no input has such an axis; the model's axes are {_names(known)}")
    generator = np.random.default_rng(seed)
    feeds = {}
    for value in inputs:
        if value.shape is None:
            raise CommandError(
                f"input '{value.name}' declares no shape, so nothing can be made up for it: give --feeds"
            )
        shape = [dims.get(axis, 1) if isinstance(axis, str) else axis for axis in value.shape]
        feeds[value.name] = _made_up(value, shape, generator)
    return feeds


def _made_up(value: ModelValue, shape: list[int], generator: np.random.Generator) -> npt.NDArray[np.generic]:
    kind = value.element_type
    if kind.startswith("float") and kind in ("float16", "float32", "float64"):
        return generator.standard_normal(shape).astype(kind)
    if kind.startswith(("int", "uint")) and kind.lstrip("uint") in ("8", "16", "32", "64"):
        return generator.integers(0, 2, shape).astype(kind)
    if kind == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    raise CommandError(f"input '{value.name}' is of type {kind}, for which nothing can be made up: give --feeds")


def _names(names: Mapping[str, object] | Sequence[str] | set[str]) -> str:
    return ", ".join(f"'{n}'" for n in sorted(names)) or "none"


def parse_dim(text: str) -> tuple[str, int]:
    """``batch=1`` as a pair.

    Raises:
        UsageError: it is not that.
    """
    name, _, number = text.rpartition("=")
    # No int64 has more digits; and there are digits, such as a small 2, that are no number.
    if not name or not number.isdecimal() or len(number) > 19:
        raise UsageError(f"--dim is NAME=LENGTH, such as batch=1, found {quoted(text)}")
    return name, int(number)


def save_arrays(path: str, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Write an .npz file whole or not at all."""
    import io

    from ort_delayed.new_files import PendingFile

    full = os.path.abspath(path)
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    with PendingFile(os.path.dirname(full), os.path.basename(full)) as file:
        file.write(content.getbuffer())
        file.commit(full, replace=True)
