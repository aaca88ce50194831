"""Open exchanges: the same in each process that waits for answers."""

from __future__ import annotations

import itertools
from typing import TypeVar

Open = TypeVar("Open")


class Exchanges(dict[int, Open]):
    """The exchanges that this end has opened, by number, with what takes their answers. Numbers are never used again,
    so that an answer or a cancellation that was under way at the exchange's end finds nothing. Look-ups run no Python
    code. Safe on any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    def open(self, exchange: Open) -> int:
        number = next(self._numbers)
        self[number] = exchange
        return number

    def drain(self) -> list[Open]:
        """Remove and return all, in the order of their opening, because the other end is gone. Exchanges that other
        threads open meanwhile may be left: who opens one must look afterwards whether the other end is gone."""
        drained: list[Open] = []
        for number in [*self]:
            exchange = self.pop(number, None)
            if exchange is not None:
                drained.append(exchange)
        return drained
