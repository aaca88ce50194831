"""Handles HTTP's inference requests: from a client's body to the scheduler, and back to the client."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rocserve.core.errors import ServeError, deadline_exceeded, internal, invalid_argument, unimplemented
from rocserve.core.exchange import Cancellable
from rocserve.core.model_config import ModelConfig
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest, RequestHead
from rocserve.core.responses import Answer, InferResponse
from rocserve.core.steps import Steps, result_of
from rocserve.core.tensors import Buffer
from rocserve.core.timing import server_timing
from rocserve.frontends.http.answer_bodies import (
    BINARY_ONLY,
    JSON_ONLY,
    AnswerBody,
    AnswerLayout,
    AnswerLayouts,
    detached,
    layout_of,
)
from rocserve.frontends.http.body import (
    HEADER_LENGTH,
    IDENTITY,
    LARGE_JSON,
    BodyReader,
    LargeBodies,
    StatedLength,
    accepted_stream,
    compressed,
    request_encoding,
    response_encoding,
    stated_length,
)
from rocserve.frontends.http.infer_bodies import (
    InferRequestReader,
    InferText,
    form_boundary,
    parse_infer_text,
    refused_request_id,
)
from rocserve.frontends.http.misdirected import advised
from rocserve.frontends.http.request import JSON, LARGEST_BODY, Request, Response, error_response
from rocserve.plane.guest_loop import worked_off
from rocserve.plane.loop import TimerHandle
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.scheduling.batch import send_copied
from rocserve.services.inference import (
    NOT_FOR_DECOUPLED,
    ClientResponder,
    HeaderForwarding,
    Inference,
    RequestOrigin,
    header_forwarding,
)
from rocserve.services.methods import Method
from rocserve.settings import HttpSettings

ONE_PIECE = 128 << 10
"""Bytes up to which a body is joined and sent in one write."""


@dataclass(eq=False)
class HttpParts:
    """The common parts of all HTTP requests: services (here or in the server) and readers. On the event loop."""

    inference: Inference
    methods: Mapping[str, Method]
    find_model: Callable[[str, str], ModelConfig | None]
    """Returns a version's configuration; None = call `ask_model`. Raises ServeError if no version is ready."""
    memory: RequestMemory
    large: LargeBodies
    settings: HttpSettings
    ask_model: Callable[[str, str], Awaitable[ModelConfig]] | None = None
    """Asks the server for the configuration; None = `find_model` knows all versions."""
    reader: InferRequestReader = field(default_factory=InferRequestReader, init=False)
    layouts: AnswerLayouts = field(default_factory=AnswerLayouts, init=False)

    def __post_init__(self) -> None:
        self.bodies = BodyReader(self.settings.max_input_size, self.memory)
        self.forwarding = header_forwarding(self.settings.header_forward_pattern)

    async def config(self, name: str, version: str) -> ModelConfig:
        """Return a version's configuration. `version`: "" = the highest. Raises ServeError if no version is ready."""
        config = self.find_model(name, version)
        if config is None:
            assert self.ask_model is not None
            config = await self.ask_model(name, version)
        return config

    async def index(self, ready: bool = False) -> Sequence[pb.RepositoryIndexResponse.ModelIndex]:
        """Return the rows of the repository index. `ready`: only those of ready versions."""
        answer = self.methods["RepositoryIndex"].answer(pb.RepositoryIndexRequest(ready=ready))
        response: pb.RepositoryIndexResponse = await answer if isinstance(answer, Awaitable) else answer
        return response.models


def request_timeout(headers: Mapping[str, str], timeout_seconds: float) -> float | None:
    """Return the seconds that a request's client waits from the request's beginning, by its headers and the server's
    settings; None = without limit. The shortest time applies.

    `timeout_seconds`: the longest time for any request; 0 = no limit.

    Raises ServeError (INVALID_ARGUMENT) if a header is not a whole number of milliseconds from 1 on.
    """
    seconds = [timeout_seconds] if timeout_seconds else []
    # Envoy sends the second to the servers behind it: how long it waits for them.
    for name in ("X-Request-Timeout-Ms", "X-Envoy-Expected-Rq-Timeout-Ms"):
        text = headers.get(name.lower())
        if text is not None:
            # 15 digits of milliseconds are 30,000 years.
            if not (text.isascii() and text.isdigit() and len(text) <= 15 and int(text)):
                raise invalid_argument(f"{name}: expected a whole number of milliseconds from 1 on, got '{text}'")
            seconds.append(int(text) / 1000)
    return min(seconds, default=None)


