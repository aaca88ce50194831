"""The responder of a request that came to a front end: what its answer is led back by."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rocserve.core.errors import ServeError, unimplemented
from rocserve.core.requests import Answer
from rocserve.core.tensors import Buffer
from rocserve.frontends.processes.entries import MANY, SINGLE, WATCH
from rocserve.plane.heap import HeapFull
from rocserve.services.inference import NOT_FOR_DECOUPLED
from rocserve.services.observation import RequestOrigin

if TYPE_CHECKING:
    from rocserve.frontends.processes.server_end import FrontLink


class RemoteResponder:
    """Implements observation.ClientResponder for a request of a front, whose slot the front gets back when nobody holds
    this any more."""

    _callbacks: list[Callable[[], None]] | None = None
    _has_left = False
    held_bytes = 0
    is_accepted = False
    """An error before is the request's own, one after is an answer of the model."""

    def __init__(self, link: FrontLink, token: int, flags: int, place: int, origin: Buffer) -> None:
        """`flags`, `place`: of the request's entry."""
        self._link = link
        self._token = token
        self.takes_one = bool(flags & SINGLE)
        self._place = place
        self._origin = origin

    def __del__(self) -> None:
        self._link.give_back(self._place)

    def origin(self) -> RequestOrigin:
        """See ClientResponder. A request that came before the server asked for origins has none."""
        if not self._origin:
            now_ns = time.monotonic_ns()
            return RequestOrigin(self._link.protocol, (now_ns, now_ns), {}, "")
        protocol, received_ns, headers, address = json.loads(bytes(self._origin))
        return RequestOrigin(protocol, tuple(received_ns), headers, address)

    def expect_many(self) -> None:
        """See Responder."""
        if self.takes_one:
            raise unimplemented(NOT_FOR_DECOUPLED[self._link.protocol])
        self._link.tell(MANY, self._token)

    def send(self, answer: Answer, final: bool = True) -> None:
        """See Responder."""
        if answer is None:
            self._link.end(self._token)
        elif isinstance(answer, ServeError):
            self._link.fail(self._token, answer, final, not self.is_accepted)
        else:
            try:
                self._link.answer(self._token, answer, final)
            except HeapFull as error:
                self._link.fail(self._token, error, final)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """See Responder."""
        if self._has_left:
            callback()
            return
        if self._callbacks is None:
            self._callbacks = []
            self._link.tell(WATCH, self._token)
        self._callbacks.append(callback)

    def left(self) -> None:
        """Its client has gone."""
        self._has_left = True
        callbacks, self._callbacks = self._callbacks or (), None
        for callback in callbacks:
            callback()
