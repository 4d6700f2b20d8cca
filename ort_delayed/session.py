"""``InferenceSession``: onnxruntime's, for models whose weights are delayed; ``prepare_model`` for plain sessions."""

from __future__ import annotations

import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import onnxruntime

from ort_delayed.bound_options import bound_model, refuse_bound
from ort_delayed.budget_keeper import BudgetKeeper
from ort_delayed.install_errors import InstallError
from ort_delayed.kernel_nodes import GUARD_MARK
from ort_delayed.library import check_options, register_custom_ops
from ort_delayed.loader import platform
from ort_delayed.loader.budget import RamBudget
from ort_delayed.memory_plan import MemoryPlan
from ort_delayed.memory_report import MemoryReport
from ort_delayed.model_source import external_directory, leave_external_directory, prepare_source
from ort_delayed.ops.errors import DelayedInitializerError
from ort_delayed.ops.kernel import Binding
from ort_delayed.ops.run_files import files_stay_open
from ort_delayed.packed_mappings import PackedMappings, check_mappable
from ort_delayed.packed_source import optimized_already
from ort_delayed.run_threads import RunThreads

__all__ = ["InferenceSession", "prepare_model"]

_WORTH_RELEASING = 16 << 20  # bytes of a model, inline weights included
_FAILED_SHAPE = re.compile(r"[Ii]nput shape:\s*\{([0-9,]+)\}")


