"""Implements the generate extension: a model's inputs and outputs as members of plain JSON objects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from rocserve.core.errors import ServeError, StatusCode, deadline_exceeded, internal, invalid_argument
from rocserve.core.model_config import InputConfig
from rocserve.core.parameters import NO_PARAMETERS, ParameterValue
from rocserve.core.printable import names_hint
from rocserve.core.request_memory import Holding
from rocserve.core.requests import InferRequest, InputHead, RequestHead, check_entries
from rocserve.core.responses import Answer, InferResponse
from rocserve.core.steps import Steps
from rocserve.core.tensors import Buffer
from rocserve.core.timing import server_timing
from rocserve.frontends.http.answer_bodies import detached
from rocserve.frontends.http.body import LARGE_JSON
from rocserve.frontends.http.infer_bodies import plain_parameter, read_id, refused_request_id
from rocserve.frontends.http.inference import ONE_PIECE, HttpParts, HttpResponder, request_timeout
from rocserve.frontends.http.json_text import element_pieces, json_bytes, members, parse_json, raw_contents
from rocserve.frontends.http.request import JSON, Request, Response, error_response, status_of
from rocserve.plane.guest_loop import worked_off
from rocserve.services.inference import Inference

NESTED = "parameters"
"""The members of this member are treated as members of the object itself."""


def read_generate(
    max_batch_size: int, inputs: Sequence[InputConfig], model_name: str, model_version: str, body: Buffer
) -> InferRequest:
    """Turn a body into a request for a model with these inputs: members named as inputs are tensors, all others
    parameters. Raises ServeError with Triton's codes and words."""
    entries = {entry.name: entry for entry in inputs}
    given: list[InputHead] = []
    data: list[Buffer] = []
    parameters: dict[str, ParameterValue] = {}

    def take(name: str, value: Any) -> None:
        entry = entries.get(name)
        if entry is None:
            try:
                parameters[name] = plain_parameter(name, value)
            except ServeError as error:
                # Only tensors are arrays.
                hint = names_hint("the model's inputs are", name, entries) if type(value) is list else ""
                raise error.with_text(f"{error.text.removesuffix('.')}{hint}" if hint else error.text) from None
            return
        count = len(value) if type(value) is list else 1
        shape = _shape(entry, max_batch_size > 0, count)
        data.append(raw_contents(value, entry.datatype.value, count, name))
        given.append(InputHead(name, entry.datatype.value, shape, NO_PARAMETERS))

    value = parse_json(body)
    request_id = read_id(value)
    for name, member in members(value).items():
        if name != NESTED:
            take(name, member)
            continue
        if NESTED in entries:
            raise invalid_argument(f"Keyword '{NESTED}' for nested schema also given as input tensor name")
        if type(member) is not dict:
            raise internal(f"Expected JSON object for keyword: '{NESTED}': attempt to access JSON non-object as object")
        try:
            for nested, value in member.items():
                take(nested, value)
        except ServeError as error:
            raise ServeError(error.code, f"Converting keyword: '{NESTED}': {error.text}") from None
    check_entries(len(given) + len(parameters))
    head = RequestHead(model_name, model_version, tuple(given), (), parameters or NO_PARAMETERS)
    return InferRequest(head, request_id, data)


def _shape(entry: InputConfig, batches: bool, count: int) -> tuple[int, ...]:
    """Return a shape for `count` elements. Of the variable dimensions, the last takes the rest, the others become 1."""
    does_not_fit = f"The schema can not convert input '{entry.name}' to tensor with proper shape"
    shape = [-1, *entry.dims] if batches else list(entry.dims)
    for size in shape:
        if size != -1:
            if size == 0 or count % size:
                raise invalid_argument(does_not_fit)
            count //= size
    for axis in reversed(range(len(shape))):
        if shape[axis] == -1:
            shape[axis], count = count, 1
    if count != 1:
        raise invalid_argument(does_not_fit)
    return tuple(shape)


def generate_body(response: InferResponse) -> Steps[list[bytes]]:
    """Return a response as one JSON object, in pieces: names, parameters and outputs, sorted by name.

    Raises ServeError: INVALID_ARGUMENT if an output has no form in JSON, INTERNAL if one does not fit its shape.
    """
    fields: dict[str, Any] = {"id": response.id} if response.id else {}
    fields |= {"model_name": response.head.model_name, "model_version": response.head.model_version}
    # Parameters do not replace the response's own fields.
    fields = {**response.parameters, **fields}
    written: dict[str, list[bytes]] = {}
    for tensor in response.outputs:
        pieces = [] if tensor.element_count == 1 else [b"["]
        for piece in element_pieces(tensor):
            pieces.append(piece)
            yield
        written[tensor.name] = pieces if tensor.element_count == 1 else [*pieces, b"]"]
    written |= {name: [json_bytes(value)] for name, value in fields.items()}
    body: list[bytes] = []
    for name in sorted(written):
        body += b",%b:" % json_bytes(name) if body else b"{%b:" % json_bytes(name), *written[name]
    return [*body, b"}"]


EVENT_STREAM = "text/event-stream; charset=utf-8"


