"""Answers in the order of arrival: for models with preserve_ordering, and for the requests of one stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from rocserve.core.errors import ServeError
from rocserve.core.requests import InferResponse
from rocserve.core.serving import Responder


class AnswerOrder:
    """Holds back answers until all that took their turn earlier have given their last."""

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

    def is_first(self, turn: Turn) -> bool:
        """Whether what the turn gives is given at once; once it is so, it stays so."""
        turns = self._turns
        return bool(turns) and turns[0] is turn

    def flush(self) -> None:
        """Give what may be given."""
        with self._lock:
            while self._turns:
                turn = self._turns[0]
                if turn.answers:
                    turn.answers.popleft()()
                elif turn.has_ended:
                    self._turns.popleft()
                else:
                    return


class Turn:
    """The place of the answers to one request."""

    __slots__ = ("_order", "answers", "has_ended")

    def __init__(self, order: AnswerOrder) -> None:
        self._order = order
        self.answers: deque[Callable[[], None]] = deque()
        """Those that wait."""
        self.has_ended = False

    @property
    def is_first(self) -> bool:
        """Nothing before it is left: answers are given at once."""
        return self._order.is_first(self)

    def give(self, answer: Callable[[], None], final: bool = True) -> None:
        """Call `answer` now, or when all earlier turns have ended. `final`: this one ends with it."""
        self.answers.append(answer)
        self.has_ended = final
        self._order.flush()

    def leave(self) -> None:
        """End without an answer: nobody waits for it any more."""
        self.has_ended = True
        self._order.flush()


class OrderedResponder:
    """A responder whose answers wait for their turn."""

    def __init__(self, responder: Responder, turn: Turn) -> None:
        self._responder = responder
        self._turn = turn

    def expect_many(self) -> None:
        self._responder.expect_many()

    def send(self, response: InferResponse, final: bool = True) -> None:
        if not self._turn.is_first:
            # The tensors are views on memory that is used again when this call returns.
            response.outputs = [tensor.copied() for tensor in response.outputs]
        self._turn.give(lambda: self._responder.send(response, final), final)

    def end(self) -> None:
        self._turn.give(self._responder.end)

    def fail(self, error: ServeError, final: bool = True) -> None:
        self._turn.give(lambda: self._responder.fail(error, final), final)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        self._responder.watch_cancellation(callback)

    def out_of_turn(self) -> Responder:
        """The responder itself, for a request that is refused at once; its turn is over."""
        self._turn.leave()
        return self._responder


def nothing() -> None:
    """In place of an answer that is not to wait for its turn."""