def with_forwarded_headers(head: RequestHead, forwarding: HeaderForwarding | None, request: Request) -> RequestHead:
    """Return an infer request's head with the client's headers that models are given."""
    if forwarding is None:
        return head
    pairs = ((name.decode("latin-1"), value) for name, value in request.head.pairs)
    return forwarding.forward(head, pairs)


class HttpResponder(Cancellable, ClientResponder):
    """Responds to one HTTP request, notices when its client leaves, and holds its memory. On the plane's thread."""

    protocol = "HTTP"
    held_bytes = 0
    is_refused = False
    """The request failed before it was scheduled."""
    _is_scheduled = False

    def __init__(self, request: Request, parts: HttpParts, timeout: float | None) -> None:
        """`timeout`: seconds from the request's beginning to an error for the client, even if the request continues."""
        self.request = request
        self._parts = parts
        self._deadline = None if timeout is None else request.began_at + timeout

    def schedule(self, request: InferRequest) -> None:
        """Schedule a request whose body has come. If this raises an error, the error is the only answer."""
        request.deadline = self._deadline
        self._parts.inference.infer(request, self)
        self._is_scheduled = True

    def release(self) -> None:
        """Release the request's body."""
        self.on_cancel = None
        self._parts.memory.requests.release(self)

    def origin(self) -> RequestOrigin:
        request = self.request
        received_ns = int(request.began_at * 1e9), time.monotonic_ns()
        return RequestOrigin("HTTP", received_ns, request.head.headers, request.remote)

    def cancel(self) -> None:
        """Note that the client has gone. The callback runs later, because it may be the caller."""
        self._parts.inference.plane.call_soon(super().cancel)

    def _copy(self, response: InferResponse, final: bool) -> None:
        """Copy a large response, because the client may read slowly, and send the copy."""
        self._parts.inference.plane.work_off(send_copied(response, final, self))

    def _note_failure(self, error: ServeError) -> None:
        self.is_refused |= error.is_refusal or not self._is_scheduled


class SingleResponder(HttpResponder, ABC):
    """Takes the only answer to a request."""

    takes_one = True

    @abstractmethod
    def _answer(self, outcome: InferResponse | ServeError) -> None:
        """Called once the request's memory is released. A response that is kept longer must be `detached`."""

    # Called by the scheduler.

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


