"""What a conversion did with each tensor, as a frozen record that prints as a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

__all__ = ["ConversionReport", "TensorReport", "byte_count", "unmatched_text"]


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor of a model, and what became of it.

    Attributes:
        name: the value's name.
        graph: where it stands: ``"main graph"``, the body of a node, or a function.
        kind: what it was: ``"initializer"``, ``"Constant"``, ``"delayed node"``, ``"sparse initializer"``.
        element_type: its element type, ``"float32"``.
        shape: elements per axis.
        nbytes: bytes of its raw values.
        action: ``"written"`` to the data file, ``"referenced"`` where it stands, ``"inlined"``, or ``"kept"``.
        reason: why it was kept, or what else there is to say; empty where the action says it all.
        path: the file that holds its bytes now, as the new model names it; None where the model itself does.
        offset: its first byte in that file, or None.
    """

    name: str
    graph: str
    kind: str
    element_type: str
    shape: tuple[int, ...]
    nbytes: int
    action: str
    reason: str = ""
    path: str | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What :func:`convert_model` or :func:`restore_model` did; ``str()`` of it is a table.

    Attributes:
        source: the model that was read.
        destination: the model that was written.
        data_file: the data file written beside it, or None where nothing had to be written.
        data_bytes: the size of that file.
        tensors: every tensor, the ones that changed first, each group in order of first use.
        unmatched: patterns of ``select`` that no tensor's name matches.
    """

    source: str
    destination: str
    data_file: str | None
    data_bytes: int
    tensors: tuple[TensorReport, ...]
    unmatched: tuple[str, ...] = ()

    def nbytes(self, action: str) -> int:
        """Bytes of all tensors with that action."""
        return sum(t.nbytes for t in self.tensors if t.action == action)

    def count(self, action: str) -> int:
        """How many tensors have that action."""
        return sum(t.action == action for t in self.tensors)

    def tensor(self, name: str, graph: str | None = None) -> TensorReport:
        """The row of one tensor; ``graph`` tells same-named ones apart.

        Raises:
            KeyError: there is none, or there are several.
        """
        found = [t for t in self.tensors if t.name == name and graph in (None, t.graph)]
        if len(found) != 1:
            raise KeyError(f"{len(found)} tensors are named {name!r}, in {[t.graph for t in found]}")
        return found[0]

    @property
    def absolute_paths(self) -> tuple[str, ...]:
        """Files that the new model names by an absolute path: it cannot move away from them."""
        return tuple(
            dict.fromkeys(t.path for t in self.tensors if t.path is not None and t.path.startswith(("/", "\\")))
        )

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("tensor", "graph", "type", "bytes", "action", "where or why")]
        rows += [_row(t) for t in self.tensors]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [f"{self.source} -> {self.destination}", ""]
        for row in rows:
            cells = [cell.rjust(widths[i]) if i == 3 else cell.ljust(widths[i]) for i, cell in enumerate(row[:5])]
            lines.append("  ".join([*cells, row[5]]).rstrip())
        lines += ["", *self._totals()]
        return "\n".join(lines)

    def _totals(self) -> list[str]:
        lines = []
        for action, number in Counter(t.action for t in self.tensors).items():
            lines.append(f"{action}: {number} tensors, {byte_count(self.nbytes(action))}")
        if self.data_file is not None:
            lines.append(f"data file: {self.data_file}, {byte_count(self.data_bytes)}")
        if self.absolute_paths:
            lines.append(f"absolute paths, so the model needs them where they are: {', '.join(self.absolute_paths)}")
        lines += [unmatched_text(pattern) for pattern in self.unmatched]
        return lines or ["no tensors"]


def unmatched_text(pattern: str) -> str:
    """What to say of a pattern of ``select`` that matches nothing."""
    return f"no tensor has a name like {pattern!r}, so that pattern selects nothing"


def byte_count(number: int) -> str:
    """``number`` bytes for a reader: ``"1.5 MiB"``."""
    value = float(number)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


def _row(tensor: TensorReport) -> tuple[str, ...]:
    place = "" if tensor.path is None else f"{tensor.path} at {tensor.offset}"
    kind = f"{tensor.element_type}[{','.join(map(str, tensor.shape))}]"
    where = "; ".join(text for text in (tensor.reason, place) if text)
    return (tensor.name, tensor.graph, kind, str(tensor.nbytes), tensor.action, where)
