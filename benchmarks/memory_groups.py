"""A memory control group for a benchmark's own child process: made, limited, and removed again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["NoMemoryGroupError", "memory_group"]

_PLACES = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))


class NoMemoryGroupError(OSError):
    """No memory control group can be made here; the message says why."""


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[str]:
    """The directory of a new memory control group with a limit. A process joins by writing its id to cgroup.procs.

    Raises:
        NoMemoryGroupError: no controller is mounted, or it may not be used (that takes root, or a delegated group).
    """
    reasons = []
    for root, limit in _PLACES:
        directory = os.path.join(root, f"ort-delayed-benchmark-{os.getpid()}")
        try:
            os.mkdir(directory)
        except OSError as error:
            reasons.append(f"{directory}: {error.strerror}")
            continue
        try:
            try:
                with open(os.path.join(directory, limit), "w") as file:
                    file.write(str(limit_bytes // 4096 * 4096))
            except OSError as error:
                reasons.append(f"{directory}/{limit}: {error.strerror}")
                continue
            yield directory
            return
        finally:
            _remove(directory)
    raise NoMemoryGroupError("no memory control group can be made here (" + "; ".join(reasons) + ")")


def _remove(directory: str) -> None:
    for _ in range(50):
        try:
            os.rmdir(directory)
            return
        except OSError:  # a process of the group is still ending
            time.sleep(0.1)
    os.rmdir(directory)
