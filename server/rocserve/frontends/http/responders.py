"""From whatever thread has a request's answer to the task of the event loop that waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rocserve.core.errors import ServeError, StatusCode, internal, unimplemented
from rocserve.core.request_memory import Holding, RequestMemory
from rocserve.core.requests import InferResponse
from rocserve.frontends.http.infer_response import detached
from rocserve.scheduling.refusals import deadline_exceeded
from rocserve.services.observation import RequestOrigin

NOT_FOR_DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
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
    """time.monotonic() seconds, which are the loop's too, after which the client is told that it has passed, whatever
    becomes of the request."""


class HttpResponder:
    """What the responders below have in common: where the request comes from, whether its client is still there, and
    what memory the request and its answers hold. Made on the loop."""

    def __init__(self, asked: Asked) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline = asked.deadline
        self._memory = asked.memory
        self._request_holding = asked.holding
        self._answer_holding = Holding()
        self._callbacks: deque[Callable[[], None]] = deque()
        self._is_gone = False
        self._is_handed_over = False
        self._own_thread = threading.get_ident()
        self.origin = asked.origin
        self.is_refused = False
        """Whether it failed before it was scheduled."""

    def handed_over(self) -> None:
        """What fails from now on was scheduled."""
        self._is_handed_over = True

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        if self._is_gone:
            self.cancel()

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self._is_gone = True
        while True:
            try:
                # Atomic: of two threads that are here one gets it.
                callback = self._callbacks.popleft()
            except IndexError:
                return
            callback()

    def close(self) -> None:
        """On the loop: what answers there are have been sent, or nobody reads them."""
        self._memory.release_answer(self._answer_holding)
        if not self._is_handed_over:
            self._memory.release(self._request_holding)

    def _forget(self) -> None:
        """The last answer is there. The callbacks know the request, which knows this: such a ring would keep the
        client's data until the next collection."""
        self._callbacks.clear()
        self._memory.release(self._request_holding)

    def _note_failure(self) -> None:
        # A model that is quick fails on another thread before the loop's knows that the request was handed over.
        if not self._is_handed_over and threading.get_ident() == self._own_thread:
            self.is_refused = True


class SingleAnswer(HttpResponder):
    """The responder of a request that has one response."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._future: asyncio.Future[Outcome] = self._loop.create_future()

    async def outcome(self) -> Outcome:
        """The response, on memory of its own, or the error."""
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._future
        except TimeoutError:
            self.cancel()
            return deadline_exceeded()
        except asyncio.CancelledError:
            self.cancel()
            raise

    def expect_many(self) -> None:
        raise unimplemented(NOT_FOR_DECOUPLED)

    def send(self, response: InferResponse, final: bool = True) -> None:
        self._forget()
        self._loop.call_soon_threadsafe(self._set, detached(response))

    def end(self) -> None:
        self.fail(internal("expected a single response, got 0"))

    def fail(self, error: ServeError, final: bool = True) -> None:
        self._note_failure()
        self._forget()
        self._loop.call_soon_threadsafe(self._set, error)

    def _set(self, outcome: Outcome) -> None:
        if self._future.done():
            return  # The client has gone.
        try:
            self.hold(_size(outcome))
        except ServeError as error:
            outcome = error
        self._future.set_result(outcome)

    def hold(self, nbytes: int) -> None:
        """On the loop: the answer takes so much now, in the form that it has.

        Raises:
            ServeError: RESOURCE_EXHAUSTED, there is no memory for it.
        """
        self._memory.release_answer(self._answer_holding)
        self._memory.admit_answer(self._answer_holding, nbytes)


class AnswerStream(HttpResponder):
    """The responder of a request that has any number of responses."""

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
        if final:
            self._forget()
        self._loop.call_soon_threadsafe(self._put, detached(response), final)

    def end(self) -> None:
        self._forget()
        self._loop.call_soon_threadsafe(self._put, None, True)

    def fail(self, error: ServeError, final: bool = True) -> None:
        self._note_failure()
        if final:
            self._forget()
        self._loop.call_soon_threadsafe(self._put, error, final)

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
    return sum(len(tensor.data) for tensor in outcome.outputs) if isinstance(outcome, InferResponse) else 0


def _does_not_read() -> ServeError:
    return ServeError(
        StatusCode.RESOURCE_EXHAUSTED,
        "the client does not read: too many bytes wait to be sent in answer to this request",
    )
