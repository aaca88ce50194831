"""Answers in the order of arrival, for models that ask for preserve_ordering."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from rocserve.core.errors import ServeError
from rocserve.core.requests import InferResponse
from rocserve.core.serving import Responder


class ResponseOrder:
    """Holds back an answer until all requests that came before it are answered."""

    def __init__(self) -> None:
        # Re-entrant: an answer may lead to a further request of the same model, in an ensemble.
        self._lock = threading.RLock()
        self._waiting: deque[_OrderedResponder] = deque()

    def next(self, responder: Responder) -> Responder:
        """The responder of the request that arrives now."""
        ordered = _OrderedResponder(responder, self._flush)
        with self._lock:
            self._waiting.append(ordered)
        return ordered

    def _flush(self) -> None:
        # The lock is held while answering: two threads that flush at once must not overtake each other.
        with self._lock:
            while self._waiting and self._waiting[0].answer is not None:
                answer = self._waiting.popleft().answer
                if answer is not None:
                    answer()


class _OrderedResponder:
    def __init__(self, responder: Responder, flush: Callable[[], None]) -> None:
        self._responder = responder
        self._flush = flush
        self.answer: Callable[[], None] | None = None

    def send(self, response: InferResponse, final: bool = True) -> None:
        # The tensors are views on memory that is used again when this call returns.
        response.outputs = [tensor.copied() for tensor in response.outputs]
        self.answer = lambda: self._responder.send(response, final)
        self._flush()

    def fail(self, error: ServeError) -> None:
        self.answer = lambda: self._responder.fail(error)
        self._flush()

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        self._responder.watch_cancellation(callback)
