"""A model on MIGraphX, as its worker serves it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from rocserve.backends.base import Batch, BatchResult
from rocserve.backends.migraphx.binding.interface import MigraphxError
from rocserve.backends.migraphx.serving.background import BackgroundSizes
from rocserve.backends.migraphx.serving.programs import ProgramRunner
from rocserve.core.errors import internal
from rocserve.core.requests import Signature


class MigraphxModel:
    """Programs that serve one version of a model on one device. For one thread; see LoadedModel."""

    def __init__(
        self,
        name: str,
        signature: Signature,
        runner: ProgramRunner,
        properties: Callable[[], Mapping[str, str]],
        run_lock: threading.Lock,
        log: logging.Logger,
        background: BackgroundSizes | None = None,
    ) -> None:
        """
        Args:
            properties: of the engine, for the model's metadata.
            run_lock: held while a batch runs, by whoever must not run beside one as well.
        """
        self._name = name
        self._signature = signature
        self._outputs = tuple(spec.name for spec in signature.outputs)
        self._runner = runner
        self._properties = properties
        self._run_lock = run_lock
        self._background = background
        self._log = log

    @property
    def signature(self) -> Signature:
        return self._signature

    @property
    def properties(self) -> Mapping[str, str]:
        """Facts about the engine, as they are now."""
        return self._properties()

    def warm_up(self, samples: Sequence[Batch]) -> None:
        """Run every program on zeros, then the samples; then the remaining batch sizes are got ready.

        A model that cannot take zeros is no fault.
        """
        try:
            self._runner.warm_up()
        except MigraphxError as error:
            self._log.info("model '%s' could not be warmed up with zeros: %s", self._name, error)
        for sample in samples:
            self.execute(sample)
        if self._background is not None:
            self._background.start()

    def execute(self, batch: Batch) -> BatchResult:
        """
        Raises:
            ServeError: INVALID_ARGUMENT where the inputs are not of a shape that is served, INTERNAL in MIGraphX's own
                words where it cannot run them.
        """
        try:
            with self._run_lock:
                return BatchResult(self._runner.run(batch.arrays, batch.requested_outputs or self._outputs, batch.room))
        except MigraphxError as error:
            raise internal(f"migraphx error: {error}") from None

    def close(self) -> None:
        """Free the programs and their buffers."""
        if self._background is not None:
            self._background.stop()
        # Whoever tells of the programs, or adds to them, holds them.
        facts = self._properties()
        self._properties = lambda: facts
        self._background = None
        del self._runner
