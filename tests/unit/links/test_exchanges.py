"""The register of an end's open exchanges."""

from __future__ import annotations

import gc
import weakref

import pytest

from rocserve.core.exchange import Cancellable
from rocserve.links.exchanges import Exchanges


@pytest.fixture
def exchanges() -> Exchanges[str, Cancellable]:
    return Exchanges()


def test_an_answer_behind_the_last_finds_nothing(exchanges: Exchanges[str, Cancellable]) -> None:
    number = exchanges.open("first")
    assert exchanges.take(number, False) == exchanges.take(number, True) == "first"
    assert exchanges.take(number, True) is None
    assert exchanges.open("second") != number


def test_a_cancellation_reaches_an_exchange_that_comes_later(exchanges: Exchanges[str, Cancellable]) -> None:
    early, late, other = Cancellable(), Cancellable(), Cancellable()
    exchanges.cancel(7)
    exchanges.receive(7, early)
    exchanges.receive(8, late)
    exchanges.receive(9, other)
    exchanges.cancel(8)
    assert [early.is_cancelled, late.is_cancelled, other.is_cancelled] == [True, True, False]


@pytest.mark.parametrize("is_one_of_many", [False, True])
def test_an_end_comes_once_and_lets_go_of_the_watcher(
    exchanges: Exchanges[str, Cancellable], is_one_of_many: bool
) -> None:
    class Request:
        def __init__(self) -> None:
            self.exchange = Cancellable()
            exchanges.receive(1, self.exchange)
            self.exchange.watch_cancellation(self.left)

        def left(self) -> None: ...

    request = Request()
    is_gone = weakref.ref(request)
    gc.disable()
    try:
        assert exchanges.end(*([1, 2] if is_one_of_many else [1])) == 1
        assert exchanges.end(1) == 0
        del request
        assert is_gone() is None
    finally:
        gc.enable()
    exchanges.cancel(1)


def test_a_watcher_is_called_once_also_if_it_comes_late() -> None:
    told: list[str] = []
    exchange = Cancellable()
    exchange.watch_cancellation(lambda: told.append("replaced"))
    exchange.watch_cancellation(lambda: told.append("told"))
    exchange.cancel()
    exchange.cancel()
    exchange.watch_cancellation(lambda: told.append("late"))
    assert told == ["told", "late"]


def test_a_death_leaves_nothing_and_keeps_the_order(exchanges: Exchanges[str, Cancellable]) -> None:
    received = [Cancellable() for _ in range(3)]
    for number, one in enumerate(received):
        exchanges.receive(10 - number, one)
    for name in "abc":
        exchanges.open(name)
    exchanges.take(2, True)
    assert not exchanges.is_over
    assert exchanges.close() == (["a", "c"], received)
    assert exchanges.is_over
    assert exchanges.close() == ([], [])
