"""Records of the benchmarks' harness for tests, with made-up numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from results import Record, Row

__all__ = ["record", "row", "sample"]


def sample(run: float = 1.0, *, construct: float = 1.0, peak: int = 100, read: int = 0) -> dict[str, Any]:
    """A sample whose three later runs took about ``run`` seconds."""
    counted = {"read_bytes": 0.0, "minor_faults": 10.0, "major_faults": 0.0}
    return {
        "load_average": 0.5,
        "construct": construct,
        "first": 2 * run,
        "runs": [run * 0.9, run, run * 1.1],
        "peak": peak,
        "peak_constructing": peak // 2,
        "resident_constructed": {"anon": 10, "file": 20},
        "resident": {"anon": 30, "file": 40},
        "constructing": {**counted, "read_bytes": float(read)},
        "first_run": counted,
        "a_run": counted,
        "read_bytes": read,
    }


def row(way: str = "plain", *samples: dict[str, Any], **fields: Any) -> Row:
    """A row of the model ``m``, whose weights are 200 bytes, at size 1, warm."""
    given = {"model": "m", "size": 1, "cache": "warm", "reference": "plain", "weights": 200, "budget": 0, "limit": None}
    return Row(way=way, samples=samples, **{**given, **fields})


def record(*rows: Row) -> Record:
    """A record of these rows."""
    made = {"date": "2026-01-02", "plan": "normal", "seconds": 60, "load_average": [0.5, 0.5]}
    machine = {"cores": 2, "processor": "P", "system": "Linux 6 x86_64", "memory_bytes": 8 << 30}
    return Record(made, machine, {"python": "3.11", "onnxruntime": "1.32.0"}, rows)
