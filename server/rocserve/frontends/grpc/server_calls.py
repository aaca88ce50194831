"""Implements unary calls and streams on the transport's completion queue.

The tag of every operation is a function that takes the operation's event, see `server`. On the loop's thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from grpc._cython import cygrpc

from rocserve.core.errors import ServeError, StatusCode, invalid_argument
from rocserve.frontends.grpc.open_calls import Event, OpenCall, OpenCalls
from rocserve.frontends.grpc.transport import StreamReceiver, StreamRoute, UnaryRoute

_SendInitialMetadata = cygrpc.SendInitialMetadataOperation
_SendMessage = cygrpc.SendMessageOperation
_SendStatus = cygrpc.SendStatusFromServerOperation
ReceiveMessage = cygrpc.ReceiveMessageOperation
_ReceiveClose = cygrpc.ReceiveCloseOnServerOperation

# Constant operations keep no reference to a call, and may be in several batches together.
_NO_METADATA = _SendInitialMetadata((), 0)
_OK = _SendStatus((), 0, b"", 0)

# Marks a call whose client is known to be gone.
_GONE: list[Callable[[], None]] = []


def _ignore(event: Event) -> None:
    """The tag of operations whose end needs no action."""


def _status_text(text: str) -> bytes:
    """Return the text, cut to the limit."""
    encoded = text.encode(errors="replace")
    # Bytes. Trailers carry the text percent-encoded (up to three times as long); clients refuse more than 8 KiB.
    limit = 2000
    if len(encoded) <= limit:
        return encoded
    return (encoded[:limit].decode(errors="ignore") + " ...").encode()


def _status(code: StatusCode, text: str, trailing_metadata: tuple[tuple[str, str], ...] = ()) -> Any:
    return _SendStatus(trailing_metadata, int(code), _status_text(text), 0)


def refuse(event: Event, code: StatusCode, text: str) -> None:
    event.call.start_server_batch((_NO_METADATA, _status(code, text)), _ignore)


class ServerUnaryCall(OpenCall):
    __slots__ = ("_calls", "_route", "_watchers", "message")

    def __init__(self, calls: OpenCalls, event: Event, route: UnaryRoute) -> None:
        # Written without super(), because every request makes one of these.
        self._calls = calls
        self._event = event
        self._call = event.call
        self._route = route
        self._watchers: list[Callable[[], None]] | None = None
        self.message = b""
        self.held_bytes = 0

    def on_message(self, event: Event) -> None:
        self._calls.waiting.since.pop(self, None)
        message = event.batch_operations[0].message()
        if message is None:
            # The client sent nothing; or the core has ended the call (too large, cancelled), and drops this reply.
            self.reply_error(invalid_argument("expected one request message, got none"))
            return
        self.message = message
        try:
            self._route.handler(self)
        except Exception as error:
            self.reply_error(self._calls.failures.error_of(self.method, error))

    def reply(self, message: bytes) -> None:
        calls = self._calls
        operations = (_NO_METADATA, _SendMessage(message, 0), _OK)
        if self not in calls.live:
            self._drop()
            return
        try:
            memory = calls.memory
            memory.answers.take_over(self, len(message), memory.requests)
        except ServeError as error:
            self.reply_error(error)
            return
        calls.sending[self] = time.monotonic()
        try:
            self._end(operations, self._on_sent)
        except BaseException:
            self._on_sent(None)
            raise

    def reply_error(self, error: ServeError) -> None:
        self._drop()
        if self in self._calls.live:
            # gRPC's own retries wait for so many milliseconds.
            pushback = (
                (("grpc-retry-pushback-ms", str(round(1000 * error.retry_seconds))),) if error.retry_seconds else ()
            )
            self._end((_NO_METADATA, _status(error.code, error.text, pushback)), _ignore)

    end_waiting = reply_error

    @property
    def is_watched(self) -> bool:
        return bool(self._watchers)

    def _drop(self) -> None:
        """Release the request's memory, unless an answer is being sent."""
        if self not in self._calls.sending:
            self._calls.memory.requests.release(self)

    def _on_sent(self, event: Event) -> None:
        self._calls.sending.pop(self, None)
        self._calls.memory.answers.release(self)

    def _end(self, operations: tuple[Any, ...], on_sent: Callable[[Event], None]) -> None:
        live = self._calls.live
        live.remove(self)
        try:
            error = self._call.start_server_batch(operations, on_sent)
        except BaseException:
            live.add(self)
            raise
        if error:
            live.add(self)
            raise ValueError(f"gRPC refused the answer (call error {error})")

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        watchers = self._watchers
        if watchers is _GONE:
            callback()
        elif watchers is not None:
            watchers.append(callback)
        else:
            self._watchers = [callback]
            if not self._calls.closed:
                self._call.start_server_batch((_ReceiveClose(0),), self._on_close)

    def _on_close(self, event: Event) -> None:
        try:
            self._calls.live.remove(self)
        except KeyError:
            # The usual end of a call: it has been answered. The watchers refer to the request, which refers to this
            # call.
            self._watchers = []
            return
        watchers, self._watchers = self._watchers or (), _GONE
        for callback in watchers:
            try:
                callback()
            except Exception as error:
                self._calls.failures.report(f"{self.method}: cannot pass a cancellation on", error)


