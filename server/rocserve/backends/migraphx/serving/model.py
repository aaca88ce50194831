"""A model on MIGraphX, as its worker serves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rocserve.backends.base import Batch, BatchResult
from rocserve.backends.migraphx.binding.interface import MigraphxError
from rocserve.backends.migraphx.serving.background import BackgroundSizes
from rocserve.backends.migraphx.serving.compile_context import CompileContext
from rocserve.backends.migraphx.serving.programs import ProgramRunner
from rocserve.core.errors import internal
from rocserve.core.requests import Signature


class MigraphxModel:
    """Programs that serve one version of a model on one device. For one thread; see LoadedModel."""

    def __init__(
        self,
        context: CompileContext,
        signature: Signature,
        runner: ProgramRunner,
        note: str = "",
        background: BackgroundSizes | None = None,
    ) -> None:
        """`note`: for the model's metadata."""
        self._context = context
        self._signature = signature
        self._outputs = tuple(spec.name for spec in signature.outputs)
        self._runner = runner
        self._note = note
        self._background = background
        self._last_facts: Mapping[str, str] = {}

    @property
    def signature(self) -> Signature:
        return self._signature

    @property
    def properties(self) -> Mapping[str, str]:
        """Facts about the engine, as they are now. From any thread, also of a model that is closed."""
        return self._last_facts or self._context.properties(self._runner.batch_sizes, self._note)

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
        """
        Raises:
            ServeError: INVALID_ARGUMENT where the inputs are not of a shape that is served, INTERNAL in MIGraphX's own
                words where it cannot run them.
        """
        try:
            return BatchResult(self._runner.run(batch.arrays, batch.requested_outputs or self._outputs, batch.room))
        except MigraphxError as error:
            raise internal(f"migraphx error: {error}") from None

    def close(self) -> None:
        """Free the programs and their buffers."""
        if self._background is not None:
            self._background.stop()
        # Who tells of the programs, or adds to them, holds them.
        self._last_facts = self.properties
        self._background = None
        del self._runner
