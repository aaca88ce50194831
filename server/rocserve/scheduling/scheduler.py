"""What every scheduler of a model with workers can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rocserve.core.errors import ServeError
from rocserve.core.requests import InferRequest
from rocserve.core.serving import Responder
from rocserve.core.validation import RequestPlan
from rocserve.workers.channel import Channel


class Scheduler(Protocol):
    """Callable from any thread."""

    @property
    def waiting(self) -> int:
        """How many requests wait to be run."""

    def submit(self, request: InferRequest, plan: RequestPlan, responder: Responder) -> None:
        """Take a validated request.

        Raises:
            VersionEnding: the version is being unloaded.
            ServeError: the request cannot be taken, e.g. the queue is full or the model has no worker.
        """

    def attach(self, channel: Channel) -> None:
        """An instance is ready to run batches."""

    def detach(self, channel: Channel) -> None:
        """An instance's worker has ended."""

    def stop_sending_ahead(self) -> None:
        """The model calls other models, so nothing may wait in its workers behind what runs."""

    def fail_queue(self, outage: ServeError) -> None:
        """No instance is left and none comes back soon: answer what waits, and what comes, with the reason."""

    def close(self, drained: Callable[[], None]) -> None:
        """Take no more requests; call back, once and from any thread, when all that were taken are answered."""
