"""Answers in the order of arrival, one or many to a request."""

from __future__ import annotations

import numpy as np
import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal
from rocserve.core.model_config import DynamicBatching, QueuePolicy
from rocserve.core.requests import Answer, InferResponse
from rocserve.core.tensors import Tensor
from rocserve.scheduling.response_sequencer import OrderedResponder, ResponseSequencer
from rocserve.workers.instance import WorkerGone


class Log:
    """A responder that writes down what it is told, with the data as it is at that moment."""

    def __init__(self, name: str, said: list[str]) -> None:
        self._name = name
        self._said = said

    def expect_many(self) -> None: ...

    def send(self, answer: Answer, final: bool = True) -> None:
        if isinstance(answer, ServeError):
            text = answer.text
        elif answer is None:
            text = "end"
        else:
            text = b"".join(bytes(tensor.data) for tensor in answer.outputs).decode() + ("." if final else "")
        self._said.append(f"{self._name}:{text}")

    def watch_cancellation(self, callback) -> None: ...


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def responders(said: list[str]) -> list[OrderedResponder]:
    sequencer = ResponseSequencer()
    return [OrderedResponder(Log(name, said), sequencer.ticket()) for name in "abc"]


def response(data: bytearray) -> InferResponse:
    return InferResponse.of("m", "1", "", [Tensor("OUT", DataType.UINT8, (1, len(data)), memoryview(data))])


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
    c.send(internal("broken"))
    assert said == ["a:2"]
    a.send(None)
    assert said == ["a:2", "a:end", "b:1"]
    b.send(response(bytearray(b"3")))
    assert said == ["a:2", "a:end", "b:1", "b:3.", "c:broken"]


def test_who_gives_up_its_ticket_keeps_nobody_waiting(responders, said) -> None:
    a, b, c = responders
    b.send(response(bytearray(b"1")))
    a.out_of_order().send(internal("refused"))
    assert said == ["b:1.", "a:refused"]
    c.send(None)
    assert said[-1] == "c:end"


def test_what_comes_while_another_is_sent_follows_it_on_memory_of_its_own(said) -> None:
    """A response may lead to the next: another step of an ensemble, say."""
    sequencer = ResponseSequencer()
    first, second = sequencer.ticket(), OrderedResponder(Log("b", said), sequencer.ticket())
    data = bytearray(b"1")

    def send() -> None:
        second.send(response(data))
        data[:] = b"9"
        sequencer.ticket().send(lambda: said.append("c"))
        said.append("a")

    first.send(send)
    assert said == ["a", "b:1.", "c"]


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


def test_what_comes_back_from_a_dead_worker_keeps_its_ticket(make_bench) -> None:
    bench = make_bench(DynamicBatching(preserve_ordering=True), max_batch_size=1, instances=2)
    first, second = bench.submit(1.0), bench.submit(2.0)
    lost = next(
        instance
        for instance in bench.instances
        if np.frombuffer(instance.executions[0].requests[0][0], np.float32)[0] == 1.0
    )
    (other,) = [instance for instance in bench.instances if instance is not lost]
    lost.closed = True
    lost.executions[0].finish(error=WorkerGone("gone"))
    other.executions[0].finish()
    assert not second.done.is_set()
    other.executions[1].finish()
    assert bench.answered == [first, second]
