"""Represents a front end's requests and calls in the server: answers to them go back through the link."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from rocserve.core.errors import ServeError, StatusCode, unimplemented
from rocserve.core.exchange import Cancellable
from rocserve.core.responses import Answer
from rocserve.core.tensors import Buffer
from rocserve.frontends.grpc.transport import Metadata, StreamReceiver
from rocserve.frontends.processes.answers import FrontAnswers
from rocserve.links import entries
from rocserve.plane.heap import HeapFull
from rocserve.scheduling.batch import LinkedResponder
from rocserve.services.inference import NOT_FOR_DECOUPLED, RequestOrigin


class RemoteResponder(LinkedResponder, Cancellable):
    """Answers a front end's request. The front end gets the request's slot back when this object is freed."""

    held_bytes = 0
    is_accepted = False
    """While this is False, errors are refusals of the request; afterwards they are answers of the model."""

    def __init__(
        self, link: FrontAnswers, token: int, takes_one: bool, protocol: str, place: int, origin: bytes
    ) -> None:
        self.link: FrontAnswers = link
        self.token = token
        self.takes_one = takes_one
        self.protocol = protocol
        self._place = place
        self._origin = origin

    def __del__(self) -> None:
        self.link.give_back(self._place)

    def origin(self) -> RequestOrigin:
        """Return the request's origin, without headers and address if the front end did not know that it is wanted."""
        if not self._origin:
            now_ns = time.monotonic_ns()
            return RequestOrigin(self.protocol, (now_ns, now_ns), {}, "")
        protocol, received_ns, headers, address = json.loads(self._origin)
        return RequestOrigin(protocol, tuple(received_ns), headers, address)

    def expect_many(self) -> None:
        if self.takes_one:
            raise unimplemented(NOT_FOR_DECOUPLED[self.protocol])
        self.link.post(entries.MANY, self.token)

    def send(self, answer: Answer, final: bool = True) -> None:
        if answer is None:
            self.link.end(self.token)
        elif isinstance(answer, ServeError):
            self.link.fail(self.token, answer, final, not self.is_accepted)
        else:
            try:
                self.link.answer(self.token, answer, final)
            except HeapFull as error:
                self.link.fail(self.token, error, final)


@dataclass(eq=False)
class ForwardedCall(Cancellable):
    """A call of a front end for the server's own routes: implements UnaryCall and StreamCall."""

    _link: FrontAnswers
    _number: int
    _place: int
    method: str
    peer: str
    metadata: Metadata
    message: Buffer
    """Lies at `_place`, which the front end gets back when this object is freed."""
    receiver: StreamReceiver | None = None
    """None unless the call is a stream."""
    deadline: float | None = None
    """The front end enforces deadlines."""
    unanswered = 1

    def __del__(self) -> None:
        # Garbage collection may run this on any thread, and there may be no other message that wakes the plane.
        self._link.give_back(self._place)
        self._link.wake()

    def reply(self, message: bytes) -> None:
        self._link.reply(self._number, message, True)

    def reply_error(self, error: ServeError) -> None:
        self._link.end_call(self._number, error)

    def send(self, message: bytes) -> None:
        self._link.reply(self._number, message, False)

    def finish(self, code: StatusCode, text: str) -> None:
        self._link.end_call(self._number, ServeError(code, text))

    def request_next(self) -> None:
        """Do nothing: a forwarded stream has only one message."""

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """Do nothing: a call continues when its client leaves."""

    def cancel(self) -> None:
        self._link.exchanges.end(self._number)
        if self.receiver is not None:
            self.receiver.on_cancel()