class InferenceSession(onnxruntime.InferenceSession):  # type: ignore[misc]  # onnxruntime has no type information
    """An ``onnxruntime.InferenceSession`` that also runs models with ``ai.rt::DelayedInitializer`` nodes.

    Every method works as onnxruntime documents it. A model without delayed nodes goes to ONNX Runtime untouched.

    Args:
        path_or_bytes: file name or serialized model, as for onnxruntime.
        sess_options: session options, as for onnxruntime. They gain one registration of the custom-op library.
        providers: execution providers, as for onnxruntime. Delayed initializers are yielded on the CPU.
        provider_options: as for onnxruntime.
        weights_dir: confines the model: no payload outside this directory, links resolved, is opened. For a model
            given as bytes it is also what relative filenames are relative to (otherwise the working directory).
        ram_budget: most bytes of resident memory, above what the process has when construction begins, that the
            session may take for its construction and its runs, weights and activations included (docs/budget.md).
            None: no budget. On the CPU, and on Linux, only.
        drop_page_cache: with a budget, whether weights that are given up are dropped from the system's page cache
            too. None: where the process has less memory available than the weights take.
        **kwargs: as for onnxruntime.

    Raises:
        DelayedInitializerError: a delayed node is not what the specification allows, or its ``cpu`` payload cannot be
            read. The error is the natural built-in too (ValueError, FileNotFoundError, EOFError, ...). A run raises it
            where a ``file`` payload cannot be read; the session stays usable.
        RamBudgetExceeded: the budget cannot be kept. A run raises it too; the session stays usable.
        RamProbeUnavailable: memory cannot be measured, or weights cannot be given up, so no budget can be kept.
        MappedFileChanged: from a run under a budget: a file of weights is not what it was.
        ModelNotSuitedError: the model cannot run under the budget as it is; the message says what to do.
    """

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: onnxruntime.SessionOptions | None = None,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        weights_dir: str | os.PathLike[str] | None = None,
        ram_budget: RamBudget | int | None = None,
        drop_page_cache: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if sess_options is not None:
            check_options(sess_options)
        self._budget: BudgetKeeper | None = None
        if ram_budget is not None:
            self._budget = BudgetKeeper(
                ram_budget, drop_page_cache=drop_page_cache, options_are_private=sess_options is None
            )
            # Before ONNX Runtime's session goes: nothing may be given up in mappings that are gone.
            weakref.finalize(self, self._budget.close).atexit = False
        self._options_are_private = sess_options is None
        self._source = path_or_bytes
        self._weights_dir = None if weights_dir is None else os.path.abspath(weights_dir)
        self._binding: Binding | None = None
        self._packed_mappings = PackedMappings()
        weakref.finalize(self, self._packed_mappings.close).atexit = False
        self._threads = RunThreads()
        # Not at exit: there runs are waited for first (run_threads), and the process takes the rest with it.
        weakref.finalize(self, self._threads.close).atexit = False
        options = onnxruntime.SessionOptions() if sess_options is None else sess_options
        try:
            with self._bound(options) as model:
                if self._budget is not None:
                    kwargs = self._budget.session_arguments(providers, kwargs)
                super().__init__(model, options, providers, provider_options, **kwargs)
                self._forget_bytes()
        except BaseException:
            # Whoever holds the error holds this session, which must not count as one beside others.
            if self._budget is not None:
                self._budget.close()
            raise
        if self._binding is not None and not isinstance(path_or_bytes, bytes):
            self._source = os.path.abspath(path_or_bytes)  # set_providers reads it again, from wherever that is called

    def set_providers(
        self,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
    ) -> None:
        """Register execution providers; the underlying session is made again, from the model's source."""
        with self._bound(self._sess_options_initial) as model:
            if self._binding is not None:
                self._model_path, self._model_bytes = None, model
            super().set_providers(providers, provider_options)
            self._forget_bytes()

    def _create_inference_session(self, providers: Any, provider_options: Any, disabled_optimizers: Any = None) -> None:
        # onnxruntime's set_providers does not hand on what its constructor was given.
        if disabled_optimizers is None and self._budget is not None:
            disabled_optimizers = self._budget.session_arguments(None, {}).get("disabled_optimizers")
        super()._create_inference_session(providers, provider_options, disabled_optimizers)

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """What stays in memory and what streams, printable; None without a budget."""
        return None if self._budget is None or self._binding is None else self._budget.plan

    @property
    def memory_report(self) -> MemoryReport | None:
        """What memory the session has taken so far; None without a budget."""
        return None if self._budget is None else self._budget.report

    @property
    def memory_position(self) -> int | None:
        """Which group of the plan a run has come to, for whoever watches; None without a budget or a run."""
        return None if self._budget is None else self._budget.position

    def run(self, output_names: Any, input_feed: Any, run_options: onnxruntime.RunOptions | None = None) -> Any:
        """Compute the predictions, as ``onnxruntime.InferenceSession.run``."""
        return self._carry(super().run, lambda options: (output_names, input_feed, options), run_options)

    def run_with_ort_values(
        self, output_names: Any, input_dict_ort_values: Any, run_options: onnxruntime.RunOptions | None = None
    ) -> Any:
        """Compute the predictions, as ``onnxruntime.InferenceSession.run_with_ort_values``."""
        return self._carry(
            super().run_with_ort_values, lambda options: (output_names, input_dict_ort_values, options), run_options
        )

    def run_with_iobinding(self, iobinding: Any, run_options: onnxruntime.RunOptions | None = None) -> None:
        """Compute the predictions, as ``onnxruntime.InferenceSession.run_with_iobinding``."""
        self._carry(super().run_with_iobinding, lambda options: (iobinding, options), run_options)

    def run_with_ortvaluevector(
        self, run_options: Any, feed_names: Any, feeds: Any, fetch_names: Any, fetches: Any, fetch_devices: Any
    ) -> None:
        """Compute the predictions, as ``onnxruntime.InferenceSession.run_with_ortvaluevector``."""
        self._carry(
            super().run_with_ortvaluevector,
            lambda options: (options, feed_names, feeds, fetch_names, fetches, fetch_devices),
            run_options,
        )

    def run_async(
        self, output_names: Any, input_feed: Any, callback: Any, user_data: Any, run_options: Any = None
    ) -> None:
        """Compute the predictions on another thread, as ``onnxruntime.InferenceSession.run_async``.

        Where a ``file`` payload cannot be read, the message that ``callback`` gets is that of the typed error. The
        thread is one of ours, not of ONNX Runtime's pool, so this works with a pool of one thread too, the run may
        outlive the last reference to the session, and the interpreter waits for it before it ends.
        """
        if self._binding is None:
            super().run_async(output_names, input_feed, callback, user_data, run_options)
            return
        self._validate_input(list(input_feed))
        method, feed, binding = super().run, dict(input_feed), self._binding
        own = self._own_run_options() if run_options is None else None

        def run() -> None:
            message, results = "", []
            try:
                with self._under_budget(own), files_stay_open():
                    results = method(output_names, feed, run_options if own is None else own)
            except Exception as failed:
                message = str(self._typed_error(str(failed)) or failed)
            binding.trim()
            try:
                callback(results, user_data, message)
            except BaseException:
                # Nobody waits who could get it; it is reported as of any thread.
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

        self._threads.start(run, lambda at_exit: _terminate(own or (run_options if at_exit else None)))

    def _carry(
        self,
        method: Callable[..., Any],
        arguments: Callable[[onnxruntime.RunOptions], tuple[Any, ...]],
        run_options: onnxruntime.RunOptions | None,
    ) -> Any:
        """Call a run method on a thread of ours, and raise what a failing op had to say."""
        if self._binding is None:
            return method(*arguments(run_options))
        own = self._own_run_options() if run_options is None else None
        given = arguments(run_options if own is None else own)

        def call() -> Any:
            with files_stay_open():
                return method(*given)

        try:
            with self._under_budget(own):
                return self._threads.call(call, lambda at_exit: _terminate(own or (run_options if at_exit else None)))
        except Exception as failed:
            error = self._typed_error(str(failed))
            if error is None:
                raise
            # Its cause is what the operating system said; onnxruntime's exception stays its context, without the
            # frames of our thread, which would keep session and feeds alive as long as the error.
            failed.__traceback__ = None
            try:
                raise error
            finally:
                del error  # it refers to this frame
        finally:
            self._binding.trim()

    def _own_run_options(self) -> onnxruntime.RunOptions:
        options = onnxruntime.RunOptions()
        if self._budget is not None:
            self._budget.configure_run(options)
        return options

    def _under_budget(self, own: onnxruntime.RunOptions | None) -> AbstractContextManager[None]:
        return nullcontext() if self._budget is None else self._budget.running(lambda: _terminate(own))

    def _typed_error(self, message: str) -> DelayedInitializerError | None:
        """The error behind ONNX Runtime's message about a failed run; None where it is not about a guard."""
        if GUARD_MARK not in message or self._binding is None:
            return None
        for found in _FAILED_SHAPE.finditer(message):
            dims = [int(d) for d in found.group(1).split(",")]
            error = self._binding.take_error(dims[0] or dims[1])
            if error is not None:
                return error
        return DelayedInitializerError(f"a delayed initializer could not be read: {message}")

    @contextmanager
    def _bound(self, options: onnxruntime.SessionOptions) -> Iterator[Any]:
        """Prepare the model; while ONNX Runtime builds the session, the options name the external data's directory."""
        installed = bound_model(options)
        if installed is not None:
            # Prepared already, its weights in the options, to which its payloads belong as well.
            model = installed.check(self._source)
            if self._weights_dir is not None or self._budget is not None:
                raise InstallError(
                    "weights have been installed in these session options, and stay resident: neither weights_dir nor "
                    "ram_budget can apply to them any more; InstalledModel.create_session keeps to their budget"
                )
            self._binding = installed.binding
            yield model
            installed.check_files()
            return
        binding, previous = Binding(), self._binding
        try:
            budgeted: AbstractContextManager[None] = nullcontext()
            mapped: AbstractContextManager[None] = nullcontext()
            if self._budget is None:
                model, directory, packed = prepare_source(self._source, options, binding, self._weights_dir)
                if packed is not None:
                    budgeted, mapped = optimized_already(options), self._packed_mappings.appearing(packed)
            else:
                model, directory = self._budget.prepare(self._source, options, binding, self._weights_dir)
                budgeted = self._budget.constructing(options)
            register_custom_ops(options)
            with external_directory(options, directory, are_private=self._options_are_private), budgeted, mapped:
                self._binding = None if model is self._source else binding
                yield model
        except BaseException:
            binding.close()
            self._binding = previous
            raise
        if previous is not None:
            previous.close()
        weakref.finalize(self, binding.close).atexit = False

    def _forget_bytes(self) -> None:
        # onnxruntime's session object keeps the bytes for life; set_providers prepares the model again.
        if self._binding is not None:
            size, self._model_bytes = len(self._model_bytes or b""), None
            if size >= _WORTH_RELEASING:
                platform.release_free_memory()


