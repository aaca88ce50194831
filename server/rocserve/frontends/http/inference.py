"""Infer: from a client's body to a scheduled request, and its answer back."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rocserve.core.errors import ServeError, StatusCode, unimplemented
from rocserve.core.model_config import ModelConfig
from rocserve.core.request_memory import Holding, RequestMemory
from rocserve.core.requests import InferRequest, InferResponse
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.body import IDENTITY, BodyReader, compressed, request_encoding, response_encoding
from rocserve.frontends.http.deadlines import RequestDeadlines
from rocserve.frontends.http.errors import JSON, PLAIN, HttpError, error_response, not_allowed
from rocserve.frontends.http.form_data import form_boundary, form_parts
from rocserve.frontends.http.infer_request import (
    InferRequestReader,
    InferText,
    RequestHeads,
    id_of_refused,
    parse_infer_text,
)
from rocserve.frontends.http.infer_response import (
    BINARY_ONLY,
    JSON_ONLY,
    AnswerForm,
    InferBody,
    InferBodyWriter,
    detached,
    takes_long,
)
from rocserve.frontends.http.large_bodies import LARGE_JSON, LargeBodies
from rocserve.frontends.http.management import Place
from rocserve.frontends.http.models import Models
from rocserve.frontends.http.protocol import Request, Response
from rocserve.frontends.http.raw_request import form_request, raw_request
from rocserve.frontends.http.responders import Asked, Outcome, SingleAnswer
from rocserve.services.forwarded_headers import HeaderForwarding
from rocserve.services.inference import NOT_FOR_DECOUPLED, Inference
from rocserve.services.observation import RequestOrigin

HEADER_LENGTH = "Inference-Header-Content-Length"
_BINARY = "application/octet-stream"
_INTEGER = re.compile(r"\s*([+-]?\d{1,18})")
_ONE_PIECE = 128 << 10
"""Bytes up to which a body is put together, rather than sent part by part."""


@dataclass(frozen=True, slots=True)
class HandlerParts:
    """What inference requests are served with, those of generate too."""

    service: Inference
    models: Models
    bodies: BodyReader
    memory: RequestMemory
    deadlines: RequestDeadlines
    large: LargeBodies
    run: Callable[[Request, Coroutine[Any, Any, Response | None]], None]
    """Has a task answer, whose errors are told."""
    failure: Callable[[Request, Exception], Response]
    """The answer to a request that met a fault of the server."""


@dataclass(slots=True)
class _Intake:
    """A request on its way to the scheduler."""

    request: Request
    place: Place
    began_ns: int
    deadline: float | None
    encoding: str
    header: str | None
    """How many bytes of the body are its JSON, as the client says; None = all."""
    config: ModelConfig
    holding: Holding
    boundary: bytes | None
    """Between the parts of a form; None = the body is none."""
    content_type: str = PLAIN
    """Of the answer, if it is refused."""
    json: Buffer = b""


class InferHandler:
    """On the event loop. A request that is there as a whole, and its answer, cost no task."""

    def __init__(self, parts: HandlerParts, forwarding: HeaderForwarding | None) -> None:
        self._parts = parts
        self._forwarding = forwarding
        self._heads = RequestHeads()
        self._reader = InferRequestReader(self._heads)
        self._writer = InferBodyWriter()

    def answer(self, request: Request, place: Place) -> None:
        """Answers one infer request, at once or later.

        Raises:
            HttpError: what only HTTP knows is wrong.
        """
        if request.method != "POST":
            raise not_allowed()
        try:
            deadline = self._parts.deadlines.of(request.headers)
            config = self._parts.models.find(place.model, place.version)
            if config is not None:
                self._begin(request, place, deadline, config)
                return
        except ServeError as error:
            self._refuse_unread(request, error)
            return
        self._parts.run(request, self._ask(request, place, deadline))

    async def _ask(self, request: Request, place: Place, deadline: float | None) -> None:
        try:
            config = await self._parts.models.ask(place.model, place.version)
            self._begin(request, place, deadline, config)
        except ServeError as error:
            self._refuse_unread(request, error)

    def _refuse_unread(self, request: Request, error: ServeError) -> None:
        self._parts.service.refuse(error, str)
        request.respond(error_response(error, PLAIN))

    def _begin(self, request: Request, place: Place, deadline: float | None, config: ModelConfig) -> None:
        """Raises: ServeError, HttpError."""
        if config.decoupled:
            raise unimplemented(NOT_FOR_DECOUPLED["HTTP"])
        headers = request.headers
        intake = _Intake(
            request,
            place,
            time.monotonic_ns(),
            deadline,
            request_encoding(headers.get("content-encoding")),
            headers.get(HEADER_LENGTH.lower()),
            config,
            Holding(),
            None if HEADER_LENGTH.lower() in headers else form_boundary(headers.get("content-type", "")),
        )
        if not request.is_whole or intake.encoding != IDENTITY or _may_be_large(intake):
            self._parts.run(request, self._receive(intake))
            return
        try:
            body = self._parts.bodies.whole_tensor_body(request, intake.header is None, intake.holding)
            self._schedule(intake, *self._read(intake, body))
        except ServeError as error:
            self._refuse(intake, error)
        except BaseException:
            self._parts.memory.release(intake.holding)
            raise

    async def _receive(self, intake: _Intake) -> None:
        place = intake.place
        try:
            body = await self._parts.bodies.tensor_body(
                intake.request, intake.encoding, intake.header is None, intake.holding
            )
            length = self._json_length(intake, body)
            if length > LARGE_JSON and intake.boundary is None:
                parse = partial(parse_infer_text, place.model, len(body) - length)
                text: InferText = await self._parts.large.parse(parse, memoryview(body)[:length])
                infer_request = self._reader.request(text, memoryview(body)[length:], place.model, place.version)
                self._schedule(intake, infer_request, text.form)
            else:
                self._schedule(intake, *self._read(intake, body))
        except ServeError as error:
            self._refuse(intake, error)
        except BaseException:
            self._parts.memory.release(intake.holding)
            raise

    def _refuse(self, intake: _Intake, error: ServeError) -> None:
        self._parts.memory.release(intake.holding)
        self._parts.service.refuse(error, partial(id_of_refused, intake.json))
        intake.request.respond(error_response(error, intake.content_type))

    def _json_length(self, intake: _Intake, body: Buffer) -> int:
        length = len(body) if intake.header is None else _header_length(intake.header, len(body))
        self._parts.bodies.check_size(len(body), length)
        intake.content_type = JSON
        return length

    def _read(self, intake: _Intake, body: Buffer) -> tuple[InferRequest, AnswerForm]:
        """Raises: ServeError, HttpError."""
        place = intake.place
        length = self._json_length(intake, body)
        if intake.boundary is not None:
            parts = form_parts(body, intake.boundary)
            return form_request(parts, intake.config, place.version, self._heads), JSON_ONLY
        if not length:
            return raw_request(body, intake.config, place.version, self._heads), BINARY_ONLY
        intake.json = memoryview(body)[:length]
        return self._reader.read(body, length, place.model, place.version)

    def _schedule(self, intake: _Intake, infer_request: InferRequest, form: AnswerForm) -> None:
        """Raises: ServeError."""
        request, holding = intake.request, intake.holding
        if intake.header is None:
            # Its tensors are no views on the body.
            self._parts.memory.admit(holding, sum(map(len, infer_request.data)))
        if self._forwarding is not None:
            pairs = ((name.decode("latin-1"), value) for name, value in request.header_pairs)
            infer_request.head = self._forwarding.forward(infer_request.head, pairs)
        infer_request.deadline = intake.deadline
        asked = Asked(origin_of(request, intake.began_ns), self._parts.memory, holding, intake.deadline)
        responder = SingleAnswer(asked, partial(self._answered, request, form))
        request.on_gone = responder.leave
        responder.hand_over(self._parts.service, infer_request)

    def _answered(self, request: Request, form: AnswerForm, responder: SingleAnswer, outcome: Outcome) -> None:
        encoding = response_encoding(request.headers.get("accept-encoding"))
        if isinstance(outcome, InferResponse) and (
            encoding != IDENTITY or _is_large(outcome) or takes_long(outcome, form)
        ):
            self._parts.run(request, self._send(request, form, responder, detached(outcome), encoding))
            return
        try:
            if isinstance(outcome, ServeError):
                error = self._parts.service.paths.without(outcome)
                response = error_response(error, JSON if responder.is_refused else PLAIN)
            else:
                body = self._writer.write(outcome, form)
                responder.hold(sum(map(len, body.parts)))
                response = Response(200, b"".join(body.parts), *_told(body))
        except ServeError as error:
            response = error_response(error, PLAIN)
        except Exception as error:
            response = self._parts.failure(request, error)
        request.respond(response)
        responder.close()

    async def _send(
        self, request: Request, form: AnswerForm, responder: SingleAnswer, outcome: InferResponse, encoding: str
    ) -> Response | None:
        """A large answer, or a compressed one."""
        try:
            responder.hold(sum(map(len, outcome.data)))
            if takes_long(outcome, form):
                body = await asyncio.to_thread(self._writer.write, outcome, form)
            else:
                body = self._writer.write(outcome, form)
            responder.hold(sum(map(len, body.parts)))
            parts, (content_type, headers) = body.parts, _told(body)
            if encoding != IDENTITY:
                parts = [await asyncio.to_thread(compressed, parts, encoding)]
                headers = {**headers, "Content-Encoding": encoding}
            await request.respond_in_parts(parts, content_type, headers)
            return None
        except ServeError as error:
            return error_response(error, PLAIN)
        finally:
            responder.close()


def _may_be_large(intake: _Intake) -> bool:
    """Whether its JSON may be so large that it is parsed elsewhere."""
    if len(intake.request.data) <= LARGE_JSON:
        return False
    return intake.header is None or len(intake.header) > 6 or not intake.header.isdecimal()


def _is_large(outcome: InferResponse) -> bool:
    return sum(map(len, outcome.data)) > _ONE_PIECE


def _told(body: InferBody) -> tuple[str, Mapping[str, str]]:
    """Content type and headers of an answer."""
    return (_BINARY, {HEADER_LENGTH: str(len(body.json))}) if body.tensors else (JSON, {})


def origin_of(request: Request, began_ns: int) -> Callable[[], RequestOrigin]:
    """Of a request whose body is there now; what it gives is made only for those who ask."""
    received_ns = began_ns, time.monotonic_ns()
    return lambda: RequestOrigin("HTTP", received_ns, request.headers, request.remote)


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
