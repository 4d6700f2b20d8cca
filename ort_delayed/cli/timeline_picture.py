"""A timeline as a picture: anonymous and file-backed memory stacked, the budget as a line, layers above."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from ort_delayed.cli.timeline import Timeline

__all__ = ["layer_spans", "picture"]

_MIB = 1 << 20
_ANONYMOUS, _FILES, _BUDGET, _SHADE = "#4c72b0", "#dd8452", "#c44e52", "#00000018"
_LEAST_LABEL = 0.018  # of the picture's width: narrower spans get no label


def picture(timeline: Timeline, title: str, kind: str) -> bytes:
    """The picture as ``"png"`` or ``"svg"``: all of it, and beside that the last run with its layers."""
    last = _last_run(timeline)
    figure = Figure(figsize=(13 if last else 9, 5), dpi=130, layout="constrained")
    panels: Any = figure.subplots(1, 2 if last else 1, sharey=True, squeeze=False, width_ratios=[3, 4] if last else [1])
    top = _top(timeline)
    for axes, span in zip(panels[0], (None, last), strict=False):
        _draw(axes, timeline, top)
        start, end = span or (timeline.seconds[0], timeline.seconds[-1])
        axes.set_xlim(start, max(end, start + 1e-6))
        axes.set_ylim(0, top * 1.30)
        axes.set_xlabel("seconds" if span is None else "seconds, the last run")
    _mark_phases(panels[0][0], timeline, top)
    if last is not None:
        _mark_layers(panels[0][1], timeline, top, last)
    panels[0][0].set_ylabel("resident memory, MiB")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format=kind)
    return out.getvalue()


def _draw(axes: Any, timeline: Timeline, top: float) -> None:
    base = timeline.baseline_bytes
    axes.stackplot(
        timeline.seconds,
        [n / _MIB for n in timeline.anonymous_bytes],
        [n / _MIB for n in timeline.file_bytes],
        labels=("anonymous (activations, copies, Python)", "file-backed (mapped weights, code)"),
        colors=(_ANONYMOUS, _FILES),
        linewidth=0,
    )
    axes.axhline(base / _MIB, color="black", linewidth=0.8, linestyle=":", label=f"baseline, {base / _MIB:.0f} MiB")
    if timeline.budget_bytes is not None:
        text = f"budget, {timeline.budget_bytes / _MIB:.0f} MiB above the baseline"
        limit = (base + timeline.budget_bytes) / _MIB
        axes.axhline(limit, color=_BUDGET, linewidth=1.2, linestyle="--", label=text)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _top(timeline: Timeline) -> float:
    highest = max(a + f for a, f in zip(timeline.anonymous_bytes, timeline.file_bytes, strict=True))
    return max(highest, timeline.baseline_bytes + (timeline.budget_bytes or 0)) / _MIB


def _last_run(timeline: Timeline) -> tuple[float, float] | None:
    """When the last run was, where its layers are known."""
    runs = [(start, end) for name, start, end in timeline.phases if name.startswith("run")]
    return runs[-1] if runs and timeline.labels and any(g >= 0 for g in timeline.groups) else None


def layer_spans(timeline: Timeline) -> Iterator[tuple[str, float, float]]:
    """``(layer, start, end)`` of each stretch of samples in one layer."""
    label, start = "", 0.0
    for i, now in enumerate(timeline.seconds):
        current = timeline.label(i)
        if current != label:
            if label:
                yield label, start, now
            label, start = current, now
    if label:
        yield label, start, timeline.seconds[-1]


def _mark_phases(axes: Any, timeline: Timeline, top: float) -> None:
    width = timeline.seconds[-1] - timeline.seconds[0]
    for name, start, end in timeline.phases:
        axes.axvline(start, color="black", linewidth=0.5, alpha=0.5)
        if end - start > _LEAST_LABEL * width:
            axes.text((start + end) / 2, top * 1.03, name, fontsize=7, rotation=90, ha="center", va="bottom")


def _mark_layers(axes: Any, timeline: Timeline, top: float, run: tuple[float, float]) -> None:
    spans = [(label, max(a, run[0]), min(b, run[1])) for label, a, b in layer_spans(timeline) if b > run[0] < run[1]]
    for number, (label, start, end) in enumerate(spans):
        if number % 2:
            axes.axvspan(start, end, color=_SHADE, linewidth=0)
        if end - start > _LEAST_LABEL * (run[1] - run[0]):
            axes.text((start + end) / 2, top * 1.03, label, fontsize=7, rotation=90, ha="center", va="bottom")
