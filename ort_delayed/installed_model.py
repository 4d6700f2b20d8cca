"""``InstalledModel``: a model whose weights stand in session options, and making a session of it within the budget."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnxruntime

from ort_delayed.load_watch import load_cancelled_beyond_budget
from ort_delayed.loader.probe import PeakRamProbe, PeakRamReport, RssSampler
from ort_delayed.session import InferenceSession

__all__ = ["InstallReport", "InstalledModel"]


@dataclass(frozen=True)
class InstallReport:
    """What an installation did.

    Attributes:
        source: the model, or the weight source where one was given; None for a model given as bytes.
        groups_loaded: layer groups that were copied.
        tensors_loaded: initializers that got a value that the session uses in place.
        tensors_inlined: small initializers that went into the model, because ONNX Runtime reads them while loading.
        bytes_copied: bytes of the values; tied weights, on the same bytes of a file, count once.
        prepacking_disabled: whether the options tell ONNX Runtime not to prepack weights, which would double the
            memory of those that it prepacks. That is set unless the caller had set the entry.
        peak_ram: resident memory of the installation.
        peak_ram_with_session: the same, and of making the last session with ``create_session``; None before that.
    """

    source: Path | None
    groups_loaded: int
    tensors_loaded: int
    tensors_inlined: int
    bytes_copied: int
    prepacking_disabled: bool
    peak_ram: PeakRamReport
    peak_ram_with_session: PeakRamReport | None = None


class InstalledModel:
    """A model whose weights stand in session options. Made by :func:`stream_install`.

    Attributes:
        model: the model's bytes, for :class:`ort_delayed.InferenceSession` or plain ``onnxruntime.InferenceSession``,
            with ``sess_options`` and no others.
        sess_options: the options that hold the weights; they belong to this model.
        report: what the installation did.
    """

    def __init__(
        self,
        model: bytes,
        sess_options: onnxruntime.SessionOptions,
        report: InstallReport,
        *,
        resident_bytes: int,
        rss_sampler: RssSampler | None,
    ) -> None:
        self.model = model
        self.sess_options = sess_options
        self.report = report
        self._resident_bytes = resident_bytes
        self._rss_sampler = rss_sampler
        self._lock = threading.Lock()

    def create_session(self, **kwargs: Any) -> InferenceSession:
        """Make a session, and keep to the budget while ONNX Runtime builds it.

        What the installation left resident counts, and what ONNX Runtime adds: its optimizers may replace weights by
        new ones. Beyond the budget the load is cancelled; the options can be used again.

        Args:
            **kwargs: further arguments of :class:`ort_delayed.InferenceSession`. ``enable_fallback`` is 0 unless
                given: a cancelled load is not to be tried again with other providers.

        Raises:
            RamBudgetExceeded: building took the process beyond the budget; no session remains.
            RamProbeUnavailable: resident memory cannot be measured any more.
            ShardFormatError: a weight file has changed since the installation.
        """
        kwargs.setdefault("enable_fallback", 0)
        budget = self.report.peak_ram.budget_bytes
        probe = PeakRamProbe(budget, rss_sampler=self._rss_sampler)
        with self._lock:
            try:
                probe.start(charged_bytes=self._resident_bytes)
                with load_cancelled_beyond_budget(self.sess_options, probe, "building a session"):
                    session = InferenceSession(self.model, self.sess_options, **kwargs)
            finally:
                probe.abandon()
            self.report = replace(self.report, peak_ram_with_session=probe.report)
        return session
