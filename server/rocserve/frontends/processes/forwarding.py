"""Forwarding of all calls but inference: a front end's clients ask it, and the server answers.

A front end of gRPC tells the server of a call with all that its client sent, and where that is; the server hands it to
the same routes that it would serve itself, and tells what they say. One of HTTP makes a message of what its client
asks, as the server would, decides whether the client may, and forwards no more than that message.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_memory import Holding, RequestMemory
from rocserve.frontends.grpc.guards import full_name
from rocserve.frontends.grpc.transport import (
    Metadata,
    Route,
    StreamCall,
    StreamReceiver,
    StreamRoute,
    UnaryCall,
    UnaryRoute,
    unknown_method,
)
from rocserve.frontends.processes.control_socket import (
    Begin,
    Cancelled,
    ControlSocket,
    Finish,
    HalfClosed,
    Next,
    Reply,
    StreamMessage,
)
from rocserve.observability.failures import RequestFailures
from rocserve.services.restrictions import PROTOCOLS
from rocserve.workers.messages import status_code

_OWN = frozenset({"ModelInfer", "ModelStreamInfer"})
"""Of a front end."""
_STREAMS = frozenset({"Watch"})


def _as_text(metadata: Metadata) -> tuple[tuple[str, ...], ...]:
    return tuple([(key, value if isinstance(value, str) else value.decode("latin-1")) for key, value in metadata])


def _as_metadata(pairs: tuple[tuple[str, ...], ...]) -> Metadata:
    return [(key, value.encode("latin-1") if key.endswith("-bin") else value) for key, value in pairs]


class Forwarding:
    """A front end's side. On its loop's thread."""

    def __init__(self, memory: RequestMemory, control: ControlSocket) -> None:
        self._memory = memory
        self._control = control
        self._numbers = itertools.count(1)
        self._open: dict[int, _ForwardedUnary | _ForwardedStream] = {}

    def routes(self) -> Mapping[str, Route]:
        """By full names."""
        names = PROTOCOLS.keys() - _OWN
        return {
            full_name(name): StreamRoute(self._forward_stream) if name in _STREAMS else UnaryRoute(self.forward)
            for name in names
        }

    def on_message(self, number: int, head: Any, body: bytes) -> None:
        """From the server, of a call."""
        call = self._open.get(number)
        if call is None:
            # Its client has gone meanwhile.
            return
        if call.take(head, body):
            del self._open[number]

    def send(self, number: int, head: Any, body: bytes = b"") -> None:
        self._control.send(number, head, body)

    def cancel(self, number: int) -> None:
        if self._open.pop(number, None) is not None:
            self.send(number, Cancelled())

    def forward(self, call: UnaryCall) -> None:
        """Have the server answer a call."""
        holding = Holding()
        try:
            self._memory.admit(holding, len(call.message))
        except ServeError as error:
            call.reply_error(error)
            return
        number = next(self._numbers)
        forwarded = self._open[number] = _ForwardedUnary(call, lambda: self._memory.release(holding))
        self._begin(number, call, call.message)

        def cancel() -> None:
            forwarded.release()
            self.cancel(number)

        call.watch_cancellation(cancel)

    def _forward_stream(self, call: StreamCall) -> StreamReceiver:
        number = next(self._numbers)
        stream = self._open[number] = _ForwardedStream(self, number, call)
        self._begin(number, call, b"")
        return stream

    def _begin(self, number: int, call: UnaryCall | StreamCall, message: bytes) -> None:
        deadline = call.deadline
        left = None if deadline is None else deadline - time.monotonic()
        self.send(number, Begin(call.method, _as_text(call.metadata), call.peer, left), message)


class _ForwardedUnary:
    def __init__(self, call: UnaryCall, release: Callable[[], None]) -> None:
        self._call = call
        self.release = release
        """Lets go of its message's memory."""

    def take(self, head: Any, body: bytes) -> bool:
        """What the server says; whether it was the last."""
        self.release()
        if isinstance(head, Reply):
            self._call.reply(body, _as_metadata(head.trailing_metadata))
        else:
            error = ServeError(status_code(head.code), head.text)
            self._call.reply_error(error, _as_metadata(head.trailing_metadata))
        return True


class _ForwardedStream:
    """Implements StreamReceiver."""

    def __init__(self, forwarding: Forwarding, number: int, call: StreamCall) -> None:
        self._forwarding = forwarding
        self._number = number
        self._call = call

    def take(self, head: Any, body: bytes) -> bool:
        """What the server says; whether it was the last."""
        if isinstance(head, StreamMessage):
            self._call.send(body)
        elif isinstance(head, Next):
            self._call.request_next()
        else:
            self._call.finish(status_code(head.code), head.text, _as_metadata(head.trailing_metadata))
            return True
        return False

    def on_message(self, message: bytes) -> None:
        self._forwarding.send(self._number, StreamMessage(), message)

    def on_half_close(self) -> None:
        self._forwarding.send(self._number, HalfClosed())

    def on_cancel(self) -> None:
        self._forwarding.cancel(self._number)


