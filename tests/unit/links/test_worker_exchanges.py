"""Random schedules of an instance's link, deaths included: requests, calls and batches get what the reference says, and
no memory is left. Both ends run on the test's thread, so that each seed does the same every time."""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from support.exchange_reference import LinkLoop, Reference
from support.shared_memory import GUARD
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.request_model import ModelCall, ModelResponse, Result
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, unavailable
from rocserve.core.requests import RequestForm, RequestLayout
from rocserve.core.responses import InferResponse
from rocserve.core.tensors import Tensor, TensorHead
from rocserve.links import tensors
from rocserve.plane.heap import Heap, SharedHeap
from rocserve.workers import batch_writer
from rocserve.workers.back_channel import BackChannel, BatchedResponder
from rocserve.workers.batch_inputs import request_inputs
from rocserve.workers.instance import InstanceMail, WorkerGone
from rocserve.workers.instance_requests import OpenCall, RequestInstance, RequestLost
from rocserve.workers.result_writer import answer_results
from rocserve.workers.results import BatchOutcome
from rocserve.workers.worker_end import ReceivedBatch, WorkerEnd

STEPS = 500
SEEDS = range(4)
REMEMBERED = 4
"""Texts, of which the test has more, so that their numbers are used again and again."""
LOG = logging.getLogger("rocserve.test.worker_exchanges")


def content_of(answer: Result | None) -> object:
    if isinstance(answer, ServeError):
        return answer.text
    if isinstance(answer, ModelResponse):
        return [(one.name, bytes(one.data)) for one in answer.outputs], dict(answer.parameters)
    return answer


