"""The server's end of a conversation: what a model that sees each request for itself says beside its batches.

Responses to requests that outlive their batch come in, calls of other models come in and are answered.
"""

from __future__ import annotations

import errno
import itertools
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rocserve.backends.request_model import Answer, ModelCall, Result
from rocserve.core.errors import ServeError, internal, invalid_argument, unavailable
from rocserve.core.trace import Trace
from rocserve.workers.completion import CompletionThread, TimerHandle
from rocserve.workers.conversation_wire import (
    AGAIN,
    ANSWER,
    CALL,
    END,
    Message,
    MessageReader,
    Parcel,
    pack_answer,
    pack_cancelled,
)
from rocserve.workers.wire import LONGEST_TEXT, MAXIMUM_DATAGRAM

OnAnswer = Callable[[Result | None, bool], None]
"""Takes a response, an error or nothing, or that the request is to be sent again; and whether it is the last. Tensors
are valid until it returns."""

_RETRY_SECONDS = 0.002
"""After the socket was full."""
STALL_SECONDS = 60.0
"""A worker that reads nothing for this long is broken: its model holds Python's lock for good."""
MOST_WAITING = 16384
"""Messages that may wait for a worker to read."""

MOST_CALLS = 4096
"""That a worker may have under way: they wait in the queues of other models, beside clients' requests."""

_MOST_DRAINED = 4096
"""Messages of a worker that has ended; its socket holds fewer, unless a process that it left behind goes on."""

_FULL = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS})


class ConversationEnded(ServeError):
    """The worker has ended, and with it what was open on its conversation."""


class CallStarter(Protocol):
    """Runs what models call (rocserve.scheduling.model_calls)."""

    def __call__(self, call: ModelCall, opened: OpenCall) -> None:
        """Start a call; it is answered through `opened`, now or later. On the completion thread, never blocks."""