class ServerStreamCall(OpenCall):
    """A stream. gRPC allows one send at a time; other messages wait in a bounded backlog."""

    is_stream = True

    def __init__(self, calls: OpenCalls, event: Event) -> None:
        super().__init__(event)
        self._calls = calls
        self._receiver: StreamReceiver | None = None
        self.unanswered = 0
        self._backlog: deque[bytes] = deque()
        self._sending = False
        self._sending_bytes = 0
        """The part of `held_bytes` that is being sent; the rest is in the backlog."""
        self._metadata_sent = False
        self._status: Any = None
        self._finished = False
        self._reading = False
        self._input_open = True

    def open(self, route: StreamRoute) -> None:
        waiting = self._calls.waiting
        self._calls.live.add(self)
        waiting.since[self] = waiting.checked_at
        try:
            self._receiver = route.handler(self)
        except Exception as error:
            self.reply_error(self._calls.failures.error_of(self.method, error))
        self._call.start_server_batch((_ReceiveClose(0),), self._on_close)
        self._read()

    # Receiving.

    def request_next(self) -> None:
        self.unanswered = max(0, self.unanswered - 1)
        if not self.unanswered and not self._finished:
            waiting = self._calls.waiting
            waiting.since[self] = waiting.checked_at
        self._read()

    def _read(self) -> None:
        """Ask for the next message if there is room for it and none has been asked for."""
        if self._reading or self._finished or not self._input_open or self._calls.closed:
            return
        limits = self._calls.limits
        backlog_bytes = self.held_bytes - self._sending_bytes
        if self.unanswered < limits.stream_unanswered_limit and backlog_bytes < limits.stream_backlog_bytes:
            self._reading = True
            self._call.start_server_batch((ReceiveMessage(0),), self._on_message)

    def _on_message(self, event: Event) -> None:
        message = event.batch_operations[0].message()
        receiver = self._receiver
        self._reading = False
        if message is None:
            self._input_open = False
        else:
            self.unanswered += 1
            self._calls.waiting.since.pop(self, None)
        if self._finished or receiver is None:
            return
        try:
            if message is None:
                receiver.on_half_close()
            else:
                receiver.on_message(message)
        except Exception as error:
            self.end_waiting(self._calls.failures.error_of(self.method, error))
        self._read()

    def _on_close(self, event: Event) -> None:
        self._calls.live.discard(self)
        self._calls.sending.pop(self, None)
        self._calls.waiting.since.pop(self, None)
        ended, self._finished = self._finished, True
        # A send may still be under way, and no status may follow it.
        self._status = None
        self._drop()
        # Receiver and call refer to each other; without the cycle both are freed without the garbage collector.
        receiver, self._receiver = self._receiver, None
        if ended or receiver is None:
            return
        try:
            receiver.on_cancel()
        except Exception as error:
            self._calls.failures.report(f"{self.method}: cannot pass a cancellation on", error)

    # Sending.

    def send(self, message: bytes) -> None:
        if not isinstance(message, bytes):
            raise TypeError(f"a message must be bytes, got {type(message).__name__}")
        if self._finished or self._calls.closed:
            return
        nbytes = len(message)
        try:
            self._calls.memory.answers.admit(self, nbytes)
            backlog_bytes = self.held_bytes - self._sending_bytes
            if self._sending and backlog_bytes >= self._calls.limits.stream_backlog_limit_bytes:
                text = "the client does not read: too many bytes wait to be sent on this stream"
                raise ServeError(StatusCode.RESOURCE_EXHAUSTED, text)
        except ServeError as refusal:
            self._drop()
            # The client reads nothing, so a status behind the backlog would not reach it.
            self.end_waiting(refusal)
            return
        if self._sending:
            self._backlog.append(message)
        else:
            self._sending = True
            self._sending_bytes = nbytes
            self._start_sending(message, None)

    def reply_error(self, error: ServeError) -> None:
        self.finish(error.code, error.text)

    def finish(self, code: StatusCode, text: str) -> None:
        status = _status(code, text)
        if self._finished:
            return
        self._finished = True
        self._calls.waiting.since.pop(self, None)
        self._status = status
        if not self._sending:
            self._sending = True
            self._start_sending(None, status)

    def end_waiting(self, error: ServeError) -> None:
        """Cancel the stream, and drop the messages that wait to be sent, because the client may not read."""
        self._call.cancel(int(error.code), _status_text(error.text))

    @property
    def is_watched(self) -> bool:
        return True

    def _start_sending(self, message: bytes | None, status: Any) -> None:
        if self._calls.closed:
            return
        operations: list[Any] = []
        if not self._metadata_sent:
            self._metadata_sent = True
            operations.append(_NO_METADATA)
        if message is not None:
            operations.append(_SendMessage(message, 0))
        if status is not None:
            operations.append(status)
            self._calls.live.discard(self)
        self._calls.sending[self] = time.monotonic()
        error: object
        try:
            error = self._call.start_server_batch(tuple(operations), self._on_sent if status is None else _ignore)
        except Exception as raised:
            error = raised
        if error:
            self._calls.log.error("%s: gRPC refused to send (%s); the call is cancelled", self.method, error)
            self._finished = True
            self._drop()
            self._calls.sending.pop(self, None)
            self._call.cancel(int(StatusCode.INTERNAL), "the answer could not be sent")

    def _on_sent(self, event: Event) -> None:
        self._calls.sending.pop(self, None)
        if not event.success:
            self._drop()
            return
        # A message that has been sent holds no memory.
        self._calls.memory.answers.release(self, self._sending_bytes)
        self._sending_bytes = 0
        if self._backlog:
            message = self._backlog.popleft()
            self._sending_bytes = len(message)
            self._start_sending(message, None if self._backlog else self._status)
        elif self._status is not None:
            self._start_sending(None, self._status)
        else:
            self._sending = False
        self._read()

    def _drop(self) -> None:
        """Drop the backlog and release its memory."""
        self._backlog.clear()
        self._sending_bytes = 0
        self._calls.memory.answers.release(self)
