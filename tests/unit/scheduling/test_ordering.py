"""Answers in the order of arrival, one or many to a request."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.errors import internal
from rocserve.core.model_config import DynamicBatching, QueuePolicy
from rocserve.core.requests import InferResponse
from rocserve.core.tensors import Tensor
from rocserve.scheduling.ordering import AnswerOrder, OrderedResponder
from rocserve.workers.channel import WorkerGone


class Log:
    """A responder that writes down what it is told, with the data as it is at that moment."""

    def __init__(self, name: str, said: list[str]) -> None:
        self._name = name
        self._said = said

    def expect_many(self) -> None: ...

    def send(self, response, final=True) -> None:
        data = b"".join(bytes(tensor.data) for tensor in response.outputs).decode()
        self._said.append(f"{self._name}:{data}{'.' if final else ''}")

    def end(self) -> None:
        self._said.append(f"{self._name}:end")

    def fail(self, error, final=True) -> None:
        self._said.append(f"{self._name}:{error.text}")

    def watch_cancellation(self, callback) -> None: ...


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def responders(said: list[str]) -> list[OrderedResponder]:
    order = AnswerOrder()
    return [OrderedResponder(Log(name, said), order.take_turn()) for name in "abc"]


def response(data: bytearray) -> InferResponse:
    return InferResponse("m", "1", "", [Tensor("OUT", DataType.UINT8, (1, len(data)), memoryview(data))])


def test_answers_that_come_in_order_are_given_at_once(responders, said) -> None:
    for responder in responders:
        responder.send(response(bytearray(b"x")))
    assert said == ["a:x.", "b:x.", "c:x."]


def test_responses_of_the_first_flow_and_those_of_others_wait(responders, said) -> None:
    a, b, c = responders
    data = bytearray(b"1")
    b.send(response(data), final=False)
    data[:] = b"9"
    a.send(response(bytearray(b"2")), final=False)
    c.fail(internal("broken"))
    assert said == ["a:2"]
    a.end()
    assert said == ["a:2", "a:end", "b:1"]
    b.send(response(bytearray(b"3")))
    assert said == ["a:2", "a:end", "b:1", "b:3.", "c:broken"]


def test_who_leaves_its_turn_keeps_nobody_waiting(responders, said) -> None:
    a, b, c = responders
    b.send(response(bytearray(b"1")))
    a.out_of_turn().fail(internal("refused"))
    assert said == ["b:1.", "a:refused"]
    c.end()
    assert said[-1] == "c:end"


def test_turns_are_taken_while_an_answer_is_given() -> None:
    """A scheduler takes them under its lock, which the answer may lead to: the next step of an ensemble."""
    order = AnswerOrder()
    is_giving, is_taken = threading.Event(), threading.Event()
    waited: list[bool] = []

    def answer() -> None:
        is_giving.set()
        waited.append(is_taken.wait(5))

    giver = threading.Thread(target=order.take_turn().give, args=(answer,))
    giver.start()
    assert is_giving.wait(5)
    order.take_turn()
    is_taken.set()
    giver.join(5)
    assert waited == [True]


def test_answers_of_two_models_may_lead_to_each_other() -> None:
    orders = [AnswerOrder(), AnswerOrder()]
    both_give = threading.Barrier(2, timeout=5)
    said: list[str] = []

    def give(own: AnswerOrder, other: AnswerOrder, name: str) -> None:
        def answer() -> None:
            both_give.wait()
            other.take_turn().give(lambda: said.append(f"behind {name}"))

        own.take_turn().give(answer)

    threads = [
        threading.Thread(target=give, args=(own, other, name), daemon=True)
        for own, other, name in ((*orders, "a"), (*reversed(orders), "b"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert sorted(said) == ["behind a", "behind b"]


def test_an_answer_that_comes_while_another_thread_gives_is_taken_along_on_memory_of_its_own(said) -> None:
    order = AnswerOrder()
    first, second = order.take_turn(), OrderedResponder(Log("b", said), order.take_turn())
    is_giving, may_end = threading.Event(), threading.Event()

    def answer() -> None:
        is_giving.set()
        assert may_end.wait(5)

    giver = threading.Thread(target=first.give, args=(answer,))
    giver.start()
    assert is_giving.wait(5)
    data = bytearray(b"1")
    second.send(response(data))
    data[:] = b"9"
    assert said == []
    may_end.set()
    giver.join(5)
    assert said == ["b:1."]


def test_what_is_refused_in_the_queue_does_not_wait_for_what_runs(make_bench) -> None:
    policy = QueuePolicy(default_timeout_microseconds=20_000)
    bench = make_bench(DynamicBatching(preserve_ordering=True, default_queue_policy=policy), max_batch_size=1)
    running, refused = bench.submit(1.0), bench.submit(2.0)
    assert refused.done.wait(5)
    assert refused.error.text == "Request timeout expired"
    assert not running.done.is_set()
    bench.executions[0].finish()
    assert running.error is None
    later = bench.submit(3.0)
    bench.executions[1].finish()
    assert np.frombuffer(later.response.outputs[0].data, np.float32)[0] == 6.0


def test_what_comes_back_from_a_dead_worker_keeps_its_turn(make_bench) -> None:
    bench = make_bench(DynamicBatching(preserve_ordering=True), max_batch_size=1, channels=2)
    first, second = bench.submit(1.0), bench.submit(2.0)
    lost = next(
        channel
        for channel in bench.channels
        if np.frombuffer(channel.executions[0].requests[0][0], np.float32)[0] == 1.0
    )
    (other,) = [channel for channel in bench.channels if channel is not lost]
    lost.closed = True
    lost.executions[0].finish(error=WorkerGone("gone"))
    other.executions[0].finish()
    time.sleep(0.01)
    assert not second.done.is_set()
    other.executions[1].finish()
    assert bench.answered == [first, second]