class Ends:
    """The instance, and the worker's end, between a scheduler and a model that the schedule plays."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.reference = Reference()
        self.loop = LinkLoop()
        self.mail = InstanceMail(self.loop)  # type: ignore[arg-type]
        self.inputs = SharedHeap("test", 1 << 24)
        self.broken: list[str] = []
        self.instance = RequestInstance(
            "m",
            self.mail,
            self.inputs,
            lambda instance, reason: self.broken.append(reason),
            LOG,
            start_call=self.start_call,
        )
        self.worker = WorkerEnd(self.instance.peer, GUARD)
        self.back = BackChannel(self.worker, LOG)
        self.batches = self.worker.batches()
        self.forms = [
            RequestForm(
                RequestLayout((TensorHead(f"I{number}", DataType.INT32, (2,)),), ("O",), 1, number % 5, 0, more)
            )
            for number in range(10)
            for more in ({}, {"long": "x" * (33 << 10)} if number == 3 else {"k": number})
        ]
        self.keys: dict[int, Hashable] = {}
        """The server's number of a request -> key."""
        self.layouts: dict[int, RequestForm] = {}
        self.sent = self.taken = 0
        self.running: list[tuple[ReceivedBatch, list[BatchedResponder]]] = []
        self.outcomes: list[BatchOutcome] = []
        self.opened: dict[Hashable, OpenCall] = {}
        self.cancelled: set[Hashable] = set()
        self.calls_cancelled: list[Hashable] = []

    # The server.

    def submit(self) -> None:
        members, keys = [], []
        for _ in range(self.random.randint(1, 5)):
            key = ("request", len(self.reference.exchanges))
            self.reference.open(key)
            number = self.instance.open_request(partial(self.hear_request, key))
            self.keys[number] = key
            keys.append((number, key))
            form = self.layouts[number] = self.random.choice(self.forms)
            members.append((form, [np.int32([number, 7]).tobytes()], number, b""))
        try:
            self.instance.execute(False, members, partial(self.on_outcome, keys))
            self.sent += 1
        except ServeError as error:
            # Nothing of a batch that is refused is in flight.
            assert isinstance(error, WorkerGone) or "does not read its batches" in error.text
            self.instance.close_requests(number for number, _ in keys)
            for _, key in keys:
                del self.reference.exchanges[key]

    def hear_request(self, key: Hashable, answer: Result | None, final: bool) -> None:
        if isinstance(answer, RequestLost):
            self.reference.lose(key)
        else:
            self.reference.hear(key, content_of(answer), final)

    def on_outcome(self, keys: Sequence[tuple[int, Hashable]], outcome: BatchOutcome) -> None:
        self.outcomes.append(outcome)
        for index, (number, key) in enumerate(keys):
            is_lost = isinstance(outcome.error, WorkerGone) or (outcome.error is not None and not outcome.slot)
            if is_lost or (outcome.error is None and index in outcome.open):
                continue
            if outcome.error is not None or index in outcome.failures:
                error = outcome.error or outcome.failures[index]
                if not self.reference.exchanges[key].has_ended:
                    self.reference.hear(key, error.text, True)
            else:
                heads, data = outcome.outputs_of(index)
                outputs = [(head.name, bytes(one)) for head, one in zip(heads, data, strict=True)]
                self.reference.hear(key, (outputs, dict(outcome.parameters.get(index, {}))), True)
            self.instance.close_requests((number,))

    def start_call(self, call: ModelCall, opened: OpenCall) -> None:
        key = ("call", int(call.model_name))
        opened.watch_cancellation(partial(self.calls_cancelled.append, key))
        self.opened[key] = opened

    def answer_call(self) -> None:
        if not self.opened:
            return
        key = self.random.choice([*self.opened])
        final = self.random.random() < 0.5
        opened = self.opened.pop(key) if final else self.opened[key]
        answer = self.answer()
        self.reference.give(key, content_of(answer), final)
        if isinstance(answer, ModelResponse):
            opened.send(InferResponse.of("m", "1", "", answer.outputs, answer.parameters), final)
        else:
            opened.send(answer, final)

    def cancel(self) -> None:
        if self.instance.exchanges.asked:
            number = self.random.choice([*self.instance.exchanges.asked])
            self.instance.cancel(number)
            self.cancelled.add(self.keys[number])

    def turn_server(self) -> None:
        self.instance.take_mail()
        self.loop.turn()
        self.mail.poll()
        if self.random.random() < 0.5:
            self.outcomes.clear()

    # The worker.

    def answer(self) -> ModelResponse | ServeError:
        if self.random.random() < 0.2:
            return ServeError(StatusCode.INTERNAL, "it failed")
        number, size = self.random.randrange(8), self.random.choice((1, 3, 5000))
        tensor = Tensor(f"O{number}", DataType.INT32, (size,), np.full(size, number, np.int32).tobytes())
        return ModelResponse([tensor], self.random.choice(({}, {}, {"p": number})))

    def take(self) -> None:
        if self.taken == self.sent:
            return
        self.taken += 1
        batch = next(self.batches)
        for request in batch.requests:
            assert request.form.layout == self.layouts[request.number].layout
            (data,) = request_inputs(request, self.worker.files)
            assert np.frombuffer(data, np.int32).tolist() == [request.number, 7]
        self.running.append((batch, [self.back.open_request(request.number) for request in batch.requests]))

    def may_send(self) -> bool:
        """Whether the ring has room: a worker waits for room, and the test has one thread."""
        if self.worker._results.room < 100:
            self.turn_server()
        return bool(self.running)

    def respond(self) -> None:
        if not self.may_send():
            return
        responder = self.random.choice(self.random.choice(self.running)[1])
        key = self.keys[responder.number]
        if self.reference.exchanges[key].may_be_answered:
            answer, final = self.answer(), self.random.random() < 0.2
            self.reference.give(key, content_of(answer), final)
            responder.send(answer, final)

    def finish(self) -> None:
        if not self.may_send():
            return
        batch, responders = self.running.pop(0)
        now = time.monotonic_ns()
        open_ones = [one for one in responders if self.reference.exchanges[self.keys[one.number]].may_be_answered]
        if self.random.random() < 0.1:
            for one in responders:
                one.abandon()
            for one in open_ones:
                self.reference.give(self.keys[one.number], "all failed", True)
            self.worker.fail(batch, (now, now), ServeError(StatusCode.INTERNAL, "all failed"))
            return
        answers: list[Result | None] = []
        for one in responders:
            answer = self.answer() if one in open_ones else None
            if answer is not None:
                self.reference.give(self.keys[one.number], content_of(answer), True)
            answers.append(answer)
        settled = [one.batch_answer(answer) for one, answer in zip(responders, answers, strict=True)]
        self.worker.finish(batch, (now, now), answer_results(self.worker.sender, settled))

    def call(self) -> None:
        self.may_send()
        key = ("call", len(self.reference.exchanges))
        self.reference.open(key)
        tensor = Tensor(f"I{self.random.randrange(8)}", DataType.INT32, (2,), bytes(8))
        self.back.call(ModelCall(str(key[1]), (tensor,), ()), partial(self.hear_call, key))

    def hear_call(self, key: Hashable, answer: Result | None, final: bool) -> None:
        if isinstance(answer, ServeError) and answer.text == "the server is gone":
            self.reference.lose(key)
        else:
            self.reference.hear(key, content_of(answer), final)

    def read_back(self) -> None:
        if self.worker._results.room < 600:
            self.turn_server()
        self.back.take_mail()
        if not self.instance._outbox._queue:
            # No cancellation is under way, also none of a request that the worker took only afterwards.
            for number, responder in self.back._exchanges.received.items():
                assert responder.is_cancelled == (self.keys[number] in self.cancelled)

    # The end.

    def settle(self) -> None:
        def is_under_way() -> bool:
            return self.instance._outbox._queue or self.worker.back.has_mail() or self.instance.inbox.has_mail()

        while is_under_way():
            self.read_back()
            self.turn_server()

    def die(self, error: ServeError) -> None:
        self.instance.end(error)
        self.loop.turn()

    def close(self) -> None:
        self.back.start()
        self.back._reader.join(PATIENCE_SECONDS)
        self.worker.close()


