"""Forwards all calls but inference from a front end to the server, and the answers back. `server_end.py` has the
server's side.

A front end of gRPC sends the server the method, the message, the metadata and the client's address. The server gives
them to the routes that it would serve itself, and sends back their answers. A front end of HTTP makes a message of a
client's request, as the server would, checks the client's access, and forwards only the message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Never, cast

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_memory import Holding, RequestMemory
from rocserve.core.responses import Answer
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
from rocserve.frontends.processes.link_end import FrontLinkEnd
from rocserve.links.entries import CALL, CANCEL
from rocserve.links.exchanges import Exchanges
from rocserve.plane.heap import COPIED_AT_ONCE, HeapFull, fill
from rocserve.services.access import PROTOCOLS
from rocserve.services.inference import ClientResponder

ABOUT = Struct("<I")
"""The bytes of JSON (the method's full name, the metadata and the client's address) that follow in a CALL's details,
before the client's message."""


@dataclass(slots=True, eq=False)
class ForwardedAnswers:
    """Takes the answers to one call."""

    _memory: RequestMemory
    holding: Holding
    """The holder of the call's message."""
    _take: Callable[[bytes], None]
    _fail: Callable[[ServeError], None]

    def take(self, content: bytes) -> None:
        self.release()
        self._take(content)

    def send(self, answer: Answer, final: bool = True) -> None:
        """Take the error that ends the call."""
        self.release()
        if isinstance(answer, ServeError):
            self._fail(answer)

    def release(self) -> None:
        self._memory.requests.release(self.holding)


FrontExchanges = Exchanges[tuple[ClientResponder | ForwardedAnswers, str], Never]
"""The open exchanges of a front end: what takes the answers, and a request's id."""


@dataclass(eq=False)
class Forwarding:
    """Forwards calls. On the thread of the front end's loop."""

    _memory: RequestMemory
    _link: FrontLinkEnd
    _exchanges: FrontExchanges

    def routes(self) -> Mapping[str, Route]:
        names = PROTOCOLS.keys() - {"ModelInfer", "ModelStreamInfer"}
        # The stream for which clients send one message.
        return {
            full_name(name): StreamRoute(lambda call: _ForwardedStream(self, call))
            if name == "Watch"
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
        answers = ForwardedAnswers(self._memory, Holding(), take, fail)
        self._memory.requests.admit(answers.holding, len(message))
        texts = [(key, value if isinstance(value, str) else value.decode("latin-1")) for key, value in metadata]
        about = json.dumps((method, texts, peer)).encode()
        nbytes = ABOUT.size + len(about) + len(message)
        try:
            place, view = self._link.new_slot(nbytes)
        except HeapFull:
            answers.release()
            raise
        left_out = fill(view, (ABOUT.pack(len(about)), about, message), COPIED_AT_ONCE)
        number = self._exchanges.open((answers, ""))
        self._link.copy_then(
            lambda: self._link.post_entry(CALL, number, count=int(is_checked), place=place, nbytes=nbytes),
            view,
            left_out,
            message,
        )
        return number

    def cancel(self, number: int) -> None:
        """Stop waiting for a call's answers."""
        waiting = self._exchanges.take(number, True)
        if waiting is not None:
            cast(ForwardedAnswers, waiting[0]).release()
            self._link.post_entry(CANCEL, number)

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