def _terminate(options: onnxruntime.RunOptions | None) -> None:
    # Options that the caller gave may serve other runs too: before the interpreter ends they are left alone, and the
    # one run is waited for.
    if options is not None:
        options.terminate = True


def prepare_model(
    model: str | bytes | os.PathLike[str],
    sess_options: onnxruntime.SessionOptions,
    *,
    weights_dir: str | os.PathLike[str] | None = None,
) -> bytes | str:
    """What to hand to a plain ``onnxruntime.InferenceSession`` made with ``sess_options``.

    For frameworks that make their sessions themselves. The options are bound to this model: they keep its payloads
    alive, and where it has external data they name that data's directory, so use them for no other model. In a plain
    session a failing read ends the run with onnxruntime's exception, which names node, file, offset and bytes needed;
    the typed error is logged (logger ``ort_delayed``). A plain session runs Python ops on the caller's thread, where
    Ctrl-C, an alarm whose handler raises, or the recursion limit can abort the process while a weight is being read;
    only :class:`InferenceSession` can prevent that.

    Args:
        model: file name or serialized model.
        sess_options: get the custom-op library registered, and are bound to this model.
        weights_dir: as for :class:`InferenceSession`.

    Returns:
        The prepared model's bytes; for a model without delayed nodes what was given, a path as ``str``.

    Raises:
        DelayedInitializerError: as for constructing an :class:`InferenceSession`.
        OptionsInUseError: weights of another model have been installed in the options.
    """
    check_options(sess_options)
    refuse_bound(sess_options)
    binding = Binding(log_failures=True)
    try:
        prepared, directory, packed = prepare_source(model, sess_options, binding, weights_dir)
        check_mappable(packed or ())
        register_custom_ops(sess_options)
        if directory is not None:
            leave_external_directory(sess_options, directory)
    except BaseException:
        binding.close()
        raise
    weakref.finalize(sess_options, binding.close).atexit = False
    return prepared if isinstance(prepared, bytes) else os.fspath(prepared)