@dataclass(eq=False)
class InferHead:
    """The common part of infer requests with the same head. It is read for the first request whose model is known."""

    parts: HttpParts
    _headers: Mapping[str, str]
    model: str
    version: str
    _answer_stream: Callable[[InferHead, Request, ModelConfig], Coroutine[Any, Any, Response | None]]
    """Answers a request whose client accepts a stream."""
    _is_read: bool = field(default=False, init=False)
    timeout: float | None = field(init=False)
    """Seconds; None = without limit."""
    encoding: str = field(init=False)
    json_length: StatedLength | None = field(init=False)
    limit: int = field(init=False)
    """Bytes of a body. Without a stated length of JSON, the limit for JSON applies to the whole body."""
    boundary: bytes | None = field(init=False)
    """The boundary of a form's parts; None = bodies are not forms."""
    answer_encoding: str = field(init=False)
    stream: str = field(init=False)
    """The stream format that the client accepts; "" = none."""
    _takes_json: bool = field(init=False)
    """The client accepts a single answer too."""

    def answer(self, request: Request) -> None:
        """Answer a request with this head. Raises HttpError if only HTTP knows the fault."""
        try:
            config = self.parts.find_model(self.model, self.version)
            if config is None:
                request.run(self._ask(request))
            else:
                self._begin(request, config)
        except ServeError as error:
            self._refuse_unread(request, error)

    async def _ask(self, request: Request) -> None:
        try:
            self._begin(request, await self.parts.config(self.model, self.version))
        except ServeError as error:
            self._refuse_unread(request, error)

    def _refuse_unread(self, request: Request, error: ServeError) -> None:
        self.parts.inference.refuse(error, str)
        request.respond(error_response(error))

    def _begin(self, request: Request, config: ModelConfig) -> None:
        if not self._is_read:
            self.read(self.parts.settings)
        if self.stream and (config.decoupled or not self._takes_json):
            request.run(self._answer_stream(self, request, config))
            return
        if config.decoupled:
            raise unimplemented(NOT_FOR_DECOUPLED["HTTP"])
        InferCall(self, request, config).begin()

    def read(self, settings: HttpSettings) -> None:
        """Read the headers. Raises ServeError or HttpError if one is wrong."""
        headers = self._headers
        encoding, length = headers.get("content-encoding"), headers.get(HEADER_LENGTH.lower())
        self.timeout = request_timeout(headers, settings.request_timeout_seconds)
        self.encoding = request_encoding(encoding) if encoding else IDENTITY
        self.json_length = None if length is None else stated_length(length)
        self.limit = settings.max_input_size if length is None else LARGEST_BODY
        self.boundary = None if length is not None else form_boundary(headers.get("content-type", ""))
        self.answer_encoding = response_encoding(headers.get("accept-encoding"))
        self.stream, self._takes_json = accepted_stream(headers.get("accept", ""))
        self._is_read = True


class InferBody:
    """The body of one infer request, while it is read."""

    form = JSON_ONLY
    is_raw = False
    """The body is the value of the only input, without JSON."""
    _body: Buffer = b""
    _json_bytes = 0
    """Bytes of JSON at the beginning of `_body`."""

    def __init__(self, head: InferHead, config: ModelConfig) -> None:
        self._head = head
        self._config = config

    @property
    def json(self) -> memoryview:
        return memoryview(self._body)[: self._json_bytes]

    def request_id(self) -> str:
        """Return the id in a body that could not be read as a request."""
        return refused_request_id(self.json)

    async def receive(self, request: Request, holder: HttpResponder) -> InferRequest:
        """Wait for the body, and make the request. `holder` holds its memory. Raises ServeError or HttpError."""
        parts, head = self._head.parts, self._head
        bodies = parts.bodies
        if head.encoding == IDENTITY:
            body = await bodies.read(request, holder, head.limit)
        else:
            body = await bodies.read_compressed(request, holder)
        length = bodies.json_length(head.json_length, len(body))
        if length <= LARGE_JSON or head.boundary is not None:
            return await worked_off(parts.inference.plane, self.read(body, length))
        self._body, self._json_bytes = body, length
        parse = partial(parse_infer_text, head.model, len(body) - length)
        text: InferText = await parts.large.parse(parse, memoryview(body)[:length])
        self.form = text.form
        # The body may be large, and a request that was read no longer needs it.
        self._body, self._json_bytes = b"", 0
        return parts.reader.make_request(text, memoryview(body)[length:], head.model, head.version)

    def read(self, body: Buffer, length: int) -> Steps[InferRequest]:
        """Make the request. `length`: the bytes of JSON in the body. Raises ServeError."""
        head, reader = self._head, self._head.parts.reader
        if head.boundary is not None:
            return (yield from reader.read_form(body, head.boundary, self._config, head.version))
        if not length:
            self.form, self.is_raw = BINARY_ONLY, True
            return (yield from reader.read_raw(body, self._config, head.version))
        self._body, self._json_bytes = body, length
        request, self.form = reader.read(body, length, head.model, head.version)
        return request


