"""Calls that become one or more infer requests: reads their JSON, sends the requests, and writes JSON again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from rocserve.core.errors import ServeError, deadline_exceeded
from rocserve.core.request_memory import Holding
from rocserve.core.requests import InferRequest
from rocserve.core.responses import InferResponse
from rocserve.core.steps import Steps
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.answer_bodies import detached
from rocserve.frontends.http.body import IDENTITY, LARGE_JSON, request_encoding
from rocserve.frontends.http.inference import ONE_PIECE, HttpParts, SingleResponder
from rocserve.frontends.http.request import JSON, Request, Response
from rocserve.plane.guest_loop import worked_off

_Body = TypeVar("_Body")

MOST_IN_FLIGHT = 8
"""Requests of one call that run at once: enough that tokenizer, encoder and pooling work at the same time, on several
instances, and few enough that one call does not fill a model's queue."""


async def divide(
    parts: HttpParts,
    request: Request,
    timeout: float | None,
    most_in_flight: int,
    requests: Iterable[InferRequest],
    take: Callable[[InferResponse], None],
) -> None:
    """Send a call's infer requests, and call `take` with the answers, in the order of the requests. The client's
    limits, deadline and leaving hold for each of them. `timeout`: seconds from the arrival of the call; None = without
    limit. Raises the ServeError of the first that failed, or of `take`, and cancels those after it."""
    waiting: deque[_Responder] = deque()

    async def take_first() -> None:
        answer = await waiting[0].answered
        waiting.popleft()
        if isinstance(answer, ServeError):
            raise parts.inference.paths.without(answer)
        take(answer)

    deadline = None if timeout is None else request.began_at + timeout
    try:
        async with asyncio.timeout_at(deadline):
            for infer_request in requests:
                if len(waiting) == most_in_flight:
                    await take_first()
                responder = _Responder(request, parts, timeout)
                waiting.append(responder)
                responder.begin(infer_request)
            while waiting:
                await take_first()
    except TimeoutError:
        raise deadline_exceeded() from None
    finally:
        for responder in waiting:
            responder.cancel()


class _Responder(SingleResponder):
    """Receives the answer to one of a call's requests."""

    def __init__(self, request: Request, parts: HttpParts, timeout: float | None) -> None:
        super().__init__(request, parts, timeout)
        self.answered: asyncio.Future[InferResponse | ServeError] = asyncio.get_running_loop().create_future()

    def begin(self, request: InferRequest) -> None:
        """Schedule a request, and count its tensors, which are copies of the body's elements. Raises ServeError."""
        self._parts.memory.requests.admit(self, sum(map(len, request.data)))
        try:
            self.schedule(request)
        except BaseException:
            self.release()
            raise

    def _answer(self, outcome: InferResponse | ServeError) -> None:
        if not self.answered.done():
            self.answered.set_result(detached(outcome) if isinstance(outcome, InferResponse) else outcome)


async def read_body(parts: HttpParts, request: Request, holding: Holding, read: Callable[[Buffer], _Body]) -> _Body:
    """Return `read`'s result for a request's body, in another process if the body is large. Raises ServeError."""
    encoding = request_encoding(request.head.headers.get("content-encoding") or IDENTITY)
    receive = parts.bodies.read if encoding == IDENTITY else parts.bodies.read_compressed
    data = await receive(request, holding)
    return await parts.large.parse(read, data) if len(data) > LARGE_JSON else read(data)


async def send_json(parts: HttpParts, request: Request, nbytes: int, writing: Steps[list[bytes]]) -> Response | None:
    """Write the body of an answer, and send it. `nbytes`: of the tensors in it. Returns a response that is still to be
    sent, or None. Raises ServeError if there is no memory."""
    answers, holding = parts.memory.answers, Holding()
    try:
        answers.admit(holding, nbytes)
        pieces = await worked_off(parts.inference.plane, writing)
        length = sum(map(len, pieces))
        if length <= ONE_PIECE:
            return Response(200, b"".join(pieces), JSON)
        answers.release(holding)
        answers.admit(holding, length)
        await request.respond_in_parts(pieces, JSON)
        return None
    finally:
        answers.release(holding)
