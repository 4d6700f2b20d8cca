"""Whether reading ahead helps where memory is really short: an experiment on a budgeted session in a memory group.

    python benchmarks/read_ahead.py [--percents 84 56] [--rounds 3]

The pager gives pages up and lets ONNX Runtime's touches bring others in, with the system's own read-ahead. Here another
thread reads the weights of the coming groups meanwhile: with ``posix_fadvise(POSIX_FADV_WILLNEED)``, or with ``pread``
into a buffer that is thrown away. Each sample is a fresh process in a memory control group of so many percent of the
model's bytes, its file dropped from the page cache before; rows take turns. Nothing of this is in the package: it was
slower, because what is read ahead displaces what is kept.
"""

from __future__ import annotations

import argparse
import os
import queue
import threading
from functools import partial
from pathlib import Path

import model_makers
from budgets import forget, weights_bytes
from measure import MIB, FreshProcessError, Result, in_fresh_process, interleaved, median_seconds
from memory_groups import NoMemoryGroupError, memory_group
from tables import format_table

_GROUP = "ORT_DELAYED_MEMORY_GROUP"
_OWN = 64 * MIB  # what the process itself takes
_WAYS = (
    ("as it is", "none", 0),
    ("fadvise, 1 group", "fadvise", 1),
    ("fadvise, 2", "fadvise", 2),
    ("pread, 1", "pread", 1),
)


def measure(model: str, budget: int, way: str, groups: int, runs: int) -> Result:
    """Seconds a run, after the first, in the memory group that the environment names."""
    with open(os.path.join(os.environ[_GROUP], "cgroup.procs"), "w") as processes:
        processes.write(str(os.getpid()))
    if way != "none":
        _read_ahead(way, groups)
    import numpy as np

    import ort_delayed

    session = ort_delayed.InferenceSession(model, ram_budget=budget)
    feeds = {session.get_inputs()[0].name: np.ones((1, session.get_inputs()[0].shape[-1]), np.float32)}
    return {"seconds": median_seconds(lambda: session.run(None, feeds), runs=runs, warm_up=1)}


def _read_ahead(way: str, groups: int) -> None:
    """Have a thread read the weights of so many groups behind the one that a tick begins."""
    from ort_delayed.loader.mapped_ranges import Piece
    from ort_delayed.paged_weights import PagedWeights
    from ort_delayed.pager import Pager

    adopt, enter = PagedWeights.adopt, Pager._enter
    pieces: list[Piece] = []
    files: dict[str, int] = {}
    wanted: queue.SimpleQueue[Piece] = queue.SimpleQueue()

    def adopting(weights: PagedWeights, *given: frozenset[object]) -> None:
        adopt(weights, *given)
        pieces.extend(piece for own in weights._not_by_page.values() for piece in own)
        files.update(weights.files._open)

    def entering(pager: Pager, group: int) -> None:
        enter(pager, group)
        for distance in range(1, groups + 1):
            for piece in pager._groups[(group + distance) % len(pager._groups)].pieces:
                if not pager._resident[piece] and not pager._by_rows[piece]:
                    wanted.put(pieces[piece])

    def read() -> None:
        buffer = bytearray(2 * MIB)
        while True:
            piece = wanted.get()
            if way == "fadvise":
                os.posix_fadvise(files[piece.path], piece.offset, piece.nbytes, os.POSIX_FADV_WILLNEED)
                continue
            for offset in range(piece.offset, piece.offset + piece.nbytes, len(buffer)):
                os.preadv(files[piece.path], [buffer], offset)

    PagedWeights.adopt = adopting
    Pager._enter = entering
    threading.Thread(target=read, daemon=True).start()


def _in_group(model: Path, limit: int, way: str, groups: int) -> Result:
    forget(model)
    with memory_group(limit) as directory:
        try:
            return in_fresh_process(
                measure,
                model=str(model),
                budget=max(limit - _OWN, limit // 2),
                way=way,
                groups=groups,
                runs=5,
                environment={_GROUP: directory},
            )
        except FreshProcessError as error:
            if "RamBudgetExceeded" not in str(error):
                raise
            return {"seconds": float("nan")}  # what came ahead was too much for the budget


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--percents", nargs="+", type=int, default=(84, 56), help="limits (default 84 56)")
    parser.add_argument("--rounds", type=int, default=3, help="processes per row (default 3)")
    given = parser.parse_args()
    model = model_makers.chain()
    cells = []
    try:
        for percent in given.percents:
            limit = weights_bytes(model) * percent // 100
            rows = {name: partial(_in_group, model, limit, way, groups) for name, way, groups in _WAYS}
            found = interleaved(rows, rounds=given.rounds)
            cells.append([f"{percent} %", *(f"{found[name]['seconds']:.3f}" for name, _, _ in _WAYS)])
    except NoMemoryGroupError as error:
        print(f"skipped, {error}")
        return 0
    print(format_table(["group, seconds a run", *(name for name, _, _ in _WAYS)], cells))
    print("nan: the budget was exceeded")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
