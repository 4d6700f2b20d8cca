"""Writing the data file of a packed model: pieces are packed one after the other and put where the layout says."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx

from ort_delayed.equal_ranges import find_equal_ranges
from ort_delayed.loader.external_data import external_tensor, has_external_data, set_external_data
from ort_delayed.loader.files import opened_weights
from ort_delayed.loader.tensor_on_disk import TensorOnDisk
from ort_delayed.new_files import CopyBuffer, PendingDataFile
from ort_delayed.pack_layout import SMALL_BYTES, DataLayout
from ort_delayed.pack_pieces import Piece, piece_model, plan_pieces
from ort_delayed.pack_sessions import SavedModel, pack_piece, value_types
from ort_delayed.prepacked_entries import PackedBuffer, PackedWeight, packed_weights, set_packed_weights
from ort_delayed.scratch_directory import ScratchDirectory
from ort_delayed.use_order import nodes_in_order, scoped_initializers

__all__ = ["PackedData"]

_CANNOT_BE_SAVED = "doesn't have an implementation that can cache computed pre-packed weights"


@dataclass(slots=True)
class _Weight:
    """A weight on its way to the data file; ``first`` is the weight that holds its bytes, often itself."""

    tensor: onnx.TensorProto
    stored: TensorOnDisk
    first: str
    readers: set[str] = field(default_factory=set)
    offset: int | None = None
    packed: list[PackedWeight] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Form:
    """A packed form of a weight, and the file that its ranges are of."""

    packed: PackedWeight
    path: str


@dataclass(frozen=True, slots=True)
class _Part:
    """What ONNX Runtime saved of a piece, or of a part of one; the scoped names of its weights."""

    saved: SavedModel
    weights: Mapping[str, str]


class PackedData:
    """The data file of one packed model in the making.

    Attributes:
        model: the optimised model; :meth:`finish` points its initializers at the data file.
        layout: where everything is.
        weights: by scoped name, in order of first use.
    """

    def __init__(self, optimized: SavedModel, scratch: ScratchDirectory, *, prepack: bool) -> None:
        self.model = optimized.model
        self.layout = DataLayout()
        self._source = optimized
        self._scratch = scratch
        self._prepack = prepack
        self._buffer = CopyBuffer()
        self._parts = 0
        self._by_key: dict[tuple[str, tuple[int, ...]], PackedWeight] = {}
        # Kept, because the ids of graphs tell them apart: a proto's wrapper lives as long as somebody holds it.
        self._visits = tuple(nodes_in_order(self.model.graph))
        self._initializers = dict(scoped_initializers(self.model.graph))
        self.weights = self._find_weights()

    def write(self, data: PendingDataFile, progress: Callable[[int, int], Any] | None = None) -> None:
        """Pack and write everything.

        Args:
            data: where it goes.
            progress: called after each piece with the bytes of weights that are done, and those in all.

        Raises:
            PrepackedEntryError: this ONNX Runtime writes entries of an unknown form.
            OSError: reading or writing failed.
        """
        done, total = 0, sum(w.stored.nbytes for w in self._distinct())
        with opened_weights(self._source.data_path) as fd:
            for weight in self._distinct():
                if weight.stored.nbytes < SMALL_BYTES:
                    self._put_raw(weight, self.layout.small(weight.stored.nbytes), fd, data)
            types = self._types()
            for piece in self._pieces():
                forms = self._pack(piece, types)
                for name in piece.weights:
                    weight = self.weights[name]
                    for form in forms.get(name, ()):
                        self._put_packed(weight, form, data)
                    if weight.first == name and weight.offset is None and not _is_redundant(weight):
                        self._put_raw(weight, self.layout.streamed(weight.stored.nbytes), fd, data)
                self._remove_piece_files(forms)
                done += sum(self.weights[n].stored.nbytes for n in piece.weights if self.weights[n].first == n)
                if progress is not None:
                    progress(min(done, total), total)
            for weight in self._distinct():
                if weight.offset is None:
                    self._put_raw(weight, self.layout.behind(weight.stored.nbytes), fd, data)
        if progress is not None:
            progress(total, total)

    def finish(self, data_name: str) -> None:
        """Point the model's initializers at the data file of that name."""
        for weight in self.weights.values():
            first = self.weights[weight.first]
            assert first.offset is not None
            # ONNX Runtime writes what several weights have in common for one of them.
            weight.packed = weight.packed or first.packed
            set_external_data(weight.tensor, data_name, first.offset, first.stored.nbytes)
            set_packed_weights(weight.tensor, weight.packed)

    def _find_weights(self) -> dict[str, _Weight]:
        external = {name: t for name, t in self._initializers.items() if has_external_data(t)}
        if not external:
            return {}
        order = dict.fromkeys(w for v in self._visits for w in map(v.weights.get, v.node.input) if w in external)
        order |= dict.fromkeys(external)  # what no node reads: a graph's output
        stored = {n: external_tensor(external[n], self._scratch.path) for n in order if n is not None}
        with opened_weights(self._source.data_path) as fd:
            first = find_equal_ranges(fd, {n: (s.offset, s.nbytes) for n, s in stored.items()})
        weights = {n: _Weight(external[n], s, first[n]) for n, s in stored.items()}
        for visit in self._visits:
            for name in visit.node.input:
                if visit.weights.get(name) in weights:
                    holder = weights[weights[visit.weights[name]].first]
                    holder.readers.add(visit.node.op_type)
        return weights

    def _distinct(self) -> list[_Weight]:
        return [w for name, w in self.weights.items() if w.first == name]

    def _pieces(self) -> Sequence[Piece]:
        sizes = {name: w.stored.nbytes for name, w in self.weights.items()}
        return plan_pieces(self._visits, sizes, pack=self._prepack)

    def _types(self) -> dict[int, dict[str, str]]:
        reading = {id(v.graph) for v in self._visits if any(v.weights.get(n) in self.weights for n in v.node.input)}
        return value_types(self.model, self._scratch.path, reading) if self._prepack else {}

    def _pack(self, piece: Piece, types: Mapping[int, Mapping[str, str]]) -> dict[str, list[_Form]]:
        """The packed forms of a piece's weights, still in the files that ONNX Runtime wrote them to."""
        forms: dict[str, list[_Form]] = {}
        for part in self._saved_parts(piece, types):
            for tensor in part.saved.model.graph.initializer:
                name = part.weights[tensor.name]
                forms.setdefault(name, []).extend(_Form(p, part.saved.data_path) for p in packed_weights(tensor))
        return forms

    def _saved_parts(self, piece: Piece, types: Mapping[int, Mapping[str, str]]) -> Iterator[_Part]:
        made = piece_model(piece, self._initializers, types, self.model)
        if made is None:
            return
        self._parts += 1
        try:
            saved = pack_piece(made.model, self._scratch.path, f"piece_{self._parts}")
        except (OSError, MemoryError):
            raise
        except Exception as error:
            # Some kernel packs a weight and offers no bytes to save, which ONNX Runtime takes for an error. It is
            # found by packing for one node at a time, and does its packing when a session is made, as ever. Any other
            # error (a full disk) is one.
            if _CANNOT_BE_SAVED not in str(error):
                raise
            if len(piece.visits) > 1:
                for visit in piece.visits:
                    yield from self._saved_parts(Piece(piece.weights, (visit,)), types)
                return
            for name in made.weights.values():
                if name in self.weights:
                    op_type = piece.visits[0].node.op_type
                    self.weights[name].note = f"{op_type} packs it when a session is made: it cannot be saved"
        else:
            yield _Part(saved, made.weights)

    def _put_packed(self, weight: _Weight, form: _Form, data: PendingDataFile) -> None:
        """Copy a packed form, unless one with the same key is there: ONNX Runtime takes keys for identities too."""
        key = (form.packed.key, tuple(b.nbytes for b in form.packed.buffers))
        if key not in self._by_key:
            buffers = []
            with opened_weights(form.path) as fd:
                for b in form.packed.buffers:
                    offset = self.layout.streamed(b.nbytes)
                    data.pad_to(offset)
                    self._buffer.copy(fd, b.offset, b.nbytes, data)
                    buffers.append(PackedBuffer(offset, b.nbytes, b.flag))
            self._by_key[key] = PackedWeight(form.packed.key, tuple(buffers))
        if self._by_key[key] not in weight.packed:
            weight.packed.append(self._by_key[key])

    def _put_raw(self, weight: _Weight, offset: int, fd: int, data: PendingDataFile) -> None:
        data.pad_to(offset)
        self._buffer.copy(fd, weight.stored.offset, weight.stored.nbytes, data)
        weight.offset = offset

    def _remove_piece_files(self, forms: Mapping[str, Sequence[_Form]]) -> None:
        for path in {form.path for some in forms.values() for form in some}:
            os.unlink(path)


def _is_redundant(weight: _Weight) -> bool:
    """Whether every node that reads the weight has a packed form of it."""
    return weight.readers <= {p.op_type for p in weight.packed} and bool(weight.packed)
