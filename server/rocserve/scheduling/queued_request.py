"""A request on its way through a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rocserve.core.requests import InferRequest
from rocserve.core.serving import Responder
from rocserve.core.trace import QUEUE_START
from rocserve.core.validation import RequestPlan


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """Not frozen because the queue marks it on the hot path; the scheduler's lock guards the marks."""

    request: InferRequest
    plan: RequestPlan
    responder: Responder
    queue_start_ns: int
    """time.monotonic_ns() when the scheduler took it."""
    expires_at: float | None = None
    """time.monotonic() seconds after which it must not run any more; None = never."""
    level: int = 0
    """Its priority level; 0 where the model has no levels, else 1 is the highest."""
    nbytes: int = 0
    """The size of its inputs."""
    dated: bool = False
    """Its client has said how long it waits, and it may be overtaken by newer ones."""
    waiting: bool = False
    """It stands in the queue."""
    watched: bool = False
    """Its responder has been asked to say when the client leaves."""
    on_again: Callable[[QueuedRequest], None] | None = None
    """Takes it when the model wants it once more; None = it may not."""

    def note_unrun(self) -> None:
        """In the request's trace: it has waited, and no more."""
        trace = self.request.trace
        if trace is not None:
            trace.note(QUEUE_START, self.queue_start_ns)