class ForwardedCalls:
    """The server's side: the calls of one front end. On the asyncio loop's thread, and so are all answers."""

    def __init__(self, routes: Mapping[str, Route], log: logging.Logger) -> None:
        self._routes = routes
        self._failures = RequestFailures(log)
        self._control: ControlSocket | None = None
        self._open: dict[int, _UnaryCall | _StreamCall] = {}

    def begin(self, control: ControlSocket) -> None:
        self._control = control

    def on_message(self, number: int, head: Any, body: bytes) -> None:
        """Raises: ValueError: it is nothing that a front end says."""
        if isinstance(head, Begin):
            self._begin(number, head, body)
            return
        call = self._open.get(number)
        if call is None:
            # It has been answered meanwhile.
            return
        if isinstance(head, Cancelled):
            del self._open[number]
            call.cancelled()
        elif isinstance(call, _StreamCall) and isinstance(head, StreamMessage | HalfClosed):
            self._guarded(call, lambda: call.take(head, body))
        else:
            raise ValueError(f"a {type(head).__name__} of {call.method}")

    def cancel_all(self) -> None:
        """The front end has ended, and its clients know."""
        calls, self._open = self._open, {}
        for call in calls.values():
            call.cancelled()

    def say(self, number: int, head: Any, body: bytes = b"") -> None:
        """To the client of an open call; to nobody where it has ended."""
        if number in self._open:
            assert self._control is not None
            self._control.send(number, head, body)

    def end(self, number: int, head: Any, body: bytes = b"") -> None:
        """The last of a call."""
        self.say(number, head, body)
        self._open.pop(number, None)

    def _begin(self, number: int, head: Begin, body: bytes) -> None:
        route = self._routes.get(head.method)
        if isinstance(route, UnaryRoute):
            handler, call = route.handler, _UnaryCall(self, number, head, body)
            self._open[number] = call
            self._guarded(call, lambda: handler(call))
        elif isinstance(route, StreamRoute):
            stream = self._open[number] = _StreamCall(self, number, head)
            self._guarded(stream, lambda: stream.open(route))
        else:
            raise ValueError(unknown_method(head.method))

    def _guarded(self, call: _UnaryCall | _StreamCall, handle: Callable[[], None]) -> None:
        try:
            handle()
        except Exception as error:
            told = self._failures.error_of(call.method, error)
            call.finish(told.code, told.text)


class _Call:
    """What calls of both kinds share."""

    def __init__(self, calls: ForwardedCalls, number: int, head: Begin) -> None:
        self._calls = calls
        self._number = number
        self.method = head.method
        self.metadata = _as_metadata(head.metadata)
        self.peer = head.peer
        self.deadline = None if head.seconds_left is None else time.monotonic() + head.seconds_left

    def finish(self, code: StatusCode, text: str, trailing_metadata: Metadata = ()) -> None:
        self._calls.end(self._number, Finish(int(code), text, _as_text(trailing_metadata)))


class _UnaryCall(_Call):
    """Implements transport.UnaryCall."""

    held_bytes = 0

    def __init__(self, calls: ForwardedCalls, number: int, head: Begin, message: bytes) -> None:
        super().__init__(calls, number, head)
        self.message = message
        self._watchers: list[Callable[[], None]] = []
        self._is_cancelled = False

    def reply(self, message: bytes, trailing_metadata: Metadata = ()) -> None:
        self._calls.end(self._number, Reply(_as_text(trailing_metadata)), message)

    def reply_error(self, error: ServeError, trailing_metadata: Metadata = ()) -> None:
        self.finish(error.code, error.text, trailing_metadata)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        if self._is_cancelled:
            callback()
        else:
            self._watchers.append(callback)

    def cancelled(self) -> None:
        self._is_cancelled = True
        for callback in self._watchers:
            callback()


class _StreamCall(_Call):
    """Implements transport.StreamCall."""

    def __init__(self, calls: ForwardedCalls, number: int, head: Begin) -> None:
        super().__init__(calls, number, head)
        self._receiver: StreamReceiver | None = None

    def open(self, route: StreamRoute) -> None:
        self._receiver = route.handler(self)

    def take(self, head: StreamMessage | HalfClosed, body: bytes) -> None:
        if self._receiver is None:
            return
        if isinstance(head, StreamMessage):
            self._receiver.on_message(body)
        else:
            self._receiver.on_half_close()

    def cancelled(self) -> None:
        if self._receiver is not None:
            self._receiver.on_cancel()

    def send(self, message: bytes) -> None:
        self._calls.say(self._number, StreamMessage(), message)

    def request_next(self) -> None:
        self._calls.say(self._number, Next())