class Conversation:
    """One worker's. Callbacks come on the completion thread; the rest may be called from any."""

    def __init__(self, completion: CompletionThread, start_call: CallStarter, log: logging.Logger) -> None:
        self._completion = completion
        self._start_call = start_call
        self._log = log
        self._on_broken: Callable[[str], None] | None = None
        self._socket, self.peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        """`peer` is the worker's end, for the one who hands it over and closes it."""
        for end in (self._socket, self.peer):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAXIMUM_DATAGRAM)
        self._reader = MessageReader(self._socket, completion.receive_buffer)
        self._lock = threading.Lock()
        """Guards what is sent and what waits to be."""
        self._waiting: deque[Parcel] = deque()
        self._waiting_since = 0.0
        self._retry: TimerHandle | None = None
        self._closed = False
        self._listening = False
        self._numbers = itertools.count(1)
        self._requests: dict[int, OnAnswer] = {}
        self._calls: dict[int, OpenCall] = {}
        self.traces: dict[int, Trace] = {}
        """Of the open requests that are traced, by their numbers: calls that a model makes for them belong to them."""
        self.said = 0
        """How many messages the model has sent."""

    @property
    def open_requests(self) -> int:
        """Those that the model has to answer."""
        return len(self._requests)

    @property
    def open_calls(self) -> int:
        """Those that the model waits for."""
        return len(self._calls)

    def has_unread(self) -> bool:
        """Whether a message of the model is there to be read."""
        with self._lock:
            if self._closed:
                return False
            readable = select.poll()
            readable.register(self._socket, select.POLLIN)
            return bool(readable.poll(0))

    def listen(self, on_broken: Callable[[str], None]) -> None:
        """Begin to read. `on_broken` is called once when the worker's end is closed or talks nonsense."""
        self._on_broken = on_broken
        self._listening = True
        self._completion.register(self._socket.fileno(), self._on_readable)

    # Requests

    def open_request(self, on_answer: OnAnswer) -> int:
        """The number of a request that is about to be sent to the worker; what the model says to it over the
        conversation comes to `on_answer`, until a last answer, `close_request`, or the worker's end."""
        number = next(self._numbers)
        self._requests[number] = on_answer
        self._completion.awaited.add(self)
        return number

    def close_request(self, number: int) -> None:
        """The request has been answered."""
        self._requests.pop(number, None)
        if self.traces:
            self.traces.pop(number, None)
        self._await_no_longer()

    def cancel(self, number: int) -> None:
        """Tell the model that nobody waits for a request any more."""
        if number in self._requests:
            self._send(pack_cancelled(number))

    def _await_no_longer(self) -> None:
        """Once no request is open."""
        if not self._requests:
            self._completion.awaited.discard(self)
            if self._requests:
                # Another thread has opened one meanwhile.
                self._completion.awaited.add(self)

    # Calls

    def answer_call(self, number: int, answer: Answer | None, final: bool) -> None:
        if final and self._calls.pop(number, None) is None:
            return
        try:
            parcel = pack_answer(number, answer, final)
        except (ValueError, OSError) as error:
            parcel = pack_answer(number, internal(f"the answer to a call cannot be sent to the model: {error}"), final)
        self._send(parcel)

    # On the completion thread

    def _on_readable(self) -> None:
        try:
            message = self._reader.read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._break("it closed its conversation")
            return
        except ValueError as error:
            self._break(f"it said what cannot be read: {str(error)[:LONGEST_TEXT]}")
            return
        self._take(message)

    def _take(self, message: Message) -> None:
        self.said += 1
        match message.kind:
            case kind if kind in (ANSWER, END, AGAIN):
                on_answer = self._requests.get(message.number)
                if message.is_final:
                    self.close_request(message.number)
                if on_answer is not None:
                    on_answer(message.answer, message.is_final)
            case kind if kind == CALL and message.call is not None:
                self._open_call(message.number, message.call)
            case _:
                self._break(f"it said what only the server says: a message of kind {message.kind}")

    def _open_call(self, number: int, call: ModelCall) -> None:
        if number in self._calls:
            self._break(f"it has made two calls of the number {number}")
            return
        opened = self._calls[number] = OpenCall(self, number)
        if len(self._calls) > MOST_CALLS:
            opened.answer(unavailable(f"the model has {MOST_CALLS} calls under way, and may have no more"), True)
            return
        try:
            self._start_call(call, opened)
        except Exception as error:
            # A call says what its model likes; what it asks for may not even be a request.
            opened.answer(invalid_argument(f"the call cannot be run: {error}"), True)

    def _break(self, reason: str) -> None:
        if self._stop_listening() and self._on_broken is not None:
            self._on_broken(reason)

    def _stop_listening(self) -> bool:
        """Whether it was listening until now."""
        listening, self._listening = self._listening, False
        if listening:
            self._completion.unregister(self._socket.fileno())
        return listening

    # The end

    def drain(self) -> None:
        """On the completion thread, once the worker has ended: take what it had said before, and no more."""
        if not self._stop_listening():
            return
        for _ in range(_MOST_DRAINED):
            try:
                message = self._reader.read(socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue  # After a reset, what was sent before is still there.
            except (EOFError, OSError, ValueError):
                return
            if message.kind in (ANSWER, END, AGAIN):
                self._take(message)

    def end(self, error: ServeError) -> None:
        """On the completion thread: open requests get the error, as a ConversationEnded, calls are cancelled, all is
        given back."""
        self._stop_listening()
        with self._lock:
            self._closed = True
            self._socket.close()
            self.peer.close()
            for parcel in self._waiting:
                parcel.close()
            self._waiting.clear()
            if self._retry is not None:
                self._retry.cancel()
        self._on_broken = None
        error = ConversationEnded(error.code, error.text)
        requests, self._requests = self._requests, {}
        self._await_no_longer()
        for on_answer in requests.values():
            self._guarded(lambda told=on_answer: told(error, True))  # type: ignore[misc]
        calls, self._calls = self._calls, {}
        for opened in calls.values():
            self._guarded(opened.cancelled)

    def _guarded(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            self._log.exception("the end of a conversation could not be told to all")

    # Sending

    def _send(self, parcel: Parcel) -> None:
        with self._lock:
            if self._closed:
                parcel.close()
                return
            if not self._waiting and self._try(parcel):
                return
            if not self._waiting:
                self._waiting_since = time.monotonic()
            self._waiting.append(parcel)
            if self._retry is None:
                self._retry = self._completion.call_at(time.monotonic() + _RETRY_SECONDS, self._send_waiting)

    def _try(self, parcel: Parcel) -> bool:
        """Under the lock: False when the socket is full."""
        try:
            parcel.send(self._socket, socket.MSG_DONTWAIT)
        except OSError as error:
            if error.errno in _FULL:
                return False
            # The worker's end is closed; the completion thread finds that out for itself.
        parcel.close()
        return True

    def _send_waiting(self) -> None:
        """On the completion thread."""
        now = time.monotonic()
        with self._lock:
            self._retry = None
            if self._closed:
                return
            while self._waiting and self._try(self._waiting[0]):
                self._waiting.popleft()
                self._waiting_since = now
            stalled = now - self._waiting_since > STALL_SECONDS or len(self._waiting) > MOST_WAITING
            if self._waiting and not stalled:
                self._retry = self._completion.call_at(now + _RETRY_SECONDS, self._send_waiting)
        if self._waiting and stalled:
            self._break(f"it has not read its conversation, {len(self._waiting)} messages wait")


class OpenCall:
    """A call that a model has made, for whoever serves it."""

    def __init__(self, conversation: Conversation, number: int) -> None:
        self._conversation = conversation
        self._number = number
        self._lock = threading.Lock()
        self._cancelled = False
        self._on_cancel: list[Callable[[], None]] = []

    def answer(self, answer: Answer | None, final: bool) -> None:
        """From any thread. Tensors are copied before it returns; after the worker's end it is dropped."""
        self._conversation.answer_call(self._number, answer, final)

    def trace_of(self, request_number: int) -> Trace | None:
        """The trace of the open request of this number, which the model says that the call belongs to."""
        return self._conversation.traces.get(request_number)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """Call back, once, when the worker has ended and nobody waits for the call any more."""
        with self._lock:
            if not self._cancelled:
                self._on_cancel.append(callback)
                return
        callback()

    def cancelled(self) -> None:
        with self._lock:
            self._cancelled = True
            callbacks, self._on_cancel = self._on_cancel, []
        for callback in callbacks:
            callback()
