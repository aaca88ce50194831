"""A model on MIGraphX, as its worker serves it."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from rocserve.backends.base import Batch, BatchResult
from rocserve.backends.migraphx.binding.interface import MigraphxError
from rocserve.backends.migraphx.serving.compile_context import CompileContext
from rocserve.backends.migraphx.serving.programs import ProgramRunner
from rocserve.core.errors import ServeError, internal
from rocserve.core.requests import Signature


class MigraphxModel:
    """Programs that serve one version of a model on one device. For one thread; see LoadedModel."""

    def __init__(
        self,
        context: CompileContext,
        signature: Signature,
        runner: ProgramRunner,
        facts: Mapping[str, str] = MappingProxyType({}),
        background: BackgroundSizes | None = None,
    ) -> None:
        """`facts`: of its program, for the metadata."""
        self._context = context
        self._signature = signature
        self._outputs = tuple(spec.name for spec in signature.outputs)
        self._runner = runner
        self._facts = facts
        self._background = background
        self._last_facts: Mapping[str, str] = {}

    @property
    def signature(self) -> Signature:
        return self._signature

    @property
    def properties(self) -> Mapping[str, str]:
        """Facts about the engine, as they are now. From any thread, also of a model that is closed."""
        return self._last_facts or self._context.properties(self._runner.batch_sizes, self._facts)

    def warm_up(self, samples: Sequence[Batch]) -> None:
        """Run every program on zeros, then the samples; then the remaining batch sizes are got ready.

        A model that cannot take zeros is no fault.
        """
        try:
            self._runner.warm_up()
        except MigraphxError as error:
            name = self._context.model.name
            self._context.log.info("model '%s' could not be warmed up with zeros: %s", name, error)
        for sample in samples:
            self.execute(sample)
        if self._background is not None:
            self._background.start()

    def execute(self, batch: Batch) -> BatchResult:
        """Raises: ServeError: INVALID_ARGUMENT where the inputs are not of a shape that is served, INTERNAL in
        MIGraphX's own words where it cannot run them."""
        try:
            return BatchResult(self._runner.run(batch.arrays, batch.requested_outputs or self._outputs, batch.room))
        except MigraphxError as error:
            raise internal(f"migraphx error: {error}") from None

    def wait(self) -> None:
        """Until all batch sizes are in service or have failed, once it is warmed up."""
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """Free the programs and their buffers."""
        if self._background is not None:
            self._background.stop()
        # The properties and the background thread refer to the programs.
        self._last_facts = self.properties
        self._background = None
        del self._runner


THREAD_NAME = "batch sizes"


class BackgroundSizes:
    """Has one batch size after the other compiled and put into service; one that fails leaves the others be.

    It has its own thread, because a compile takes minutes while the worker's main thread listens to the server and
    the other one answers batches.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        prepare: Callable[[int, Callable[[str], None]], None],
        cancel: Callable[[], None],
        report: Callable[[str], None],
        log: logging.Logger,
    ) -> None:
        """
        Args:
            prepare: compiles a size, loads it and puts it into service; reports its progress by its second argument.
            cancel: ends a `prepare` that is under way, with whatever exception, and those to come. From any thread.
            report: gives the server the state, as text; "" = done.
        """
        self._sizes = sizes
        self._prepare = prepare
        self._cancel = cancel
        self._report = report
        self._log = log
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        if self._sizes:
            self._thread.start()

    def stop(self) -> None:
        """Call it off; returns when the thread has ended."""
        self._stopping.set()
        self._cancel()
        self.wait()

    def wait(self) -> None:
        """Until all sizes are in service or have failed."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        failures: dict[int, str] = {}
        for index, size in enumerate(self._sizes):
            if self._stopping.is_set():
                return
            report = functools.partial(self._report_missing, self._sizes[index:])
            report("")
            try:
                self._prepare(size, report)
            except Exception as error:
                # Anything: the sizes that are there go on serving.
                if self._stopping.is_set():
                    return
                if isinstance(error, ServeError):
                    failures[size] = error.text
                    self._log.warning("batch size %d is not in service: %s", size, error.text)
                else:
                    failures[size] = str(error) or type(error).__name__
                    self._log.error("batch size %d is not in service", size, exc_info=error)
        if not self._stopping.is_set():
            self._report(_without(failures))

    def _report_missing(self, sizes: Sequence[int], text: str) -> None:
        missing = f"serving; batch sizes still to come: {', '.join(map(str, sizes))}"
        self._report(f"{missing}; {text}" if text else missing)


def _without(failures: Mapping[int, str]) -> str:
    """All sizes that failed before the first reason, since readers cut long texts."""
    if len(failures) == 1:
        ((size, reason),) = failures.items()
        return f"serving without batch size {size}: {reason}"
    reasons = "; ".join(f"batch size {size}: {reason}" for size, reason in failures.items())
    return f"serving without batch sizes {', '.join(map(str, failures))}: {reasons}" if failures else ""
