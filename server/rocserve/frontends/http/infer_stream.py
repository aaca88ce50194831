"""Answers infer requests as streams of JSON: each response is an event, or a line, as soon as the model has sent it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import ModelConfig
from rocserve.core.responses import InferResponse
from rocserve.frontends.http.answer_bodies import JSON_ONLY, AnswerForm, layout_of
from rocserve.frontends.http.body import EVENTS, LINES
from rocserve.frontends.http.generate import EVENT_STREAM, AnswerStream
from rocserve.frontends.http.inference import InferBody, InferHead, with_forwarded_headers
from rocserve.frontends.http.json_text import json_bytes
from rocserve.frontends.http.misdirected import advised
from rocserve.frontends.http.request import Request, Response, error_response
from rocserve.plane.guest_loop import worked_off

_FRAMES: Mapping[str, tuple[str, bytes, bytes]] = MappingProxyType(
    {EVENTS: (EVENT_STREAM, b"data: ", b"\n\n"), LINES: (LINES, b"", b"\n")}
)
"""Stream format -> its content type, and the text before and after each response."""


async def infer_stream(head: InferHead, request: Request, config: ModelConfig) -> Response | None:
    """Answer one request. Returns None if the answer has been sent. An error before the first response is an ordinary
    error; a later one is the last event. Raises HttpError if only HTTP knows the fault."""
    parts, responder = head.parts, AnswerStream(request, head.parts, head.timeout)
    body = InferBody(head, config)
    is_read = False
    try:
        infer_request = await body.receive(request, responder)
        is_read = True
        if head.json_length is None:
            parts.memory.requests.admit(responder, sum(map(len, infer_request.data)))
        form = JSON_ONLY if body.is_raw else body.form
        _check_form(form)
        infer_request.head = with_forwarded_headers(infer_request.head, parts.forwarding, request)
        responder.schedule(infer_request)
    except BaseException as error:
        responder.release()
        if not isinstance(error, ServeError):
            raise
        parts.inference.refuse(error, body.request_id)
        return error_response(error if is_read else advised(error, body.json, config))
    del body, infer_request
    try:
        first = await responder.next()
        if isinstance(first, ServeError):
            return error_response(parts.inference.paths.without(first))
        await _send(head, request, first, form, responder)
        return None
    except BaseException:
        responder.cancel()
        raise
    finally:
        responder.close()


def _check_form(form: AnswerForm) -> None:
    """Raises ServeError (INVALID_ARGUMENT) if the request asks for binary outputs."""
    if form.otherwise_binary or any(is_binary for _, is_binary in form.binary):
        raise invalid_argument(
            "a stream sends outputs as JSON: leave binary_data and binary_data_output out, or use gRPC's"
            " ModelStreamInfer"
        )


async def _send(
    head: InferHead, request: Request, first: InferResponse | None, form: AnswerForm, responder: AnswerStream
) -> None:
    content_type, before, behind = _FRAMES[head.stream]
    outcome: InferResponse | ServeError | None = first
    request.begin_stream(200, content_type, {"Cache-Control": "no-cache"})
    while outcome is not None:
        await request.send(before, *await _written(head, outcome, form), behind)
        outcome = await responder.next()
    request.end_stream()


async def _written(head: InferHead, outcome: InferResponse | ServeError, form: AnswerForm) -> list[bytes]:
    parts = head.parts
    if not isinstance(outcome, ServeError):
        try:
            return (await worked_off(parts.inference.plane, layout_of(outcome, form, parts.layouts).body(outcome))).json
        except ServeError as error:
            outcome = error
    return [json_bytes({"error": parts.inference.paths.hide(outcome.text)})]
