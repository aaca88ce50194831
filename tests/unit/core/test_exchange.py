"""An exchange: which states follow which, the order of its hooks, and a client that leaves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import product

import pytest

from rocserve.core.errors import ServeError, internal
from rocserve.core.exchange import (
    ANSWERED,
    ENDED,
    HELD,
    QUEUED,
    RECEIVED,
    RUNNING,
    EndHook,
    Exchange,
    Held,
    Hook,
    HookOrder,
    State,
)
from rocserve.core.responses import Answer, InferResponse

RESPONSE = InferResponse.of("m", "1", "", ())


class Client:
    """A client that records what it gets."""

    def __init__(self, fails: bool = False) -> None:
        self.got: list[object] = []
        self.watches: list[Callable[[], None]] = []
        self._fails = fails

    def expect_many(self) -> None:
        self.got.append("many")

    def send(self, answer: Answer, final: bool = True) -> None:
        self.got.append((answer, final))
        if self._fails:
            raise ConnectionError

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        self.watches.append(callback)


class Note(Hook):
    """A hook that notes when answers pass."""

    def __init__(self, order: HookOrder, seen: list[str]) -> None:
        self.order = order
        self._seen = seen

    def on_answer(self, exchange: Exchange, answer: Answer, final: bool) -> Answer | Held:
        self._seen.append(self.order.name)
        return answer

    def on_sent(self, final: bool) -> None:
        self._seen.append(f"sent {self.order.name}")


class Holding(Note):
    """A hook that lets answers wait."""

    held: Callable[[], None]

    def on_answer(self, exchange: Exchange, answer: Answer, final: bool) -> Held:
        super().on_answer(exchange, answer, final)
        self.held = lambda: exchange.pass_on(self, answer, final)
        return HELD

    def give_up(self) -> None:
        self._seen.append("given up")


WAYS = {RECEIVED: [], QUEUED: [QUEUED], RUNNING: [RUNNING], ANSWERED: [ANSWERED], ENDED: [ANSWERED, ENDED]}
LEGAL = {
    (RECEIVED, QUEUED),
    (RECEIVED, RUNNING),
    (RECEIVED, ANSWERED),
    (QUEUED, RECEIVED),
    (QUEUED, RUNNING),
    (QUEUED, ANSWERED),
    (RUNNING, QUEUED),
    (RUNNING, ANSWERED),
    (ANSWERED, ENDED),
}


@pytest.mark.parametrize(("old", "new"), [*product(State, State)])
def test_a_state_may_follow_only_some_others(old: State, new: State) -> None:
    exchange = Exchange(Client())
    for state in WAYS[old]:
        exchange.enter(state)
    if (old, new) in LEGAL:
        exchange.enter(new)
        assert exchange.state is new
    else:
        with pytest.raises(RuntimeError, match=f"a request that is {old.name} cannot become {new.name}"):
            exchange.enter(new)
        assert exchange.state is old


@pytest.mark.parametrize("final", [False, True])
def test_nothing_answers_a_request_twice(final: bool) -> None:
    exchange = Exchange(client := Client())
    exchange.enter(RUNNING)
    exchange.send(RESPONSE, False)
    exchange.send(None)
    assert exchange.state is ENDED
    with pytest.raises(RuntimeError, match="a request that is ENDED takes no more answers"):
        exchange.send(RESPONSE, final)
    assert client.got == [(RESPONSE, False), (None, True)]


def test_a_request_that_was_refused_takes_no_answer_of_its_model() -> None:
    exchange = Exchange(client := Client())
    exchange.enter(RUNNING)
    exchange.enter(ANSWERED)
    with pytest.raises(RuntimeError):
        exchange.send(RESPONSE)
    exchange.refuse(error := internal("late"))
    assert (client.got, exchange.state) == ([(error, True)], ENDED)


def test_hooks_see_an_answer_in_their_order_whenever_they_were_added() -> None:
    seen: list[str] = []
    exchange = Exchange(Client())
    for order in sorted(HookOrder, key=lambda order: order.name):
        exchange.add(Note(order, seen))
    exchange.send(RESPONSE)
    names = [order.name for order in HookOrder]
    assert " ".join(names) == "TURN STATES CACHE CALL ITEM TENSORS REGION LIMITS TIMING TRACE LOG"
    assert seen == [*names, *[f"sent {name}" for name in names]]


def test_hooks_hear_of_the_end_of_a_send_that_fails() -> None:
    seen: list[str] = []
    exchange = Exchange(Client(fails=True))
    exchange.add(Note(HookOrder.TRACE, seen))
    with pytest.raises(ConnectionError):
        exchange.send(RESPONSE)
    assert seen == ["TRACE", "sent TRACE"]


def test_an_answer_that_is_held_goes_on_behind_the_hook_that_held_it() -> None:
    seen: list[str] = []
    exchange = Exchange(client := Client())
    exchange.add(Note(HookOrder.LOG, seen))
    exchange.add(holding := Holding(HookOrder.REGION, seen))
    exchange.send(RESPONSE)
    assert (seen, client.got, exchange.state) == (["REGION"], [], ANSWERED)
    holding.held()
    assert seen[1:] == ["LOG", "sent REGION", "sent LOG"]
    assert (client.got, exchange.state) == ([(RESPONSE, True)], ENDED)


def test_a_refusal_does_not_wait_for_its_turn() -> None:
    seen: list[str] = []
    exchange = Exchange(client := Client())
    exchange.add(Holding(HookOrder.TURN, seen))
    exchange.add(Note(HookOrder.LOG, seen))
    exchange.refuse(error := internal("no"))
    assert seen[:2] == ["given up", "LOG"]
    assert client.got == [(error, True)]


def test_a_hook_may_put_another_answer_in_the_place_of_one() -> None:
    class Failing(Note):
        def on_answer(self, exchange: Exchange, answer: Answer, final: bool) -> ServeError:
            return error

    error = internal("no")
    exchange = Exchange(client := Client())
    exchange.add(Failing(HookOrder.STATES, []))
    exchange.send(RESPONSE, False)
    assert client.got == [(error, False)]


@pytest.mark.parametrize("last", [RESPONSE, None, internal("x")])
def test_what_counts_until_the_end_counts_once_and_before_the_last_answer(last: Answer) -> None:
    seen: list[object] = []
    exchange = Exchange(client := Client())
    exchange.add(EndHook(HookOrder.LIMITS, lambda: seen.append(len(client.got))))
    for answer in (RESPONSE, internal("one of several")):
        exchange.send(answer, False)
    exchange.send(last)
    assert seen == [2]


def test_a_client_is_asked_once_and_only_the_latest_watcher_hears_that_it_leaves() -> None:
    told: list[str] = []
    exchange = Exchange(client := Client())
    exchange.watch_cancellation(lambda: told.append("first"))
    exchange.watch_cancellation(lambda: told.append("second"))
    (leave,) = client.watches
    leave()
    assert (told, exchange.has_left) == (["second"], True)
    exchange.watch_cancellation(lambda: told.append("third"))
    assert told == ["second", "third"]


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_client_that_leaves_when_nobody_watches_disturbs_nobody(is_ended: bool) -> None:
    told: list[str] = []
    exchange = Exchange(client := Client())
    exchange.watch_cancellation(lambda: told.append("told"))
    if is_ended:
        exchange.send(RESPONSE)
        exchange.watch_cancellation(lambda: told.append("after the end"))
    else:
        exchange.unwatch()
    (leave,) = client.watches
    leave()
    assert told == []


def test_an_exchange_that_has_ended_keeps_nothing_of_its_request() -> None:
    class Request:
        """What hooks and callbacks refer to."""

        def __init__(self, exchange: Exchange) -> None:
            self.exchange = exchange

        def touch(self) -> None: ...

    gc.disable()
    try:
        exchange = Exchange(Client())
        request = Request(exchange)
        exchange.watch_cancellation(request.touch)
        exchange.stop = request.touch
        exchange.add(EndHook(HookOrder.LIMITS, request.touch))
        gone = weakref.ref(request)
        exchange.send(RESPONSE)
        del request
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("with_hooks", [False, True])
def test_an_error_keeps_no_memory_of_the_frames_that_raised_it(with_hooks: bool) -> None:
    class Memory:
        pass

    exchange = Exchange(Client())
    if with_hooks:
        exchange.add(Note(next(iter(HookOrder)), []))

    def answer(memory: Memory) -> None:
        try:
            try:
                raise OSError
            except OSError:
                raise internal("not now") from None
        except ServeError as error:
            value = error
        exchange.send(value)

    gc.disable()
    try:
        gone = weakref.ref(memory := Memory())
        answer(memory)
        del memory
        assert gone() is None
    finally:
        gc.enable()
