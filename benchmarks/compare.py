"""Compares two records of the harness and flags every ratio that got more than 15 % worse.

    python benchmarks/compare.py OLD.json NEW.json [--worse-than 15] [--all]

Ratios, not times: a run and the way to the first output over the reference's (plain onnxruntime, for loaders
``readinto``), measured in turn with it, and the peak over the weights' bytes. Cases that only one record has are
counted. The exit status is 1 where something is flagged.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reports import describe
from results import Key, Record, ratios
from tables import format_table

__all__ = ["Change", "changes", "main"]

# Not the fastest runs: what got slower shows in the median, and two ratios of one case would be flagged for one reason.
_WORDS = {"run": "run over reference", "ready": "to the first output over reference", "peak": "peak over weights"}


@dataclass(frozen=True)
class Change:
    """One ratio of one case, then and now."""

    key: Key
    ratio: str
    old: float
    new: float

    @property
    def growth(self) -> float:
        """How much larger it is now: 0.15 is 15 % worse."""
        return self.new / self.old - 1 if self.old > 0 else 0.0


def changes(old: Record, new: Record) -> list[Change]:
    """Every ratio that both records have, the worst first."""
    before, after = ratios(old), ratios(new)
    found = [
        Change(key, name, before[key][name], value)
        for key, own in after.items()
        if key in before
        for name, value in own.items()
        if name in _WORDS
    ]
    return sorted(found, key=lambda change: -change.growth)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; 1 where a ratio got worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--worse-than", type=float, default=15.0, help="percent that is flagged (default 15)")
    parser.add_argument("--all", action="store_true", help="list every ratio, not only the flagged")
    given = parser.parse_args(arguments)
    old, new = Record.load(given.old), Record.load(given.new)
    print(f"old: {describe(old)}\nnew: {describe(new)}\n")
    found = changes(old, new)
    flagged = [change for change in found if change.growth > given.worse_than / 100]
    shown = found if given.all else flagged
    cells = [
        [", ".join(map(str, c.key)), _WORDS[c.ratio], f"{c.old:.3f}", f"{c.new:.3f}", f"{c.growth * 100:+.0f} %"]
        + ["WORSE" if c in flagged else ""]
        for c in shown
    ]
    if cells:
        print(format_table(["case", "ratio", "old", "new", "change", ""], cells, left=2) + "\n")
    alone = len(set(old.by_key()) ^ set(new.by_key()))
    print(
        f"{len(found)} ratios compared, {len(flagged)} more than {given.worse_than:g} % worse; "
        f"{alone} cases are in one record only"
    )
    return 1 if flagged else 0


if __name__ == "__main__":
    raise SystemExit(main())
