"""Generate and generate_stream: one JSON object in, one or a stream of them out."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from rocserve.core.errors import ServeError, internal, invalid_argument
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.request_memory import Holding
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.errors import JSON, error_body, error_response, not_allowed, status_of
from rocserve.frontends.http.generate import NOT_ONE_RESPONSE, GenerateRequest, event, generate_body
from rocserve.frontends.http.infer_request import id_of_refused
from rocserve.frontends.http.inference import HandlerParts
from rocserve.frontends.http.listener import SERVER_NAME
from rocserve.frontends.http.origin import Arrival
from rocserve.frontends.http.places import Place
from rocserve.frontends.http.responders import AnswerStream, Asked, Outcome
from rocserve.scheduling.refusals import deadline_exceeded

_EVENTS = "text/event-stream; charset=utf-8"


class GenerateHandler:
    """On the event loop."""

    def __init__(self, parts: HandlerParts) -> None:
        self._parts = parts

    async def answer(self, request: web.BaseRequest, place: Place, streams: bool) -> web.StreamResponse:
        """The answer to one request; a stream has been sent.

        Raises:
            ServeError: the request is refused.
            HttpError: what only HTTP knows is wrong.
        """
        if request.method != "POST":
            raise not_allowed(JSON)
        arrival = Arrival(request)
        deadline = self._parts.deadlines.of(request.headers)
        version = self._parts.tables.table.find(place.model, place.version)
        body: Buffer = b""
        holding = Holding()
        try:
            if request.headers.get("Content-Encoding", "identity") not in ("", "identity"):
                raise invalid_argument("Unsupported content-encoding, only 'identity' is supported.")
            body = await self._parts.bodies.json_body(request, holding)
            generate_request = GenerateRequest(version.config, place.version).read(body)
            generate_request.deadline = deadline
        except BaseException as error:
            self._parts.memory.release(holding)
            if isinstance(error, ServeError):
                self._parts.service.refuse(error, partial(id_of_refused, body))
            raise
        responder = AnswerStream(Asked(arrival.completed(), self._parts.memory, holding, deadline))
        is_complete = False
        try:
            self._parts.service.infer(generate_request, responder)
            responder.handed_over()
            first = await responder.next()
            if responder.is_refused and isinstance(first, ServeError):
                response: web.StreamResponse = error_response(self._parts.service.paths.without(first))
            elif streams:
                response = await _send_events(request, first, responder, self._parts.service.paths)
            else:
                response = await _only_response(first, responder, self._parts.service.paths)
            is_complete = True
            return response
        finally:
            if not is_complete:
                responder.cancel()
            responder.close()


async def _only_response(first: Outcome | None, responder: AnswerStream, paths: PrivatePaths) -> web.Response:
    count = 0
    outcome = first
    while outcome is not None:
        count += 1
        outcome = await responder.next()
    if responder.is_overdue:
        return error_response(deadline_exceeded())
    if count != 1 or first is None:
        return error_response(internal(NOT_ONE_RESPONSE))
    status, body = _told(first, paths)
    return web.Response(status=status, body=body, content_type=JSON)


async def _send_events(
    request: web.BaseRequest, first: Outcome | None, responder: AnswerStream, paths: PrivatePaths
) -> web.StreamResponse:
    """The first one decides about the status; what fails later is an event of the stream."""
    status, body = (200, b"") if first is None else _told(first, paths)
    response = web.StreamResponse(
        status=status, headers={"Server": SERVER_NAME, "Content-Type": _EVENTS, "Cache-Control": "no-cache"}
    )
    response.enable_chunked_encoding()
    await response.prepare(request)
    outcome = first
    while outcome is not None:
        await response.write(event(body))
        outcome = await responder.next()
        if outcome is not None:
            _, body = _told(outcome, paths)
    await response.write_eof()
    return response


def _told(outcome: Outcome, paths: PrivatePaths) -> tuple[int, bytes]:
    """Status and body of one response or error."""
    if not isinstance(outcome, ServeError):
        try:
            return 200, generate_body(outcome)
        except ServeError as error:
            outcome = error
    return status_of(outcome), error_body(paths.hide(outcome.text))
