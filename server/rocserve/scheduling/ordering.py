"""Answers in the order of arrival: for models with preserve_ordering, and for the requests of one stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from rocserve.core.errors import ServeError
from rocserve.core.forwarding import ForwardingResponder
from rocserve.core.requests import InferResponse
from rocserve.core.serving import Responder


class AnswerOrder:
    """Holds back answers until all that took their turn earlier have given their last.

    One thread gives at a time, so that none overtakes another; whoever comes meanwhile leaves its answer to that one.
    """

    def __init__(self) -> None:
        # Never held while answering: an answer may lead to a further request, of this model or of another one in order,
        # and that takes locks of schedulers, under which turns are taken.
        self._lock = threading.Lock()
        self._turns: deque[Turn] = deque()
        self._is_giving = False

    def take_turn(self) -> Turn:
        turn = Turn(self)
        with self._lock:
            self._turns.append(turn)
        return turn

    def begin(self, turn: Turn) -> bool:
        """Whether the turn's next answer may be given at once: by the caller, with `go_on`."""
        with self._lock:
            if self._is_giving or not self._turns or self._turns[0] is not turn or turn.answers:
                return False
            self._is_giving = True
            return True

    def go_on(self, answer: Callable[[], None] | None) -> None:
        """Give this, and then what may be given by now, as the one that gives."""
        try:
            while answer is not None:
                answer()
                with self._lock:
                    answer = self._due()
        except BaseException:
            self._is_giving = False
            raise

    def flush(self) -> None:
        """Give what may be given by now, unless somebody is giving, who then takes it along."""
        with self._lock:
            answer = None if self._is_giving else self._due()
        self.go_on(answer)

    def _due(self) -> Callable[[], None] | None:
        """Under the lock: the next answer, which the caller gives; None, and nobody is giving any more."""
        turns = self._turns
        while turns:
            turn = turns[0]
            if turn.answers:
                self._is_giving = True
                return turn.answers.popleft()
            if not turn.has_ended:
                break
            turns.popleft()
        self._is_giving = False
        return None


class Turn:
    """The place of the answers to one request."""

    __slots__ = ("_order", "answers", "has_ended")

    def __init__(self, order: AnswerOrder) -> None:
        self._order = order
        self.answers: deque[Callable[[], None]] | None = None
        """Those that wait."""
        self.has_ended = False

    def give_now(self, answer: Callable[[], None], final: bool = True) -> bool:
        """Call `answer` if nothing is before it, else False: it has to be given so that it can wait. `final`: the turn
        ends with it."""
        order = self._order
        if not order.begin(self):
            return False
        self.has_ended = final
        order.go_on(answer)
        return True

    def give(self, answer: Callable[[], None], final: bool = True) -> None:
        """Call `answer` now, or when all earlier turns have ended. `final`: this one ends with it."""
        if not self.give_now(answer, final):
            if self.answers is None:
                self.answers = deque()
            self.answers.append(answer)
            self.has_ended = final
            self._order.flush()

    def leave(self) -> None:
        """End without an answer: nobody waits for it any more."""
        self.has_ended = True
        self._order.flush()


class OrderedResponder(ForwardingResponder):
    """A responder whose answers wait for their turn."""

    def __init__(self, responder: Responder, turn: Turn) -> None:
        super().__init__(responder)
        self._turn = turn

    def send(self, response: InferResponse, final: bool = True) -> None:
        def answer() -> None:
            self._responder.send(response, final)

        if not self._turn.give_now(answer, final):
            # The tensors are views on memory that is used again when this call returns.
            response.outputs = [tensor.copied() for tensor in response.outputs]
            self._turn.give(answer, final)

    def end(self) -> None:
        self._turn.give(self._responder.end)

    def fail(self, error: ServeError, final: bool = True) -> None:
        self._turn.give(lambda: self._responder.fail(error, final), final)

    def out_of_turn(self) -> Responder:
        """The responder itself, for a request that is refused at once; its turn is over."""
        self._turn.leave()
        return self._responder
