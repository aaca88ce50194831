"""Answers in the order of arrival: for models with preserve_ordering, and for the requests of one stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from rocserve.core.errors import ServeError
from rocserve.core.requests import InferResponse
from rocserve.core.serving import Responder


class AnswerOrder:
    """Holds back an answer until all that took their turn earlier are given."""

    def __init__(self) -> None:
        # Re-entrant: an answer may lead to a further request of the same model, in an ensemble. Held while answering,
        # so that two threads cannot overtake each other.
        self._lock = threading.RLock()
        self._turns: deque[Turn] = deque()

    def take_turn(self) -> Turn:
        turn = Turn(self)
        with self._lock:
            self._turns.append(turn)
        return turn

    def flush(self) -> None:
        with self._lock:
            while self._turns and self._turns[0].answer is not None:
                turn = self._turns.popleft()
                # The answer knows its responder, which knows its turn.
                answer, turn.answer = turn.answer, None
                if answer is not None:
                    answer()


class Turn:
    """The place of one answer."""

    __slots__ = ("_order", "answer")

    def __init__(self, order: AnswerOrder) -> None:
        self._order = order
        self.answer: Callable[[], None] | None = None

    def give(self, answer: Callable[[], None]) -> None:
        """Call `answer` now, or when all earlier ones have been given."""
        self.answer = answer
        self._order.flush()


class OrderedResponder:
    """A responder whose answer waits for its turn."""

    def __init__(self, responder: Responder, turn: Turn) -> None:
        self._responder = responder
        self._turn = turn

    def expect_many(self) -> None:
        self._responder.expect_many()

    def send(self, response: InferResponse, final: bool = True) -> None:
        # The tensors are views on memory that is used again when this call returns.
        response.outputs = [tensor.copied() for tensor in response.outputs]
        self._turn.give(lambda: self._responder.send(response, final))

    def end(self) -> None:
        self._turn.give(self._responder.end)

    def fail(self, error: ServeError, final: bool = True) -> None:
        self._turn.give(lambda: self._responder.fail(error, final))

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        self._responder.watch_cancellation(callback)


def nothing() -> None:
    """In place of an answer that is not to wait for its turn."""
