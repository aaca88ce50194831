"""Handles ModelInfer and ModelStreamInfer: turns clients' messages into requests, and answers into messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from rocserve.core.errors import ServeError, StatusCode, internal, unimplemented
from rocserve.core.exchange import Cancellable
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest, RequestHead
from rocserve.core.responses import Answer, InferResponse
from rocserve.core.sequences import SequenceOrder
from rocserve.core.steps import Steps, result_of
from rocserve.frontends.grpc.codec import (
    RequestDecoder,
    ResponseEncoder,
    TypedRequest,
    join_large,
    refused_request_id,
)
from rocserve.frontends.grpc.server_calls import ServerUnaryCall
from rocserve.frontends.grpc.transport import (
    SERVER_EXITING,
    Route,
    StreamCall,
    StreamRoute,
    UnaryCall,
    UnaryRoute,
    address_of,
    guarded_routes,
)
from rocserve.frontends.grpc.typed_answers import typed_parts
from rocserve.frontends.grpc.typed_contents import DECODED_AT_ONCE
from rocserve.scheduling.response_sequencer import ResponseSequencer, Ticket
from rocserve.services.access import Restriction
from rocserve.services.inference import NOT_FOR_DECOUPLED, HeaderForwarding, Inference, RequestOrigin


class InferenceHandlers:
    """Handles the two methods. On the data plane's thread."""

    def __init__(self, service: Inference, memory: RequestMemory, forwarding: HeaderForwarding | None = None) -> None:
        self.service = service
        self.decoder = RequestDecoder()
        self.encoder = ResponseEncoder()
        self.memory = memory
        self.forwarding = forwarding
        self.streams: set[InferenceStream] = set()
        self.order = SequenceOrder()
        """The order of sequences while one of their requests is being decoded."""
        self.is_exiting = False

    def routes(self, restrictions: Mapping[str, Restriction]) -> Mapping[str, Route]:
        routes: dict[str, Route] = {
            "ModelInfer": UnaryRoute(self.model_infer, InferCall),
            "ModelStreamInfer": StreamRoute(lambda call: InferenceStream(call, self)),
        }
        return guarded_routes(routes, restrictions)

    def model_infer(self, call: InferCall | _StreamResponder) -> None:
        """Decode the message of a call or of a stream, and begin its request."""
        call.handlers = self
        message = call.message
        try:
            self.memory.requests.admit(call, len(message))
            request = self.decoder.decode_request(message)
            if isinstance(request, TypedRequest):
                self._decode_typed(request, call)
                return
            if self.order.held and self.order.wait_if_held(request.sequence_key, partial(call.begin, request)):
                return
            call.begin(request)
        except ServeError as error:
            call.refuse(error)

    def _decode_typed(self, typed: TypedRequest, call: InferCall | _StreamResponder) -> None:
        """Decode typed contents, large ones step by step, then begin the request. Later requests of its sequence
        wait."""

        def decode() -> None:
            self.order.hold(typed.request.sequence_key)
            steps = self._decode_in_steps(typed, call)
            if len(call.message) > DECODED_AT_ONCE:
                self.service.plane.work_off(steps)
            else:
                result_of(steps)

        if not self.order.wait_if_held(typed.request.sequence_key, decode):
            decode()

    def _decode_in_steps(self, typed: TypedRequest, call: InferCall | _StreamResponder) -> Steps[None]:
        try:
            request = yield from typed.decode(partial(self.memory.requests.admit, call))
        except ServeError as error:
            call.refuse(error)
        except Exception as error:
            call.refuse(internal(f"{type(error).__name__}: {error}"))
            raise
        else:
            call.begin(request)
        finally:
            self.order.release(typed.request.sequence_key)

    def begin_exit(self) -> None:
        """Let streams end as soon as their requests are answered, and accept no further requests on them."""
        self.is_exiting = True
        for stream in list(self.streams):
            stream.end_if_done()


