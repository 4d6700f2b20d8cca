"""What streaming refuses, each kind with its own type. Budget errors stand in :mod:`ort_delayed.loader.budget`."""

from __future__ import annotations

__all__ = ["BufferReleaseError", "LocalWeightsNotFoundError", "LocalWeightsRequired", "ShardFormatError"]


class ShardFormatError(ValueError):
    """A shard, an index or a model's external data is incomplete, contradicts itself or changed meanwhile."""


class LocalWeightsRequired(ValueError):  # noqa: N818  (a public name that callers catch)
    """A source or a shard is not a local file inside the artifact directory. Nothing is ever downloaded."""


class LocalWeightsNotFoundError(LocalWeightsRequired, FileNotFoundError):
    """A source that looks like a hub repository id (``owner/name``), and is no path that exists."""


class BufferReleaseError(RuntimeError):
    """A consumer kept a view of mapped weights beyond its callback; copy what is needed later."""
