"""Random schedules of a front end's link, deaths included: each exchange gets what the reference says, and no memory is
left. Both ends run on the test's thread, so that each seed does the same every time."""

from __future__ import annotations

import gc
import logging
import random
import socket
from collections.abc import Hashable
from functools import partial

import numpy as np
import pytest
from support.exchange_reference import LinkLoop, Reference

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, unavailable
from rocserve.core.exchange import Responder
from rocserve.core.memo import Memo
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.responses import Answer, InferResponse
from rocserve.core.tensors import Tensor
from rocserve.frontends.grpc.service import ServerRoutes
from rocserve.frontends.grpc.transport import UnaryCall, UnaryRoute
from rocserve.frontends.processes import answers, front_end, server_end
from rocserve.frontends.processes.forwarding import Forwarding
from rocserve.frontends.processes.front_end import RemoteInference
from rocserve.frontends.processes.server_end import FrontLink
from rocserve.links.rings import SMALLEST_RING
from rocserve.plane.heap import Heap, HeapReader, SharedHeap, Slot
from rocserve.services.inference import RequestOrigin

STEPS = 600
SEEDS = range(4)
REMEMBERED = 4
"""Texts, of which the test has more, so that their numbers are used again and again."""
LONG = "x" * (33 << 10)


class Client:
    """A client of the front end."""

    held_bytes = 0

    protocol = "GRPC"

    def __init__(self, ends: Ends, key: int, takes_one: bool) -> None:
        self.ends, self.key, self.takes_one = ends, key, takes_one
        self.expects_many = False

    def origin(self) -> RequestOrigin:
        return RequestOrigin("GRPC", (1, 2), {}, "")

    def expect_many(self) -> None:
        self.expects_many = True

    def watch_cancellation(self, callback: object) -> None:
        self.ends.watched[self.key] = callback

    def send(self, answer: Answer, final: bool = True) -> None:
        content: object = None
        if isinstance(answer, ServeError):
            content = answer.text
        elif answer is not None:
            content = (answer.id, [bytes(data) for data in answer.data], dict(answer.parameters))
            self.ends.kept.append(answer)
        self.ends.reference.hear(self.key, content, final)