class InferCall(SingleResponder):
    """One infer request, from its head to its answer. If the request comes in one piece, the call needs no task."""

    _is_read = False
    """The body is an infer request."""
    _timer: TimerHandle | None = None
    _is_answered = False
    """The answer has been sent, or its client has gone."""

    def __init__(self, head: InferHead, request: Request, config: ModelConfig) -> None:
        """`head`: its headers have been read."""
        super().__init__(request, head.parts, head.timeout)
        self._head = head
        self._config = config
        self._body = InferBody(head, config)

    def begin(self) -> None:
        """Raises HttpError."""
        request, head = self.request, self._head
        length = len(request.data) if head.json_length is None else head.json_length[1]
        if not request.is_complete or head.encoding != IDENTITY or length > LARGE_JSON:
            request.run(self._receive())
            return
        try:
            bodies = self._parts.bodies
            body = bodies.complete_body(request, self, head.limit)
            self._schedule(result_of(self._body.read(body, bodies.json_length(head.json_length, len(body)))))
        except BaseException as error:
            self._end_with(error)

    async def _receive(self) -> None:
        try:
            self._schedule(await self._body.receive(self.request, self))
        except BaseException as error:
            self._end_with(error)

    def _end_with(self, error: BaseException) -> None:
        """End the request with an error. Raises every error but a ServeError."""
        self._end()
        self._parts.memory.requests.release(self)
        if not isinstance(error, ServeError):
            raise error
        self._parts.inference.refuse(error, self._body.request_id)
        self.request.respond(error_response(error if self._is_read else advised(error, self._body.json, self._config)))

    def _schedule(self, infer_request: InferRequest) -> None:
        """Raises ServeError."""
        self._is_read = True
        if self._head.json_length is None:
            # The tensors are copies, not views on the body.
            self._parts.memory.requests.admit(self, sum(map(len, infer_request.data)))
        infer_request.head = with_forwarded_headers(infer_request.head, self._parts.forwarding, self.request)
        if self._deadline is not None:
            self._timer = self._parts.inference.plane.call_at(self._deadline, self._expire)
        self.request.on_gone = self.leave
        self.schedule(infer_request)

    def leave(self) -> None:
        self._end()
        self.cancel()

    def _end(self) -> None:
        self._is_answered = True
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self.cancel()
        self._answer(deadline_exceeded())

    def _answer(self, outcome: InferResponse | ServeError) -> None:
        if self._is_answered:
            return  # The client has gone, or got the answer that its deadline has passed.
        self._end()
        request, parts = self.request, self._parts
        try:
            if isinstance(outcome, ServeError):
                error = parts.inference.paths.without(outcome)
                response = error_response(error)
            else:
                layout = layout_of(outcome, self._body.form, parts.layouts)
                is_plain = self._head.answer_encoding == IDENTITY and not layout.is_slow
                if not is_plain or sum(map(len, outcome.data)) > ONE_PIECE:
                    request.run(self._send(detached(outcome), layout))
                    return
                # The connection takes the body immediately, so its memory need not be held.
                body = result_of(layout.body(outcome))
                response = Response(200, b"".join([*body.json, *body.tensors]), *_content(body, outcome))
            request.respond(response)
        except ServeError as error:
            request.respond(error_response(error))
        except Exception as error:
            request.fail(error)

    async def _send(self, outcome: InferResponse, layout: AnswerLayout) -> Response | None:
        memory, encoding = self._parts.memory, self._head.answer_encoding
        try:
            memory.answers.admit(self, sum(map(len, outcome.data)))
            body = await worked_off(self._parts.inference.plane, layout.body(outcome))
            content_type, headers = _content(body, outcome)
            pieces = [*body.json, *body.tensors]
            memory.answers.release(self)
            memory.answers.admit(self, sum(map(len, pieces)))
            if encoding != IDENTITY:
                pieces = await asyncio.to_thread(compressed, pieces, encoding)
                headers = {**headers, "Content-Encoding": encoding}
            await self.request.respond_in_parts(pieces, content_type, headers)
            return None
        except ServeError as error:
            return error_response(error)
        finally:
            memory.answers.release(self)


def _content(body: AnswerBody, response: InferResponse) -> tuple[str, Mapping[str, str]]:
    """Return the content type and further headers of an answer."""
    headers = server_timing(response.parameters) if response.parameters else {}
    if not body.tensors:
        return JSON, headers
    return "application/octet-stream", {HEADER_LENGTH: str(sum(map(len, body.json))), **headers}
