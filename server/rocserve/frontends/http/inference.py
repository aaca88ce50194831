"""Infer: from a client's body to a scheduled request, and its answer back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from rocserve.core.errors import ServeError, deadline_exceeded, internal, unimplemented
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import Answer, InferRequest, InferResponse
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.body import (
    HEADER_LENGTH,
    IDENTITY,
    LARGEST_BODY,
    compressed,
    request_encoding,
    response_encoding,
)
from rocserve.frontends.http.errors import JSON, PLAIN, error_response, not_allowed
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
    InferBodyWriter,
    detached,
    takes_long,
)
from rocserve.frontends.http.large_bodies import LARGE_JSON
from rocserve.frontends.http.protocol import Request, Response
from rocserve.frontends.http.raw_request import form_boundary, form_parts, form_request, raw_request
from rocserve.frontends.http.responders import HttpParts, HttpResponder, request_deadline
from rocserve.plane.loop import TimerHandle
from rocserve.services.forwarded_headers import HeaderForwarding
from rocserve.services.inference import NOT_FOR_DECOUPLED

_HEADER_LENGTH_KEY = HEADER_LENGTH.lower()
_BINARY = "application/octet-stream"
_ONE_PIECE = 128 << 10
"""Bytes up to which a body is put together, rather than sent part by part."""


class InferHandler:
    """On the event loop. A request that is there as a whole, and its answer, cost no task."""

    def __init__(self, parts: HttpParts, forwarding: HeaderForwarding | None) -> None:
        self.parts = parts
        self.forwarding = forwarding
        self.heads = RequestHeads()
        self.reader = InferRequestReader(self.heads)
        self.writer = InferBodyWriter()

    def answer(self, request: Request, model: str, version: str) -> None:
        """Answers one infer request, at once or later.

        Raises:
            HttpError: what only HTTP knows is wrong.
        """
        if request.method != "POST":
            raise not_allowed()
        try:
            deadline = request_deadline(request.headers, self.parts.settings.request_timeout_seconds)
            config = self.parts.models.find(model, version)
            if config is not None:
                InferCall(self, request, model, version, deadline, config).begin()
                return
        except ServeError as error:
            self._refuse_unread(request, error)
            return
        request.run(self._ask(request, model, version, deadline))

    async def _ask(self, request: Request, model: str, version: str, deadline: float | None) -> None:
        try:
            config = await self.parts.models.ask(model, version)
            InferCall(self, request, model, version, deadline, config).begin()
        except ServeError as error:
            self._refuse_unread(request, error)

    def _refuse_unread(self, request: Request, error: ServeError) -> None:
        self.parts.inference.refuse(error, str)
        request.respond(error_response(error, PLAIN))


class InferCall(HttpResponder):
    """One infer request of a client, from its head to its answer."""

    takes_one = True

    def __init__(
        self,
        handler: InferHandler,
        request: Request,
        model: str,
        version: str,
        deadline: float | None,
        config: ModelConfig,
    ) -> None:
        """Raises: ServeError, HttpError."""
        if config.decoupled:
            raise unimplemented(NOT_FOR_DECOUPLED["HTTP"])
        super().__init__(request, handler.parts, deadline)
        headers = request.headers
        self._handler = handler
        self._model = model
        self._version = version
        self._config = config
        encoding = headers.get("content-encoding")
        self._encoding = request_encoding(encoding) if encoding else IDENTITY
        self._json_header = headers.get(_HEADER_LENGTH_KEY)
        """How many bytes of the body are its JSON, as the client says; None = all."""
        self._limit = handler.parts.bodies.max_input_size if self._json_header is None else LARGEST_BODY
        """Bytes of the body: without tensors behind the JSON the whole is bound as JSON is."""
        self._boundary = None if self._json_header is not None else form_boundary(headers.get("content-type", ""))
        """Between the parts of a form; None = the body is none."""
        self._refusal_type = PLAIN
        """The content type of its answer, if it is refused."""
        self._json: Buffer = b""
        self._form = JSON_ONLY
        self._timer: TimerHandle | None = None
        self._is_answered = False
        """Or nobody waits for its answer."""

    def begin(self) -> None:
        """Raises: HttpError."""
        request = self.request
        if (
            not request.is_whole
            or self._encoding != IDENTITY
            or (len(request.data) > LARGE_JSON and self._may_be_large())
        ):
            request.run(self._receive())
            return
        try:
            self._schedule(self._read(self._parts.bodies.whole(request, self, self._limit)))
        except BaseException as error:
            self._give_up(error)

    async def _receive(self) -> None:
        bodies, reader = self._parts.bodies, self._handler.reader
        try:
            if self._encoding == IDENTITY:
                body = await bodies.read(self.request, self, self._limit)
            else:
                body = await bodies.read_compressed(self.request, self)
            length = bodies.json_length(self._json_header, len(body))
            self._refusal_type = JSON
            if length > LARGE_JSON and self._boundary is None:
                parse = partial(parse_infer_text, self._model, len(body) - length)
                text: InferText = await self._parts.large.parse(parse, memoryview(body)[:length])
                self._form = text.form
                self._schedule(reader.request(text, memoryview(body)[length:], self._model, self._version))
            else:
                self._schedule(self._read(body))
        except BaseException as error:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Raises: any error but a ServeError."""
        self._end()
        self._parts.memory.release(self)
        if not isinstance(error, ServeError):
            raise error
        self._parts.inference.refuse(error, partial(id_of_refused, self._json))
        self.request.respond(error_response(error, self._refusal_type))

    def _may_be_large(self) -> bool:
        """Whether the JSON of a large body may be so large that it is parsed elsewhere."""
        header = self._json_header
        return header is None or len(header) > 6 or not header.isdecimal()

    def _read(self, body: Buffer) -> InferRequest:
        """Raises: ServeError, HttpError."""
        handler = self._handler
        length = self._parts.bodies.json_length(self._json_header, len(body))
        self._refusal_type = JSON
        if self._boundary is not None:
            parts = form_parts(body, self._boundary)
            return form_request(parts, self._config, self._version, handler.heads)
        if not length:
            self._form = BINARY_ONLY
            return raw_request(body, self._config, self._version, handler.heads)
        self._json = memoryview(body)[:length]
        request, self._form = handler.reader.read(body, length, self._model, self._version)
        return request

    def _schedule(self, infer_request: InferRequest) -> None:
        """Raises: ServeError."""
        request = self.request
        if self._json_header is None:
            # Its tensors are no views on the body.
            self._parts.memory.admit(self, sum(map(len, infer_request.data)))
        if self._handler.forwarding is not None:
            pairs = ((name.decode("latin-1"), value) for name, value in request.header_pairs)
            infer_request.head = self._handler.forwarding.forward(infer_request.head, pairs)
        if self._deadline is not None:
            self._timer = self._parts.inference.plane.call_at(self._deadline, self._expire)
        request.on_gone = self.leave
        self.hand_over(infer_request)

    def leave(self) -> None:
        """The client has gone."""
        self._end()
        self.cancel()

    def _end(self) -> None:
        self._is_answered = True
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self.cancel()
        self._answer(deadline_exceeded())

    # What the scheduler calls.

    def expect_many(self) -> None:
        raise unimplemented(NOT_FOR_DECOUPLED["HTTP"])

    def send(self, answer: Answer, final: bool = True) -> None:
        if isinstance(answer, InferResponse):
            if answer.is_large and answer.slot is not None:
                self._copy(answer, final)
                return
        else:
            answer = answer or internal("expected a single response, got 0")
            self._note_failure(answer)
        self.release()
        self._answer(answer)

    def _answer(self, outcome: InferResponse | ServeError) -> None:
        if self._is_answered:
            return  # The client has gone, or has the answer that its deadline has passed.
        self._end()
        request, parts = self.request, self._parts
        try:
            if isinstance(outcome, ServeError):
                error = parts.inference.paths.without(outcome)
                response = error_response(error, JSON if self.is_refused else PLAIN)
            elif (
                "accept-encoding" in request.headers
                or sum(map(len, outcome.data)) > _ONE_PIECE
                or (not self._form.is_all_binary and takes_long(outcome, self._form))
            ):
                request.run(self._send(detached(outcome)))
                return
            else:
                # It is the connection's at once, and held by nobody else.
                body = self._handler.writer.write(outcome, self._form)
                response = Response(200, b"".join(body), *_content(body))
            request.respond(response)
        except ServeError as error:
            request.respond(error_response(error, PLAIN))
        except Exception as error:
            request.fail(error)

    async def _send(self, outcome: InferResponse) -> Response | None:
        """A large answer, or perhaps a compressed one."""
        memory, write = self._parts.memory, self._handler.writer.write
        encoding = response_encoding(self.request.headers.get("accept-encoding"))
        try:
            memory.admit_answer(self, sum(map(len, outcome.data)))
            if takes_long(outcome, self._form):
                body = await asyncio.to_thread(write, outcome, self._form)
            else:
                body = write(outcome, self._form)
            memory.release_answer(self)
            memory.admit_answer(self, sum(map(len, body)))
            content_type, headers = _content(body)
            if encoding != IDENTITY:
                body = [await asyncio.to_thread(compressed, body, encoding)]
                headers = {**headers, "Content-Encoding": encoding}
            await self.request.respond_in_parts(body, content_type, headers)
            return None
        except ServeError as error:
            return error_response(error, PLAIN)
        finally:
            memory.release_answer(self)


def _content(body: Sequence[Buffer]) -> tuple[str, Mapping[str, str]]:
    """Content type and headers of an answer."""
    return (_BINARY, {HEADER_LENGTH: str(len(body[0]))}) if len(body) > 1 else (JSON, {})
