"""Forwards all calls but inference from a front end to the server, and the answers back. `server_end.py` has the
server's side.

A front end of gRPC sends the server the method, the message, the metadata and the client's address. The server gives
them to the routes that it would serve itself, and sends back their answers. A front end of HTTP makes a message of a
client's request, as the server would, checks the client's access, and forwards only the message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_memory import Holding, RequestMemory
from rocserve.core.tensors import Buffer
from rocserve.frontends.grpc.transport import (
    Metadata,
    Route,
    StreamCall,
    StreamRoute,
    UnaryCall,
    UnaryRoute,
    full_name,
)
from rocserve.frontends.processes import entries
from rocserve.frontends.processes.entries import FrontLinkEnd
from rocserve.plane.heap import COPIED_AT_ONCE, HeapFull, fill
from rocserve.services.access import PROTOCOLS
from rocserve.workers.entries import ENTRY
from rocserve.workers.messages import status_code

_HANDLED_METHODS = frozenset({"ModelInfer", "ModelStreamInfer"})
_STREAM_METHODS = frozenset({"Watch"})
"""Streams for which clients send one message."""


_Waiting = tuple[Callable[[bytes], None], Callable[[ServeError], None], Holding]
"""The callbacks for a call's answers and for its error, and the holder of its message."""


@dataclass(eq=False)
class Forwarding:
    """Forwards calls. On the thread of the front end's loop."""

    _memory: RequestMemory
    _link: FrontLinkEnd
    _number: int = 0
    """The last call's number."""
    _waiting: dict[int, _Waiting] = field(default_factory=dict)

    def routes(self) -> Mapping[str, Route]:
        names = PROTOCOLS.keys() - _HANDLED_METHODS
        return {
            full_name(name): StreamRoute(lambda call: _ForwardedStream(self, call))
            if name in _STREAM_METHODS
            else UnaryRoute(self._forward)
            for name in names
        }

    def begin(
        self,
        method: str,
        message: Buffer,
        take: Callable[[bytes], None],
        fail: Callable[[ServeError], None],
        metadata: Metadata = (),
        peer: str = "",
        is_checked: bool = False,
    ) -> int:
        """Forward a call to the server, and return its number. `take` gets each answer, `fail` the error that ends the
        call. `is_checked`: the client may make the call; otherwise the server decides by metadata and peer. Raises
        ServeError (RESOURCE_EXHAUSTED) if there is no memory for the message."""
        holding = Holding()
        self._memory.requests.admit(holding, len(message))
        number = self._number = self._number % entries.LARGEST_NUMBER + 1
        texts = [(key, value if isinstance(value, str) else value.decode("latin-1")) for key, value in metadata]
        about = json.dumps((method, texts, peer)).encode()
        nbytes = len(about) + len(message)
        try:
            place, view = self._link.new_slot(nbytes)
        except HeapFull:
            self._memory.requests.release(holding)
            raise
        left_out = fill(view, (about, message), COPIED_AT_ONCE)
        entry = ENTRY.pack(entries.CALL, 0, is_checked, len(about), number, place, nbytes)
        self._link.copy_then(lambda: self._link.post(entry), view, left_out, message)
        self._waiting[number] = take, fail, holding
        return number

    def cancel(self, number: int) -> None:
        """Stop waiting for a call's answers."""
        if number in self._waiting:
            self._memory.requests.release(self._waiting.pop(number)[2])
            self._link.post(ENTRY.pack(entries.CALL_LEFT, 0, 0, 0, number, 0, 0))

    def on_message(self, kind: int, number: int, count: int, content: bytes) -> None:
        waiting = self._waiting.get(number)
        if waiting is None:
            return  # The client has left meanwhile.
        take, fail, holding = waiting
        self._memory.requests.release(holding)
        if kind != entries.CALL_MESSAGE:
            del self._waiting[number]
        if kind == entries.CALL_END:
            fail(ServeError(status_code(count), content.decode()))
        else:
            take(content)

    def _forward(self, call: UnaryCall) -> None:
        try:
            number = self.begin(call.method, call.message, call.reply, call.reply_error, call.metadata, call.peer)
        except ServeError as error:
            call.reply_error(error)
        else:
            call.watch_cancellation(lambda: self.cancel(number))


@dataclass(eq=False)
class _ForwardedStream:
    """Forwards a stream: implements StreamReceiver."""

    _forwarding: Forwarding
    _call: StreamCall
    _number: int = 0

    def on_message(self, message: bytes) -> None:
        call = self._call
        # A new message replaces the previous one.
        self._forwarding.cancel(self._number)
        try:
            self._number = self._forwarding.begin(
                call.method, message, call.send, call.reply_error, call.metadata, call.peer
            )
        except ServeError as error:
            call.reply_error(error)
        call.request_next()

    def on_half_close(self) -> None:
        if not self._number:
            self._call.finish(StatusCode.INVALID_ARGUMENT, "expected one HealthCheckRequest, got none")

    def on_cancel(self) -> None:
        self._forwarding.cancel(self._number)