class Ends:
    """Both ends of the link, between clients and a service that the schedule plays."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.reference = Reference()
        self.server_loop, self.front_loop = LinkLoop(), LinkLoop()
        self.responders: dict[Hashable, Responder] = {}
        self.calls: dict[Hashable, UnaryCall] = {}
        self.watched: dict[Hashable, object] = {}
        self.left: list[Hashable] = []
        self.kept: list[InferResponse] = []
        self.returned: list[int] = []
        self.version = SharedHeap("version", 1 << 24)
        self.outputs = Heap("outputs", 1 << 24)
        self.outputs_reader = HeapReader(self.outputs.open_for_reading())
        servers, fronts = socket.socketpair()
        log = logging.getLogger("rocserve.test.front_exchanges")
        self.link = FrontLink(
            servers,
            self.server_loop,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            ServerRoutes({"/a/B": UnaryRoute(self.begin_call)}, {}),
            Memo(),
            lambda number, text: None,
            lambda microseconds: None,
            pytest.fail,
            log,
        )
        self.remote = RemoteInference(
            fronts,
            self.front_loop,  # type: ignore[arg-type]
            PrivatePaths(()),
            log,
            lambda kind, number: None,
            lambda: None,
        )
        self.forwarding = Forwarding(RequestMemory(), self.remote.end, self.remote.exchanges)
        self.link._on_readable()
        self.heads = [
            RequestHead(f"m{number}", "", (InputHead("I", "BYTES" if number % 3 else "INT32", (2,)),), (), parameters)
            for number in range(12)
            for parameters in ({}, {"k": number}, {"long": LONG} if number == 5 else {})
        ]

    # The service.

    def heap_for(self, head: RequestHead) -> SharedHeap | None:
        return self.version if head.model_name in ("m0", "m3") else None

    def infer(self, request: InferRequest, responder: Responder) -> None:
        key = int(request.id)
        assert [bytes(data) for data in request.data] == [str(key).encode().ljust(8)]
        self.responders[key] = responder
        if self.random.random() < 0.5:
            responder.watch_cancellation(partial(self.left.append, key))

    def begin_call(self, call: UnaryCall) -> None:
        self.calls[int(bytes(call.message))] = call

    # Events.

    def ask(self) -> None:
        key = len(self.reference.exchanges)
        self.reference.open(key)
        request = InferRequest(self.random.choice(self.heads), str(key), [str(key).encode().ljust(8)])
        self.remote.infer(request, Client(self, key, self.random.random() < 0.5))

    def call(self) -> None:
        key = len(self.reference.exchanges)
        self.reference.open(key)
        answers = self.reference

        def fail(error: ServeError) -> None:
            answers.hear(key, error.text, True)

        self.forwarding.begin("/a/B", str(key).encode(), lambda content: answers.hear(key, content, True), fail)

    def answer(self) -> None:
        open_keys = [key for key in self.reference.open_keys() if key in self.responders or key in self.calls]
        if not open_keys:
            return
        key = self.random.choice(open_keys)
        if key in self.calls:
            call = self.calls.pop(key)
            if self.random.random() < 0.5:
                self.reference.give(key, b"yes", True)
                call.reply(b"yes")
            else:
                self.reference.give(key, "no", True)
                call.reply_error(unavailable("no"))
            return
        final = self.random.random() < 0.6
        kind = self.random.choice(("response", "placed", "error", "end"))
        responder = self.responders.pop(key) if final or kind == "end" else self.responders[key]
        if kind == "end":
            self.reference.give(key, None, True)
            responder.send(None)
        elif kind == "error":
            self.reference.give(key, "it failed", final)
            responder.send(unavailable("it failed"), final)
        else:
            response = self.response(str(key), kind == "placed")
            content = (response.id, [bytes(data) for data in response.data], dict(response.parameters))
            content = (str(key), *content[1:])
            self.reference.give(key, content, final)
            responder.send(response, final)

    def response(self, request_id: str, is_placed: bool) -> InferResponse:
        number, size = self.random.randrange(8), self.random.choice((1, 3, 5000))
        tensor = Tensor(f"O{number}", DataType.INT32, (size,), np.full(size, number, np.int32).tobytes())
        parameters = self.random.choice(({}, {}, {"p": number}, {"long": LONG}))
        response = InferResponse.of("m", "1", request_id, [tensor], parameters)
        if is_placed:
            place, view = self.outputs.allocate(4 * size)
            view[:] = tensor.data
            response.data = [self.outputs_reader.view(place, 4 * size)]
            response.slot = Slot(self.give_back, place, self.outputs_reader)
        return response

    def give_back(self, place: int) -> None:
        self.returned.append(place)
        self.outputs.free(place)

    def leave(self) -> None:
        if self.watched:
            key = self.random.choice([*self.watched])
            self.watched.pop(key)()  # type: ignore[operator]
            self.reference.exchanges[key].is_cancelled = True

    def turn_server(self) -> None:
        self.link.poll()
        self.server_loop.turn()

    def turn_front(self) -> None:
        if self.random.random() < 0.3:
            self.kept.clear()
        self.remote.poll()
        self.front_loop.turn()

    def end_version(self) -> None:
        self.version.close()
        self.version = SharedHeap("version", 1 << 24)

    def burst(self) -> None:
        for _ in range(self.random.randrange(2 * SMALLEST_RING)):
            self.ask()

    def settle(self) -> None:
        """Turn both loops until nothing is under way, also what waits for room in a ring."""
        ends = (self.remote.end, self.link._end)
        while any(end._queue for end in ends) or self.remote.has_mail() or self.link.has_mail():
            self.turn_front()
            self.turn_server()

    def close(self) -> None:
        self.remote._connection.close()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (front_end, answers):
        monkeypatch.setattr(module, "REMEMBERED", REMEMBERED)
    for module in (front_end, server_end):
        monkeypatch.setattr(module, "FRONT_RINGS", (SMALLEST_RING, SMALLEST_RING))
    # At the next turn, so that a seed is one schedule whatever the time.
    monkeypatch.setattr(front_end, "_WATCH_AFTER_SECONDS", 0.0)


EVENTS = {
    Ends.ask: 8,
    Ends.call: 2,
    Ends.answer: 10,
    Ends.leave: 2,
    Ends.turn_server: 6,
    Ends.turn_front: 6,
    Ends.end_version: 0.2,
    Ends.burst: 0.1,
}


def run(ends: Ends, steps: int) -> None:
    for event in ends.random.choices([*EVENTS], [*EVENTS.values()], k=steps):
        event(ends)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("small")
def test_everything_arrives_once_in_its_order_and_leaves_nothing(seed: int) -> None:
    ends = Ends(seed)
    run(ends, STEPS)
    ends.settle()
    while ends.responders or ends.calls:
        ends.answer()
        ends.turn_server()
        ends.turn_front()
    ends.settle()
    ends.reference.check_settled(is_dead=False)
    assert all(exchange.has_ended for exchange in ends.reference.exchanges.values())
    # Exactly the clients that left while the exchange was open were reported.
    assert len(ends.left) == len(set(ends.left))
    assert all(ends.reference.exchanges[key].is_cancelled for key in ends.left)
    ends.kept.clear()
    gc.collect()
    ends.settle()
    assert not ends.remote.exchanges.asked and not ends.link.answers.exchanges.received
    assert not ends.remote.end._slots and not ends.link._end._slots
    for texts in (ends.remote._sent_heads, ends.link.answers._sent_heads, ends.remote._answer_heads, ends.link._heads):
        assert len(texts) <= REMEMBERED
    ends.close()


def test_the_memory_of_a_request_that_was_watched_is_free_at_its_end() -> None:
    """What watches knows the request, and that the responder: no garbage collection must be needed."""
    ends = Ends(0)
    gc.disable()
    try:
        ends.ask()
        ends.settle()
        responder = ends.responders.pop(0)
        responder.watch_cancellation(partial(print, responder))
        ends.reference.give(0, None, True)
        responder.send(None)
        del responder
        ends.settle()
        assert not ends.remote.end._slots
    finally:
        gc.enable()
    ends.close()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("small")
def test_when_the_front_end_dies_its_exchanges_are_left_once_and_its_memory_is_free(seed: int) -> None:
    ends = Ends(seed)
    run(ends, ends.random.randrange(STEPS))
    ends.link.poll()
    waiting = {key for key in ends.responders if key not in ends.left}
    for key in waiting:
        ends.responders[key].watch_cancellation(partial(ends.left.append, key))
    ends.close()
    ends.link.close()
    assert waiting <= set(ends.left)
    # Answers of models to it are dropped, and so is what it had borrowed.
    while ends.reference.open_keys() and (ends.responders or ends.calls):
        ends.answer()
        ends.server_loop.turn()
    ends.responders.clear()
    ends.calls.clear()
    gc.collect()
    ends.server_loop.turn()
    assert not ends.link.answers.exchanges.received and not ends.link._end._slots and not ends.link._shares
    assert ends.version._lent == 0
    assert not ends.outputs_reader.on_closed
