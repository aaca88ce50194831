"""What a link must do with exchanges, whatever the order of events, and a loop on which both of its ends are turned."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace

from rocserve.plane import anonymous_file
from support.hand_loop import HandLoop


class Exchange:
    """One exchange of the reference: its answers in the order in which they were given."""

    def __init__(self) -> None:
        self.given: list[tuple[object, bool]] = []
        self.heard: list[tuple[object, bool]] = []
        self.is_lost = self.is_cancelled = False

    @property
    def may_be_answered(self) -> bool:
        return not self.is_lost and not any(final for _, final in self.given)

    @property
    def has_ended(self) -> bool:
        return self.is_lost or any(final for _, final in self.heard)


class Reference:
    """A link without memory, rings or processes: what is given arrives, once, in its order, before the other end's
    death; an exchange that has not ended by then is lost, once."""

    def __init__(self) -> None:
        self.exchanges: dict[Hashable, Exchange] = {}

    def open(self, key: Hashable) -> Exchange:
        assert key not in self.exchanges
        exchange = self.exchanges[key] = Exchange()
        return exchange

    def give(self, key: Hashable, answer: object, final: bool) -> None:
        assert self.exchanges[key].may_be_answered
        self.exchanges[key].given.append((answer, final))

    def hear(self, key: Hashable, answer: object, final: bool) -> None:
        exchange = self.exchanges[key]
        assert not exchange.has_ended, f"{key} is answered after its end"
        exchange.heard.append((answer, final))
        count = len(exchange.heard)
        assert exchange.heard == exchange.given[:count], f"{key} hears {answer}, not what was given next"

    def lose(self, key: Hashable) -> None:
        assert not self.exchanges[key].has_ended, f"{key} is lost after its end"
        self.exchanges[key].is_lost = True

    def open_keys(self) -> list[Hashable]:
        return [key for key, exchange in self.exchanges.items() if exchange.may_be_answered]

    def check_settled(self, is_dead: bool) -> None:
        for key, exchange in self.exchanges.items():
            assert exchange.has_ended if is_dead else exchange.heard == exchange.given, key


class LinkLoop(HandLoop):
    """A loop whose doorbell nobody rings: the test turns it."""

    def __init__(self) -> None:
        super().__init__()
        self.doorbell = SimpleNamespace(sleeps=anonymous_file.create("test", mmap.PAGESIZE))
        self.thread = threading.get_ident()

    def register(self, descriptor: int, callback: Callable[[], None]) -> None:
        """The test calls what a readable descriptor calls."""

    def unregister(self, descriptor: int) -> None:
        """See register."""

    def add_source(self, source: object) -> None:
        """The test polls the sources."""

    def remove_source(self, source: object) -> None:
        """See add_source."""

    def work_off_later(self, steps: Iterator[None]) -> None:
        self.call_soon(lambda: self.work_off(steps))

    def wake(self) -> None:
        """It is awake."""
