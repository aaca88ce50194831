"""The open exchanges of one end of a link. Each end of every link has one such register."""

from __future__ import annotations

import itertools
from typing import Generic, TypeVar

from rocserve.core.exchange import Cancellable
from rocserve.core.memo import Memo

Asked = TypeVar("Asked")
Answered = TypeVar("Answered", bound=Cancellable)


class Exchanges(Generic[Asked, Answered]):
    """All open exchanges of one end. Numbers are never used again, so that an answer or a cancellation in transit at
    the exchange's end finds nothing. Safe on any thread."""

    def __init__(self) -> None:
        self.asked: dict[int, Asked] = {}
        """Opened by this end: number -> the taker of the answers. Read without a call, once per answer."""
        self.received: dict[int, Answered] = {}
        """Opened by the other end: its number -> the answerer."""
        self.is_over = False
        """The other end is gone."""
        self._numbers = itertools.count(1)
        # A cancellation may arrive before its request, through another ring. For an ended exchange it is noted too.
        self._early_cancellations = Memo[int, bool]()

    def open(self, taker: Asked) -> int:
        number = next(self._numbers)
        self.asked[number] = taker
        return number

    def take(self, number: int, is_last: bool) -> Asked | None:
        """Return the taker of an answer; None if the exchange has ended."""
        return self.asked.pop(number, None) if is_last else self.asked.get(number)

    def receive(self, number: int, exchange: Answered) -> None:
        self.received[number] = exchange
        if self._early_cancellations and self._early_cancellations.pop(number, False):
            exchange.cancel()

    def end(self, *numbers: int) -> int:
        """Remove exchanges that have their last answers. Returns how many of them had not ended before."""
        received, ended = self.received, 0
        for number in numbers:
            exchange = received.pop(number, None)
            if exchange is not None:
                ended += 1
                if exchange.on_cancel is not None:
                    exchange.on_cancel = None
        return ended

    def cancel(self, number: int) -> None:
        """Cancel an exchange that the other end opened: nobody there waits for it."""
        self._early_cancellations.keep(number, True)
        # Looked up after the note above, because `receive` registers the exchange before it reads the notes: one of two
        # threads sees the other's entry.
        exchange = self.received.get(number)
        if exchange is not None:
            exchange.cancel()

    def close(self) -> tuple[list[Asked], list[Answered]]:
        """Remove and return all, in the order of their opening, because the other end is gone. The caller fails the
        first ones and cancels the second ones. Exchanges that other threads open meanwhile may remain: a thread that
        opens one must check `is_over` afterwards, and close again."""
        self.is_over = True
        return _drained(self.asked), _drained(self.received)


Open = TypeVar("Open")


def _drained(exchanges: dict[int, Open]) -> list[Open]:
    drained: list[Open] = []
    for number in [*exchanges]:
        exchange = exchanges.pop(number, None)
        if exchange is not None:
            drained.append(exchange)
    return drained
