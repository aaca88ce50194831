"""One request to a member of an ensemble, and what leads its answers back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rocserve.core.errors import ServeError, internal, unimplemented
from rocserve.core.model_config import EnsembleStep
from rocserve.core.requests import InferRequest, InferResponse
from rocserve.scheduling.batch import send_copied

if TYPE_CHECKING:
    from rocserve.scheduling.ensemble.run import EnsembleRun


class StepRequest:
    """One request to a member, and what leads its answers back into the run."""

    __slots__ = ("_run", "index", "is_decoupled", "iteration", "last_read_bytes", "request", "sequence", "step")

    def __init__(
        self,
        run: EnsembleRun,
        index: int,
        step: EnsembleStep,
        iteration: int,
        request: InferRequest,
        last_read_bytes: int,
    ) -> None:
        self._run = run
        self.index = index
        self.step = step
        self.iteration = iteration
        self.request = request
        """Until it is sent: from then on it knows this."""
        self.sequence = request.sequence
        self.last_read_bytes = last_read_bytes
        """Noted for the tensors that it alone has now: nobody needs them once it is answered."""
        self.is_decoupled = False

    def begin(self) -> None:
        """Its turn has come, under the limit of its step."""
        if self._run.is_over:
            self._leave()
            return
        self._run.dispatch(self)

    def expect_many(self) -> None:
        if not self._run.may_be_decoupled:
            raise unimplemented(
                f"model '{self.step.model_name}' is decoupled, and was not when the ensemble was loaded; try again"
            )
        self.is_decoupled = True

    def send(self, response: InferResponse, final: bool = True) -> None:
        if response.is_large and response.slot is not None:
            self._run.work_off(send_copied(response, final, self))
            return
        if final:
            self._leave()
        self._run.step_sent(self, response, final)

    def end(self) -> None:
        self._leave()
        if self.is_decoupled:
            self._run.step_ended()
        else:
            self._run.step_failed(internal(f"model '{self.step.model_name}' sent no response"))

    def fail(self, error: ServeError, final: bool = True) -> None:
        if final:
            self._leave()
        self._run.step_failed(error)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        self._run.watch_cancellation(callback)

    def _leave(self) -> None:
        """The next one may have its turn."""
        limits = self._run.limits
        if limits:
            limits[self.index].end()
