"""What is measured: cases, each a model, a way of running it and a limit. Pure; nothing here opens a file.

    quick()     tiny models, every kind of weight: memory bounds and identical outputs, no times
    normal()    the chain, the decoder and the MiniLM encoder at two sizes of inputs each, and the loaders
    full()      every kind of model; 10 to 5,000 weights; 0.1 to 4 GiB

``harness.py`` runs a :class:`Plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

__all__ = ["PLANS", "Case", "Limit", "Model", "Plan", "Sizes", "Way", "full", "normal", "quick"]


@dataclass(frozen=True)
class Model:
    """A model that a script makes: which one, and the dimensions that its maker takes (none: the maker's own)."""

    kind: str
    dimensions: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """As tables and results call it."""
        return " ".join([self.kind, "x".join(map(str, self.dimensions))]).strip()


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's weights: all, the largest, the largest layer group; what a limit is reckoned from."""

    weights: int
    largest: int
    group: int


@dataclass(frozen=True)
class Limit:
    """Bytes, as so many times a model's weights, largest weight and largest layer group, and so many MiB."""

    weights: float = 0.0
    largest: float = 0.0
    group: float = 0.0
    mib: float = 0.0

    def bytes(self, sizes: Sizes) -> int:
        """What that is for one model."""
        parts = self.weights * sizes.weights + self.largest * sizes.largest + self.group * sizes.group
        return int(parts + self.mib * 2**20)


@dataclass(frozen=True)
class Way:
    """A way of running a model, or of loading its weights.

    Attributes:
        name: as tables call it.
        opener: what ``openers.py`` calls it.
        form: which of a model's files it opens; ``forms.py`` makes them.
        budget: the RAM budget that is asked for, None for none.
        reference: the way whose time is 1 in ratios; its own name for a reference.
        same_as: the way whose outputs must be the same bytes; empty: the outputs must be close to the reference's.
        needs: a module without which the way is left out.
    """

    name: str
    opener: str
    form: str
    budget: Limit | None = None
    reference: str = "plain"
    same_as: str = ""
    needs: str = ""


@dataclass(frozen=True)
class Case:
    """A model, a way of running it, and the limit that its peak is held against (None: it is only recorded).

    ``size`` is the number of rows, tokens, images or steps of the inputs; ``cache`` the state of the page cache before
    the sample: ``"warm"`` or ``"cold"``.
    """

    model: Model
    size: int
    way: Way
    limit: Limit | None = None
    cache: str = "warm"

    @property
    def key(self) -> tuple[str, int, str, str]:
        """What tells one case from another, in results as well."""
        return (self.model.name, self.size, self.cache, self.way.name)


@dataclass(frozen=True)
class Plan:
    """Cases and how much effort goes into them.

    Attributes:
        cases: what is measured; cases of one model, size and cache state take turns.
        rounds: fresh processes per case.
        runs: at most so many later runs in a sample.
        seconds: no further run once they have taken so long.
        minutes: rounds are left out, never the first, where all would take longer; 0: never.
        times: whether times are worth printing.
    """

    cases: tuple[Case, ...]
    rounds: int
    runs: int
    seconds: float
    minutes: float = 0.0
    times: bool = True


# --- Ways -------------------------------------------------------------------------------------------------------------

PLAIN = Way("plain", "plain", "external")
UNPACKED = Way("plain, not prepacked", "unpacked", "external")
STOCK = Way("stock custom op", "stock", "stock")
FILE = Way("file mode", "ours", "file")
CPU = Way("cpu mode", "ours", "cpu")
INSTALL = Way("stream_install", "install", "external", budget=Limit(weights=1, group=1, mib=16))
PACKED = Way("packed", "ours", "packed", same_as=PLAIN.name)
FLOORS = (
    Way("floor: memcpy", "memcpy", "external"),
    Way("floor: sequential read", "read", "external"),
)


def budget(percent: int, *, exact: bool = True) -> Way:
    """A session whose budget is so many percent of the weights' bytes; ``exact``: its outputs are plain's, unpacked."""
    same_as = UNPACKED.name if exact else ""
    return Way(f"budget {percent} %", "ours", "external", Limit(weights=percent / 100), same_as=same_as)


def packed(percent: int) -> Way:
    """The same on a packed model. The percentage is of the weights as they were before packing."""
    return replace(PACKED, name=f"packed {percent} %", budget=Limit(weights=percent / 100))


# Copies of all weights, kept; and every byte looked at, nothing kept.
COPY_FLOOR = Way("copy: readinto", "readinto", "checkpoint", reference="copy: readinto")
TOUCH_FLOOR = Way("touch: readinto", "readinto-touched", "checkpoint", reference="touch: readinto")
_WHOLE = Limit(weights=1, group=1, mib=16)
_GROUP = Limit(group=1, mib=8)
LOADERS = (
    COPY_FLOOR,
    Way("copy: safetensors load_file", "load_file", "checkpoint", None, COPY_FLOOR.name, COPY_FLOOR.name),
    Way("copy: OpenMed", "openmed", "checkpoint", _WHOLE, COPY_FLOOR.name, COPY_FLOOR.name, "openmed"),
    Way("copy: ours", "loader", "checkpoint", _WHOLE, COPY_FLOOR.name, COPY_FLOOR.name),
    TOUCH_FLOOR,
    Way("touch: OpenMed", "openmed-touched", "checkpoint", _GROUP, TOUCH_FLOOR.name, TOUCH_FLOOR.name, "openmed"),
    Way("touch: ours", "loader-touched", "checkpoint", _GROUP, TOUCH_FLOOR.name, TOUCH_FLOOR.name),
)


# --- Cases ------------------------------------------------------------------------------------------------------------


def limit(way: Way, *, activations: bool, kind: str = "") -> Limit | None:
    """What the project promises of a way. ``activations``: the inputs are so large that what is computed counts too."""
    # ONNX Runtime computes with float16 weights on a CPU by casting each to float32: twice as much again. A weight that
    # is no constant is brought into the order that Conv reads, and both of an LSTM's are packed, at every run.
    largest = {"float16": 9, "convolutional": 5, "lstm": 5}.get(kind, 3)
    if way.opener in ("ours", "install", "loader", "loader-touched") and way.budget is not None:
        return way.budget
    if activations:
        return None
    if way.form == "file":
        return Limit(largest=largest, mib=16)
    return Limit(weights=1, largest=largest, mib=16) if way.form == "cpu" else None


def cases(
    model: Model, sizes: Iterable[int], ways: Sequence[Way], *, activations: bool = False, cache: str = "warm"
) -> tuple[Case, ...]:
    """Every way at every size."""
    return tuple(
        Case(model, size, way, limit(way, activations=activations, kind=model.kind), cache)
        for size in sizes
        for way in ways
    )


def _all_ways(*percents: int) -> tuple[Way, ...]:
    ours = (FILE, CPU, INSTALL, *map(budget, percents), PACKED, *map(packed, percents))
    return (PLAIN, UNPACKED, *ours, *FLOORS)


_COLD = (PLAIN, UNPACKED, FILE, budget(50), packed(50), FLOORS[1])


def quick() -> Plan:
    """Under two minutes: what continuous integration asks of every change."""
    chain, few = Model("chain", (24, 1024)), Model("chain", (4, 512))
    convolutional, float16 = Model("convolutional", (16, 256)), Model("float16", (12, 1024))
    some = (PLAIN, UNPACKED, FILE, budget(75), packed(75))
    # Convolutions lose their blocked layout under a budget, and float16 is computed in float32, by casts that a packed
    # model has behind it: the same numbers, but for the last digits.
    return Plan(
        cases=(
            *cases(chain, (4,), (PLAIN, UNPACKED, FILE, CPU, INSTALL, budget(50), budget(110), PACKED, packed(50))),
            *cases(few, (1,), (PLAIN, STOCK, FILE)),
            *cases(Model("decoder", (4, 512, 8, 1408, 4000, 512)), (8,), some),
            *cases(Model("int8", (12, 2048)), (4,), some),
            *cases(float16, (4,), (PLAIN, UNPACKED, FILE, packed(150))),
            *cases(convolutional, (1,), (PLAIN, UNPACKED, FILE, budget(75, exact=False), packed(75))),
            *cases(Model("lstm", (6, 512)), (4,), some),
            *cases(chain, (0,), tuple(w for w in LOADERS if not w.needs)),
        ),
        rounds=1,
        runs=3,
        seconds=1.0,
        times=False,
    )


def normal() -> Plan:
    """Three models at two sizes of inputs, and the loaders, within a quarter of an hour."""
    chain, decoder, minilm = Model("chain", (32, 2048)), Model("decoder"), Model("minilm")
    ways = _all_ways(25, 50, 110)
    small = _all_ways(50, 110)
    return Plan(
        cases=(
            *cases(minilm, (16,), small),
            *cases(minilm, (128,), small, activations=True),
            *cases(decoder, (1,), ways),
            *cases(chain, (1,), ways),
            *cases(Model("chain", (8, 1024)), (1,), (PLAIN, STOCK, FILE, CPU)),
            *cases(decoder, (0,), LOADERS),
            *cases(decoder, (256,), ways, activations=True),
            *cases(chain, (128,), ways, activations=True),
            *cases(decoder, (1,), _COLD, cache="cold"),
        ),
        rounds=3,
        runs=15,
        seconds=1.5,
        minutes=14.0,
    )


def kinds() -> Plan:
    """Weights of other kinds than float32 matrices."""
    # Optimizing makes new weights beside what is installed, which plain onnxruntime's peak shows: as float32, up to 2.4
    # times as much, and in the order that Conv reads, the old and the new at once.
    in_float32 = replace(INSTALL, budget=Limit(weights=4, mib=16))
    in_order = replace(INSTALL, budget=Limit(weights=3, group=2, mib=16))
    ways = (PLAIN, UNPACKED, FILE, CPU, INSTALL, budget(50), PACKED, packed(50), *FLOORS)
    return Plan(
        cases=(
            *cases(Model("int8", (24, 2048)), (1, 64), ways),
            # Computed in float32, which a budget has to hold; see docs/budget.md.
            *cases(
                Model("float16", (24, 2048)), (1, 64), (PLAIN, UNPACKED, FILE, CPU, in_float32, PACKED, packed(150))
            ),
            *cases(
                Model("convolutional", (24, 512)),
                (1, 4),
                tuple({"budget 50 %": budget(50, exact=False), INSTALL.name: in_order}.get(w.name, w) for w in ways),
            ),
            *cases(Model("lstm", (8, 1024)), (1, 16), ways),
        ),
        rounds=3,
        runs=15,
        seconds=1.5,
    )


def full() -> Plan:
    """Everything, as long as it takes: some hours, 30 GB of disk, 12 GB of memory."""
    number = [Model("chain", (count, 256)) for count in (10, 50, 200, 1000, 5000)]
    amount = [Model("chain", (count, 2048)) for count in (6, 16, 64, 256)]
    ways = _all_ways(25, 50, 110)
    # The few weights of the small ones leave no room for a budget beside a session's own memory.
    few = (PLAIN, UNPACKED, FILE, CPU, PACKED, *FLOORS)
    return Plan(
        cases=(
            *normal().cases,
            *kinds().cases,
            *(c for m in number for c in cases(m, (1,), ways if m.dimensions[0] >= 1000 else few)),
            *(c for m in amount for c in cases(m, (1,), ways if m.dimensions[0] > 6 else few)),
            *cases(Model("chain", (256, 2048)), (0,), LOADERS),
        ),
        rounds=5,
        runs=15,
        seconds=5.0,
    )


PLANS = {"quick": quick, "normal": normal, "kinds": kinds, "full": full}
"""Plans by name."""
