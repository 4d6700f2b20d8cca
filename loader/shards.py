"""Opening a shard: a local regular file inside the artifact directory, and still the one that was discovered."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ort_delayed.loader.errors import LocalWeightsRequired, ShardFormatError
from ort_delayed.loader.files import FileIdentity, OutsideDirectoryError, open_weights

__all__ = ["is_url", "opened_shard", "shard_path"]

# One letter before a colon is a Windows drive. One slash is what is left of two in a pathlib path.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/|hf:", re.ASCII)


def is_url(text: str) -> bool:
    """Whether ``text`` is a URL (``https://...``, ``hf://...``, ``file:/...``) and no path."""
    return _URL.match(text) is not None


def shard_path(location: str, directory: str, named_by: str) -> str:
    """The absolute path of a shard that ``named_by`` (a phrase: "the index 'x'") calls ``location``.

    Nothing is opened here; :func:`opened_shard` checks where the path really leads.

    Raises:
        LocalWeightsRequired: the location is a URL or absolute.
    """
    if is_url(location):
        raise LocalWeightsRequired(f"{named_by} names the shard {location!r}: shards must be local files, not URLs")
    if os.path.isabs(location):
        raise LocalWeightsRequired(
            f"{named_by} names the shard {location!r}: a shard's path must be relative to the artifact directory"
        )
    return os.path.join(directory, location)


@contextmanager
def opened_shard(
    path: str, *, within: Sequence[str] | None, named_by: str = "", expected: FileIdentity | None = None
) -> Iterator[tuple[int, FileIdentity]]:
    """The shard's file descriptor and identity while the context lasts.

    Args:
        path: the shard.
        within: real directories that it must stand in, links resolved; None: anywhere.
        named_by: who names it, for messages.
        expected: the identity that it had when it was discovered.

    Raises:
        FileNotFoundError: there is no such file.
        LocalWeightsRequired: it leads outside ``within``.
        ShardFormatError: it is not the file ``expected``, or no longer the same.
        OSError: it cannot be opened, or is not a regular file.
    """
    fd = _open(path, within, f", which {named_by} names," if named_by else "", known=expected is not None)
    try:
        identity = FileIdentity.of(fd)
        if expected is not None and identity != expected:
            raise ShardFormatError(
                f"the shard '{path}' changed after it was discovered ({_difference(expected, identity)}): "
                "make a new loader once nothing writes to it"
            )
        yield fd, identity
    finally:
        os.close(fd)


def _open(path: str, within: Sequence[str] | None, by: str, *, known: bool) -> int:
    try:
        return open_weights(path, within=within)
    except FileNotFoundError as error:
        since = " any more" if known else ""
        raise FileNotFoundError(errno.ENOENT, f"the weight shard{by} is not there{since}", path) from error
    except OutsideDirectoryError as error:
        raise LocalWeightsRequired(
            f"the shard '{path}'{by} leads outside the artifact directory: {error.strerror}"
        ) from error


def _difference(expected: FileIdentity, found: FileIdentity) -> str:
    if (expected.device, expected.inode) != (found.device, found.inode):
        return "another file has its name now"
    if expected.size != found.size:
        return f"it had {expected.size} bytes and has {found.size}"
    return "its time of last change is another"