async def generate(parts: HttpParts, request: Request, model: str, version: str, streams: bool) -> Response | None:
    """Answer one request. Returns None if the answer has been sent, as a stream is.

    Raises ServeError if the request is refused, and HttpError if only HTTP knows the fault.
    """
    timeout = request_timeout(request.head.headers, parts.settings.request_timeout_seconds)
    config = await parts.config(model, version)
    body: Buffer = b""
    responder = AnswerStream(request, parts, timeout)
    try:
        if request.head.headers.get("content-encoding", "identity") not in ("", "identity"):
            raise invalid_argument("Unsupported content-encoding, only 'identity' is supported.")
        body = await parts.bodies.read(request, responder)
        parse = partial(read_generate, config.max_batch_size, config.inputs, config.name, version)
        is_large = len(body) > LARGE_JSON
        generate_request = await parts.large.parse(parse, body) if is_large else parse(body)
        responder.schedule(generate_request)
    except BaseException as error:
        responder.release()
        if isinstance(error, ServeError):
            parts.inference.refuse(error, partial(refused_request_id, b"" if len(body) > LARGE_JSON else body))
        raise
    try:
        first = await responder.next()
        if responder.is_refused and isinstance(first, ServeError):
            return error_response(parts.inference.paths.without(first))
        if not streams:
            return await _only_response(request, first, responder, parts.inference)
        await _send_events(request, first, responder, parts.inference)
        return None
    except BaseException:
        responder.cancel()
        raise
    finally:
        responder.close()


async def _only_response(
    request: Request, first: Answer, responder: AnswerStream, inference: Inference
) -> Response | None:
    are_more = False
    while first is not None and await responder.next() is not None:
        are_more = True
    if responder.is_overdue:
        return error_response(deadline_exceeded())
    if first is None or are_more:
        text = (
            "generate expects model to produce exactly 1 response, use generate stream for model that generates various"
            " number of responses"
        )
        return error_response(internal(text))
    status, body = await _status_and_body(first, inference)
    headers = server_timing(first.parameters) if isinstance(first, InferResponse) else {}
    if sum(map(len, body)) <= ONE_PIECE:
        return Response(status, b"".join(body), JSON, headers)
    await request.respond_in_parts(body, JSON, headers)
    return None


async def _send_events(request: Request, first: Answer, responder: AnswerStream, inference: Inference) -> None:
    """Send responses as events. The first response decides the status; later failures are events of the stream."""
    body: list[bytes] = []
    status = 200
    if first is not None:
        status, body = await _status_and_body(first, inference)
    request.begin_stream(status, EVENT_STREAM, {"Cache-Control": "no-cache"})
    outcome = first
    while outcome is not None:
        await request.send(b"data: ", *body, b"\n\n")
        outcome = await responder.next()
        if outcome is not None:
            _, body = await _status_and_body(outcome, inference)
    request.end_stream()


async def _status_and_body(outcome: InferResponse | ServeError, inference: Inference) -> tuple[int, list[bytes]]:
    if not isinstance(outcome, ServeError):
        try:
            return 200, await worked_off(inference.plane, generate_body(outcome))
        except ServeError as error:
            outcome = error
    return status_of(outcome), [json_bytes({"error": inference.paths.hide(outcome.text)})]


BACKLOG_LIMIT_BYTES = 256 << 20
"""Bytes of responses that the client has not read yet."""


class AnswerStream(HttpResponder):
    """Answers a request that may have any number of responses."""

    takes_one = False

    def __init__(self, request: Request, parts: HttpParts, timeout: float | None) -> None:
        super().__init__(request, parts, timeout)
        self._answers = Holding()
        self._queue: asyncio.Queue[Answer] = asyncio.Queue()
        self._sending_bytes = 0
        """The part of the held bytes that is being sent; the rest waits."""
        self._is_closed = False
        self.is_overdue = False
        """The deadline has passed, and the answer reports it."""

    async def next(self) -> Answer:
        """Return the next response or error; None after the last."""
        # The previous answer has been sent.
        self._parts.memory.answers.release(self._answers, self._sending_bytes)
        self._sending_bytes = 0
        try:
            async with asyncio.timeout_at(self._deadline):
                outcome = await self._queue.get()
        except TimeoutError:
            self.is_overdue = self._is_closed = True
            self._drop_all()
            self._queue.put_nowait(None)
            return deadline_exceeded()
        self._sending_bytes = _size(outcome)
        return outcome

    def close(self) -> None:
        """Release all answers: they have been sent, or nobody reads them."""
        self._is_closed = True
        self._parts.memory.answers.release(self._answers)

    def expect_many(self) -> None: ...

    def send(self, answer: Answer, final: bool = True) -> None:
        if isinstance(answer, InferResponse):
            if answer.is_large and answer.slot is not None:
                self._copy(answer, final)
                return
            answer = detached(answer)
        elif answer is not None:
            self._note_failure(answer)
        if final:
            self.release()
        if self._is_closed:
            return
        try:
            self._parts.memory.answers.admit(self._answers, _size(answer))
            if self._answers.held_bytes - self._sending_bytes > BACKLOG_LIMIT_BYTES:
                raise ServeError(
                    StatusCode.RESOURCE_EXHAUSTED,
                    "the client does not read: too many bytes wait to be sent in answer to this request",
                )
        except ServeError as error:
            self._drop_all()
            answer, final = error, True
        if answer is not None:
            self._queue.put_nowait(answer)
        if final:
            self._is_closed = True
            self._queue.put_nowait(None)

    def _drop_all(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()
        self._parts.memory.answers.release(self._answers)
        self.cancel()


def _size(outcome: Answer) -> int:
    return sum(map(len, outcome.data)) if isinstance(outcome, InferResponse) else 0