def slots_in_use(heap: Heap) -> int:
    return sum(
        (slots.next - (slots.end - heap.limit)) // slots.size - len(slots.free) - len(slots.bare)
        for slots in heap._classes
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tensors, batch_writer):
        monkeypatch.setattr(module, "REMEMBERED", REMEMBERED)


EVENTS = {
    Ends.submit: 6,
    Ends.take: 6,
    Ends.respond: 8,
    Ends.finish: 5,
    Ends.call: 2,
    Ends.answer_call: 5,
    Ends.cancel: 2,
    Ends.read_back: 4,
    Ends.turn_server: 6,
}


def run(ends: Ends, steps: int) -> None:
    for event in ends.random.choices([*EVENTS], [*EVENTS.values()], k=steps):
        event(ends)
    assert not ends.broken


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("small")
def test_everything_arrives_once_in_its_order_and_leaves_nothing(seed: int) -> None:
    ends = Ends(seed)
    run(ends, STEPS)
    while ends.taken < ends.sent or ends.running:
        ends.take()
        ends.finish()
        ends.settle()
    while ends.opened:
        ends.answer_call()
        ends.settle()
    ends.settle()
    ends.reference.check_settled(is_dead=False)
    assert all(exchange.has_ended for exchange in ends.reference.exchanges.values())
    for exchanges in (ends.instance.exchanges, ends.back._exchanges):
        assert not exchanges.asked and not exchanges.received
    ends.outcomes.clear()
    gc.collect()
    assert not slots_in_use(ends.inputs)
    ends.instance.post_returned_places()
    with ends.worker._lock:
        ends.worker._take_returns()
    assert ends.worker._unread_bytes == 0
    assert not ends.calls_cancelled
    ends.die(unavailable("it is over"))
    ends.close()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("small")
def test_at_a_death_what_was_sent_arrives_and_the_rest_is_lost_once(seed: int) -> None:
    ends = Ends(seed)
    run(ends, ends.random.randrange(STEPS))
    calls = set(ends.opened)
    ends.die(unavailable("it died"))
    still_open = [*ends.back._exchanges.received.values()]
    ends.close()
    assert all(responder.is_cancelled for responder in still_open)
    # Batches that were not answered are answered by the scheduler, or run elsewhere.
    for exchange in ends.reference.exchanges.values():
        assert exchange.has_ended
    assert set(ends.calls_cancelled) >= calls
    assert len(ends.calls_cancelled) == len(set(ends.calls_cancelled))
    for opened in ends.opened.values():
        # The other model may answer the call later.
        opened.send(unavailable("late"))
    with suppress(WorkerGone):
        ends.submit()
    ends.opened.clear()
    ends.outcomes.clear()
    ends.running.clear()
    gc.collect()
    assert not slots_in_use(ends.inputs)