class InferCall(ServerUnaryCall):
    """A call of ModelInfer, and the responder of its request."""

    takes_one = True
    protocol = "GRPC"

    __slots__ = ("handlers",)

    handlers: InferenceHandlers

    def begin(self, request: InferRequest) -> None:
        handlers = self.handlers
        try:
            if handlers.forwarding is not None:
                request.head = handlers.forwarding.forward(request.head, self.metadata)
            request.deadline = self.deadline
            handlers.service.infer(request, self)
        except ServeError as error:
            self.refuse(error)

    def refuse(self, error: ServeError) -> None:
        self.send(error)
        self.handlers.service.refuse(error, partial(refused_request_id, self.message))

    def origin(self) -> RequestOrigin:
        return _origin(self)

    def expect_many(self) -> None:
        raise unimplemented(NOT_FOR_DECOUPLED["GRPC"])

    def send(self, answer: Answer, final: bool = True) -> None:
        if not isinstance(answer, InferResponse):
            error = answer or internal("the model ended the request without a response")
            self.reply_error(self.handlers.service.paths.without(error))
            return
        if answer.is_large or (answer.is_typed and sum(map(len, answer.data)) > DECODED_AT_ONCE):
            self.handlers.service.plane.work_off(self._reply_in_steps(answer))
            return
        if answer.is_typed:
            result_of(self._reply_in_steps(answer))
            return
        try:
            message = b"".join(self.handlers.encoder.parts(answer))
        except ServeError as error:
            self.send(error)
        else:
            self.reply(message)

    def _reply_in_steps(self, response: InferResponse) -> Steps[None]:
        try:
            parts = (yield from typed_parts(response)) if response.is_typed else self.handlers.encoder.parts(response)
            message = yield from join_large(parts)
        except ServeError as error:
            self.send(error)
        else:
            self.reply(message)


class InferenceStream:
    """One ModelStreamInfer call. Its requests run concurrently. Answers go out in the order of the requests, those of
    decoupled models as soon as the model sends them.

    An error belongs to its request: it goes out as error_message, and the stream stays open.
    """

    def __init__(self, call: StreamCall, handlers: InferenceHandlers) -> None:
        self.call = call
        self.handlers = handlers
        self._sequencer = ResponseSequencer()
        self._half_closed = False
        self.cancelled = False
        self.watchers: set[_StreamResponder] = set()
        """Responders to call if the client leaves."""
        handlers.streams.add(self)
        self.end_if_done()

    # Called by the transport.

    def on_message(self, message: bytes) -> None:
        responder = _StreamResponder(self, self._sequencer.ticket(), message)
        try:
            self.handlers.model_infer(responder)
        except BaseException:
            self.handlers.memory.requests.release(responder)
            raise

    def on_half_close(self) -> None:
        self._half_closed = True
        self.end_if_done()

    def on_cancel(self) -> None:
        self.cancelled = True
        watchers = list(self.watchers)
        self.watchers.clear()
        for watcher in watchers:
            watcher.cancel()
        self.handlers.streams.discard(self)

    # Called by the responders.

    def send_last(self, message: bytes | None) -> None:
        """Send the last response to a request; None = the request ends without another response."""
        if message is not None:
            self.call.send(message)
        self.call.request_next()
        self.end_if_done()

    # The end of the stream.

    def end_if_done(self) -> None:
        if self.call.unanswered or not (self._half_closed or self.handlers.is_exiting):
            return
        if self._half_closed:
            self.call.finish(StatusCode.OK, "")
        else:
            self.call.finish(StatusCode.UNAVAILABLE, SERVER_EXITING)
        self.handlers.streams.discard(self)


