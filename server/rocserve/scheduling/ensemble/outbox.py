"""The answers of one request to an ensemble, on their way to whoever waits: in order, one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from rocserve.core.errors import ServeError
from rocserve.core.requests import InferResponse
from rocserve.core.serving import Responder


class OutboxOwner(Protocol):
    """Handed over with each call, for an outbox that kept its owner would keep the client's data until the next
    collection."""

    def sending(self, iteration: int) -> None:
        """Called right before the answer of an iteration goes, unless it is the last word."""

    def end(self, failed: bool) -> None:
        """Called right before the last word, with whether that is an error."""

    def silence(self) -> ServeError | None:
        """The error of a request that ends without any answer; None: that is fine."""


class Outbox:
    """Callable from any thread. Nothing is sent but by `flush` and `fail`, and never under a lock."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._lock = threading.Lock()
        self._answers: dict[int, InferResponse] = {}
        """By iteration."""
        self._next = 0
        self._is_sending = False
        self._is_closed = False
        self._error: ServeError | None = None
        self._has_ended = False

    def add(self, iteration: int, answer: InferResponse | ServeError | None, is_last: bool) -> None:
        """An answer, which may go once all of the iterations before it have gone. `is_last`: no further one comes."""
        with self._lock:
            self._is_closed = self._is_closed or is_last
            if isinstance(answer, ServeError):
                self._error = answer
            elif answer is not None:
                self._answers[iteration] = answer

    def fail(self, error: ServeError, owner: OutboxOwner) -> None:
        """End with an error; answers that have not gone are dropped."""
        with self._lock:
            self._is_closed = True
            self._error = self._error or error
            self._answers.clear()
        self.flush(owner)

    def flush(self, owner: OutboxOwner) -> None:
        """Send what is due. Where another thread is sending, it takes that along."""
        with self._lock:
            if self._is_sending:
                return
            self._is_sending = True
        while (send := self._due(owner)) is not None:
            send()

    def _due(self, owner: OutboxOwner) -> Callable[[], None] | None:
        """The next thing to be done; None, and nobody is sending any more."""
        with self._lock:
            response = self._answers.pop(self._next, None)
            if response is not None:
                self._next += 1
                self._has_ended = self._is_closed and not self._answers
                return self._sending(response, self._next - 1, self._has_ended, owner)
            if self._is_closed and not self._has_ended:
                self._has_ended = True
                return self._ending(self._error if self._next or self._error else owner.silence(), owner)
            self._is_sending = False
            return None

    def _sending(
        self, response: InferResponse, iteration: int, is_last: bool, owner: OutboxOwner
    ) -> Callable[[], None]:
        def send() -> None:
            if is_last:
                owner.end(False)
            else:
                owner.sending(iteration)
            self._responder.send(response, is_last)

        return send

    def _ending(self, error: ServeError | None, owner: OutboxOwner) -> Callable[[], None]:
        def end() -> None:
            owner.end(error is not None)
            if error is None:
                self._responder.end()
            else:
                self._responder.fail(error)

        return end
