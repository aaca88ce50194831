"""From HTTP to whoever runs a request, and back to whoever waits for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rocserve.core.errors import ServeError, StatusCode, deadline_exceeded, internal, unimplemented
from rocserve.core.request_memory import Holding, RequestMemory
from rocserve.core.requests import InferRequest, InferResponse
from rocserve.frontends.http.infer_response import detached
from rocserve.plane.loop import TimerHandle
from rocserve.scheduling.responses import send_copied
from rocserve.services.inference import NOT_FOR_DECOUPLED, Inference
from rocserve.services.observation import ClientResponder, RequestOrigin

BACKLOG_LIMIT_BYTES = 256 << 20
"""Of responses that a client does not fetch."""

Outcome = InferResponse | ServeError


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that has come whole, and is about to be scheduled."""

    origin: Callable[[], RequestOrigin]
    memory: RequestMemory
    holding: Holding
    """Of the request; given back when it has been answered."""
    deadline: float | None = None
    """time.monotonic() seconds, after which the client is told that it has passed, whatever becomes of the request."""


class HttpResponder(ClientResponder):
    """What the responders below have in common: where the request comes from, whether its client is still there, and
    what memory the request and its answers hold. All is called on the plane's thread."""

    def __init__(self, asked: Asked) -> None:
        self._deadline = asked.deadline
        self._memory = asked.memory
        self._request_holding = asked.holding
        self._answer_holding = Holding()
        self._service: Inference | None = None
        """Once the request has been handed over."""
        self._callbacks: list[Callable[[], None]] = []
        self._is_gone = False
        self._is_scheduled = False
        self._origin = asked.origin
        self.is_refused = False
        """Whether it failed before it was scheduled."""

    def hand_over(self, service: Inference, request: InferRequest) -> None:
        """Have the request scheduled. What is raised is the answer: no other follows."""
        self._service = service
        try:
            service.infer(request, self)
        except BaseException:
            self._service = None
            self.close()
            raise
        self._is_scheduled = True

    def origin(self) -> RequestOrigin:
        return self._origin()

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        if self._is_gone:
            self._tell_gone()

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self._is_gone = True
        if self._service is not None:
            self._service.plane.call_soon(self._tell_gone)

    def _is_copied(self, response: InferResponse, final: bool) -> bool:
        """Whether a response is being copied, for clients may read slowly, and will be sent once more."""
        service = self._service
        if service is None or not response.is_large or response.slot is None:
            return False
        service.plane.work_off(send_copied(response, final, self))
        return True

    def _tell_gone(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def close(self) -> None:
        """What answers there are have been sent, or nobody reads them."""
        self._memory.release_answer(self._answer_holding)
        if self._service is None:
            self._memory.release(self._request_holding)

    def _forget(self) -> None:
        """The last answer is there. The callbacks know the request, which knows this: such a ring would keep the
        client's data until the next collection."""
        self._callbacks.clear()
        self._memory.release(self._request_holding)

    def _note_failure(self, error: ServeError) -> None:
        if error.is_refusal or not self._is_scheduled:
            self.is_refused = True


class SingleAnswer(HttpResponder):
    """The responder of a request that has one response, which is handed to a callback."""

    takes_one = True

    def __init__(self, asked: Asked, answer: Callable[[SingleAnswer, Outcome], None]) -> None:
        """`answer`: gets the response, whose tensors are valid until it returns, or the error; not called when the
        client has gone."""
        super().__init__(asked)
        self._answer: Callable[[SingleAnswer, Outcome], None] | None = answer
        self._timer: TimerHandle | None = None

    def hand_over(self, service: Inference, request: InferRequest) -> None:
        """See HttpResponder."""
        if self._deadline is not None:
            self._timer = service.plane.call_at(self._deadline, self._expire)
        super().hand_over(service, request)

    def expect_many(self) -> None:
        raise unimplemented(NOT_FOR_DECOUPLED["HTTP"])

    def send(self, response: InferResponse, final: bool = True) -> None:
        if not self._is_copied(response, final):
            self._forget()
            self._set(response)

    def end(self) -> None:
        self.fail(internal("expected a single response, got 0"))

    def fail(self, error: ServeError, final: bool = True) -> None:
        self._note_failure(error)
        self._forget()
        self._set(error)

    def leave(self) -> None:
        """The client has gone."""
        self.cancel()
        self.close()

    def close(self) -> None:
        self._answer = None
        if self._timer is not None:
            self._timer.cancel()
        super().close()

    def _expire(self) -> None:
        self.cancel()
        self._set(deadline_exceeded())

    def _set(self, outcome: Outcome) -> None:
        answer, self._answer = self._answer, None
        if answer is None:
            return  # The client has gone, or been told that its deadline has passed.
        if self._timer is not None:
            self._timer.cancel()
        answer(self, outcome)

    def hold(self, nbytes: int) -> None:
        """The answer takes so much now, in the form that it has.

        Raises:
            ServeError: RESOURCE_EXHAUSTED, there is no memory for it.
        """
        if self._answer_holding.held_bytes:
            self._memory.release_answer(self._answer_holding)
        self._memory.admit_answer(self._answer_holding, nbytes)


class AnswerStream(HttpResponder):
    """The responder of a request that has any number of responses."""

    takes_one = False

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._queue: asyncio.Queue[Outcome | None] = asyncio.Queue()
        self._backlog_bytes = 0
        self._taken_bytes = 0
        self._is_closed = False
        self.is_overdue = False
        """The deadline has passed, which has been told."""

    async def next(self) -> Outcome | None:
        """The next response or error; None when no further one comes."""
        # The one before has been sent.
        self._memory.release_answer(self._answer_holding, self._taken_bytes)
        self._taken_bytes = 0
        try:
            async with asyncio.timeout_at(self._deadline):
                outcome = await self._queue.get()
        except TimeoutError:
            self.is_overdue = self._is_closed = True
            self._drop_all()
            self._queue.put_nowait(None)
            return deadline_exceeded()
        self._taken_bytes = _size(outcome)
        self._backlog_bytes -= self._taken_bytes
        return outcome

    def close(self) -> None:
        self._is_closed = True
        super().close()

    def expect_many(self) -> None: ...

    def send(self, response: InferResponse, final: bool = True) -> None:
        if self._is_copied(response, final):
            return
        if final:
            self._forget()
        self._put(detached(response), final)

    def end(self) -> None:
        self._forget()
        self._put(None, True)

    def fail(self, error: ServeError, final: bool = True) -> None:
        self._note_failure(error)
        if final:
            self._forget()
        self._put(error, final)

    def _put(self, outcome: Outcome | None, final: bool) -> None:
        if self._is_closed:
            return
        nbytes = _size(outcome)
        try:
            self._memory.admit_answer(self._answer_holding, nbytes)
            self._backlog_bytes += nbytes
            if self._backlog_bytes > BACKLOG_LIMIT_BYTES:
                raise _does_not_read()
        except ServeError as error:
            self._drop_all()
            outcome, final = error, True
        if outcome is not None:
            self._queue.put_nowait(outcome)
        if final:
            self._is_closed = True
            self._queue.put_nowait(None)

    def _drop_all(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()
        self._backlog_bytes = 0
        self._memory.release_answer(self._answer_holding)
        self.cancel()


def _size(outcome: Outcome | None) -> int:
    return sum(map(len, outcome.data)) if isinstance(outcome, InferResponse) else 0


def _does_not_read() -> ServeError:
    return ServeError(
        StatusCode.RESOURCE_EXHAUSTED,
        "the client does not read: too many bytes wait to be sent in answer to this request",
    )