@dataclass(slots=True, eq=False)
class _StreamResponder(Cancellable):
    """Sends the answers of a request on its stream."""

    _stream: InferenceStream
    _ticket: Ticket
    message: bytes
    handlers: InferenceHandlers = field(init=False)
    takes_one: bool = field(default=False, init=False)
    protocol: str = field(default="GRPC", init=False)
    held_bytes: int = field(default=0, init=False)
    head: RequestHead | None = field(default=None, init=False)
    request_id: str = field(default="", init=False)
    is_accepted: bool = field(default=False, init=False)
    """While this is False, errors are refusals of the request; afterwards they are answers of the model."""
    _ticket_ended: bool = field(default=False, init=False)

    def begin(self, request: InferRequest) -> None:
        call, handlers = self._stream.call, self.handlers
        try:
            if handlers.forwarding is not None:
                request.head = handlers.forwarding.forward(request.head, call.metadata)
            self.head, self.request_id = request.head, request.id
            if handlers.is_exiting:
                raise ServeError(StatusCode.UNAVAILABLE, SERVER_EXITING)
            request.deadline = call.deadline
            request.in_turn = True
            handlers.service.infer(request, self)
        except ServeError as error:
            self.refuse(error)
        else:
            self.is_accepted = True

    def refuse(self, error: ServeError) -> None:
        message = self.message
        self.send(error)
        self.handlers.service.refuse(error, partial(refused_request_id, message))

    def origin(self) -> RequestOrigin:
        return _origin(self._stream.call)

    def expect_many(self) -> None:
        """Free the request's turn: its responses go out as they come, and no other answer waits for them."""
        self._ticket_ended = True
        self._ticket.end()

    def send(self, answer: Answer, final: bool = True) -> None:
        handlers = self.handlers
        try:
            if answer is None:
                head, message = self.head, None
                if head is not None and head.parameters.get("triton_enable_empty_final_response") is True:
                    last = InferResponse.of(head.model_name, head.model_version, self.request_id, ())
                    message = handlers.encoder.encode_stream_response(last, True)
            elif isinstance(answer, ServeError):
                message = self._error_message(answer, final)
            elif answer.is_large:
                handlers.service.plane.work_off(self._answer_large(answer, final))
                return
            else:
                message = handlers.encoder.encode_stream_response(answer, final)
        except ServeError as error:
            message = self._error_message(error, final)
        self._answer(message, final)

    def _answer_large(self, response: InferResponse, final: bool) -> Steps[None]:
        try:
            message = yield from join_large(self.handlers.encoder.stream_parts(response, final))
        except ServeError as error:
            message = self._error_message(error, final)
        self._answer(message, final)

    def _error_message(self, error: ServeError, final: bool) -> bytes:
        handlers, head = self.handlers, self.head
        text = handlers.service.paths.hide(error.text)
        if head is not None and self.is_accepted and not error.is_refusal:
            return handlers.encoder.encode_stream_error(text, self.request_id, head.model_name, final)
        return handlers.encoder.encode_stream_error(text, self.request_id)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        if self._stream.cancelled:
            callback()
        else:
            self.on_cancel = callback
            self._stream.watchers.add(self)

    def _answer(self, message: bytes | None, final: bool = True) -> None:
        if not final and message is not None:
            self._stream.call.send(message)
            return
        self._stream.watchers.discard(self)
        self.handlers.memory.requests.release(self)
        # The callback refers to the queued request, which refers to this responder. The message would otherwise stay
        # until the answers before this one have been sent.
        self.message = b""
        if self.on_cancel is not None:
            self.on_cancel = None
        if self._ticket_ended:
            self._stream.send_last(message)
        else:
            self._ticket.send(lambda: self._stream.send_last(message))


def _origin(call: UnaryCall | StreamCall) -> RequestOrigin:
    """Return the request's source. gRPC does not report when the first bytes came, so both times are the present."""
    now_ns = time.monotonic_ns()
    headers = {key: value for key, value in call.metadata if isinstance(value, str)}
    return RequestOrigin("GRPC", (now_ns, now_ns), headers, address_of(call.peer))
