"""Infer: from a client's body to a scheduled request, and its answer back."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from rocserve.core.errors import ServeError, StatusCode, unimplemented
from rocserve.core.request_memory import Holding, RequestMemory
from rocserve.core.requests import InferRequest
from rocserve.core.serving import ServingTableHolder
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.answer_form import BINARY_ONLY, AnswerForm
from rocserve.frontends.http.body import BodyReader
from rocserve.frontends.http.deadlines import RequestDeadlines
from rocserve.frontends.http.encodings import IDENTITY, compressed, request_encoding, response_encoding
from rocserve.frontends.http.errors import JSON, PLAIN, HttpError, error_response, not_allowed
from rocserve.frontends.http.infer_request import InferRequestReader, id_of_refused
from rocserve.frontends.http.infer_response import InferBody, InferBodyWriter, takes_long
from rocserve.frontends.http.listener import SERVER_NAME
from rocserve.frontends.http.origin import Arrival
from rocserve.frontends.http.places import Place
from rocserve.frontends.http.raw_request import raw_request
from rocserve.frontends.http.request_heads import RequestHeads
from rocserve.frontends.http.responders import NOT_FOR_DECOUPLED, Asked, SingleAnswer
from rocserve.services.forwarded_headers import HeaderForwarding
from rocserve.services.inference import InferenceService

HEADER_LENGTH = "Inference-Header-Content-Length"
_BINARY = "application/octet-stream"
_INTEGER = re.compile(r"\s*([+-]?\d{1,18})")
_ONE_PIECE = 128 << 10
"""Bytes up to which a body is put together, rather than sent part by part."""
_WRITTEN_BYTES = 256 << 10
"""Of a large answer at a time: what a client does not read is then copied to no more than this in the connection."""


@dataclass(frozen=True, slots=True)
class HandlerParts:
    """What inference requests are served with, those of generate too."""

    service: InferenceService
    tables: ServingTableHolder
    bodies: BodyReader
    memory: RequestMemory
    deadlines: RequestDeadlines


class InferHandler:
    """On the event loop."""

    def __init__(self, parts: HandlerParts, forwarding: HeaderForwarding | None) -> None:
        self._parts = parts
        self._forwarding = forwarding
        self._heads = RequestHeads()
        self._reader = InferRequestReader(self._heads)
        self._writer = InferBodyWriter()

    async def answer(self, request: web.BaseRequest, place: Place) -> web.StreamResponse:
        """The answer to one infer request; one that is sent in parts has been sent.

        Raises:
            HttpError: what only HTTP knows is wrong.
        """
        if request.method != "POST":
            raise not_allowed()
        content_type = PLAIN
        json: Buffer = b""
        holding = Holding()
        try:
            arrival = Arrival(request)
            deadline = self._parts.deadlines.of(request.headers)
            version = self._parts.tables.table.find(place.model, place.version)
            if version.config.decoupled:
                raise unimplemented(NOT_FOR_DECOUPLED)
            encoding = request_encoding(request.headers.get("Content-Encoding"))
            header = request.headers.get(HEADER_LENGTH)
            body = await self._parts.bodies.tensor_body(request, encoding, header is None, holding)
            header_length = len(body) if header is None else _header_length(header, len(body))
            self._parts.bodies.check_size(len(body), header_length)
            content_type = JSON
            if header_length:
                json = memoryview(body)[:header_length]
                infer_request, form = self._reader.read(body, header_length, place.model, place.version)
                if header is None:
                    # Its tensors are no views on the body.
                    self._parts.memory.admit(holding, sum(map(len, infer_request.data)))
            else:
                infer_request = raw_request(body, version.config, place.version, self._heads)
                form = BINARY_ONLY
            if self._forwarding is not None:
                infer_request.head = self._forwarding.forward(infer_request.head, request.headers.items())
            infer_request.deadline = deadline
        except ServeError as error:
            self._parts.memory.release(holding)
            self._parts.service.refuse(error, partial(id_of_refused, json))
            return error_response(error, content_type)
        except BaseException:
            self._parts.memory.release(holding)
            raise
        responder = SingleAnswer(Asked(arrival.completed(), self._parts.memory, holding, deadline))
        try:
            return await self._run(request, infer_request, form, responder)
        finally:
            responder.close()

    async def _run(
        self, request: web.BaseRequest, infer_request: InferRequest, form: AnswerForm, responder: SingleAnswer
    ) -> web.StreamResponse:
        self._parts.service.infer(infer_request, responder)
        responder.handed_over()
        outcome = await responder.outcome()
        if isinstance(outcome, ServeError):
            return error_response(self._parts.service.paths.without(outcome), JSON if responder.is_refused else PLAIN)
        try:
            if takes_long(outcome, form):
                body = await asyncio.to_thread(self._writer.write, outcome, form)
            else:
                body = self._writer.write(outcome, form)
            size = sum(len(part) for part in body.parts)
            responder.hold(size)
        except ServeError as error:
            return error_response(error, PLAIN)
        return await _response(request, body, size, response_encoding(request.headers.get("Accept-Encoding")))


async def _response(request: web.BaseRequest, body: InferBody, size: int, encoding: str) -> web.StreamResponse:
    headers = {"Content-Type": JSON}
    parts = body.parts
    if body.tensors:
        headers = {"Content-Type": _BINARY, HEADER_LENGTH: str(len(body.json))}
    if encoding != IDENTITY:
        headers["Content-Encoding"] = encoding
        if size <= _ONE_PIECE:
            parts = [compressed(parts, encoding)]
        else:
            parts = [await asyncio.to_thread(compressed, parts, encoding)]
        size = len(parts[0])
    if size <= _ONE_PIECE:
        return web.Response(body=b"".join(parts), headers=headers)
    response = web.StreamResponse(headers={"Server": SERVER_NAME, **headers})
    response.content_length = size
    await response.prepare(request)
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _WRITTEN_BYTES):
            await response.write(view[start : start + _WRITTEN_BYTES])
    await response.write_eof()
    return response


def _header_length(header: str, body_length: int) -> int:
    """How many bytes of a body are its JSON, as its client says."""
    found = _INTEGER.match(header)
    if found is None:
        raise HttpError(400, f"Unable to parse {HEADER_LENGTH}, got: {header}")
    length = int(found[1])
    if not 0 <= length <= body_length:
        raise ServeError(
            StatusCode.INVALID_ARGUMENT,
            f"inference header size should be in range (0, {body_length}), got: {header}",
        )
    return length
