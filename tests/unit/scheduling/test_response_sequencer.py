"""Answers in the order of arrival, one or many to a request; and answers to a batch whose clients are in other
processes: equal ones are sent together over each link."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.hand_loop import HandLoop
from support.waiting import PATIENCE_SECONDS

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal
from rocserve.core.exchange import Exchange
from rocserve.core.model_config import DynamicBatching, InputConfig, ModelConfig, OutputConfig, QueuePolicy
from rocserve.core.requests import InferRequest, InputHead, RequestedOutput, RequestHead
from rocserve.core.responses import Answer, InferResponse
from rocserve.core.tensors import Tensor, TensorHead
from rocserve.core.validation import RequestValidator
from rocserve.plane.heap import COPIED_AT_ONCE, Slot
from rocserve.scheduling.batch import BatchAnswers, LinkedResponder, ResponseMaker
from rocserve.scheduling.response_sequencer import OrderHook, ResponseSequencer
from rocserve.workers.instance import WorkerGone
from rocserve.workers.results import BatchOutcome


class Log:
    """A responder that records its responses, with their data at that moment."""

    def __init__(self, name: str, sent_lines: list[str]) -> None:
        self._name = name
        self._lines = sent_lines

    def expect_many(self) -> None: ...

    def send(self, answer: Answer, final: bool = True) -> None:
        if isinstance(answer, ServeError):
            text = answer.text
        elif answer is None:
            text = "end"
        else:
            text = b"".join(bytes(tensor.data) for tensor in answer.outputs).decode() + ("." if final else "")
        self._lines.append(f"{self._name}:{text}")

    def watch_cancellation(self, callback) -> None: ...


@pytest.fixture
def sent_lines() -> list[str]:
    return []


@pytest.fixture
def exchanges(sent_lines: list[str]) -> list[Exchange]:
    sequencer = ResponseSequencer()
    return [in_order(Log(name, sent_lines), sequencer) for name in "abc"]


def in_order(client: Log, sequencer: ResponseSequencer, work_off=None) -> Exchange:
    exchange = Exchange(client)
    exchange.add(OrderHook(sequencer.ticket(), work_off or HandLoop().work_off))
    return exchange


def response(data: bytearray) -> InferResponse:
    """A response in a worker's memory."""
    made = InferResponse.of("m", "1", "", [Tensor("OUT", DataType.UINT8, (1, len(data)), memoryview(data))])
    made.slot = object()
    return made


def test_answers_that_come_in_order_are_given_at_once(exchanges, sent_lines) -> None:
    for exchange in exchanges:
        exchange.send(response(bytearray(b"x")))
    assert sent_lines == ["a:x.", "b:x.", "c:x."]


def test_responses_of_the_first_flow_and_those_of_others_wait(exchanges, sent_lines) -> None:
    a, b, c = exchanges
    data = bytearray(b"1")
    b.send(response(data), final=False)
    data[:] = b"9"
    a.send(response(bytearray(b"2")), final=False)
    c.send(internal("broken"))
    assert sent_lines == ["a:2"]
    a.send(None)
    assert sent_lines == ["a:2", "a:end", "b:1"]
    b.send(response(bytearray(b"3")))
    assert sent_lines == ["a:2", "a:end", "b:1", "b:3.", "c:broken"]


def test_who_gives_up_its_ticket_keeps_nobody_waiting(exchanges, sent_lines) -> None:
    a, b, c = exchanges
    b.send(response(bytearray(b"1")))
    a.refuse(internal("refused"))
    assert sent_lines == ["b:1.", "a:refused"]
    c.send(None)
    assert sent_lines[-1] == "c:end"


class Failing(Log):
    def send(self, answer: Answer, final: bool = True) -> None:
        raise RuntimeError("a fault of the server")


def test_a_response_that_fails_holds_back_no_other(sent_lines) -> None:
    sequencer = ResponseSequencer()
    clients = [Log("a", sent_lines), Failing("b", sent_lines), Log("c", sent_lines)]
    first, *others = [in_order(client, sequencer) for client in clients]
    for exchange in others:
        exchange.send(response(bytearray(b"1")))
    with pytest.raises(RuntimeError, match="a fault of the server"):
        first.send(response(bytearray(b"1")))
    assert sent_lines == ["a:1.", "c:1."]


def test_what_comes_while_another_is_sent_follows_it_on_memory_of_its_own(sent_lines) -> None:
    """A response may lead to the next: another step of an ensemble, for example."""
    sequencer = ResponseSequencer()
    first, second = sequencer.ticket(), in_order(Log("b", sent_lines), sequencer)
    data = bytearray(b"1")

    def send() -> None:
        second.send(response(data))
        data[:] = b"9"
        sequencer.ticket().send(lambda: sent_lines.append("c"))
        sent_lines.append("a")

    first.send(send)
    assert sent_lines == ["a", "b:1.", "c"]


def test_a_large_answer_that_waits_for_others_is_copied_some_at_a_time(sent_lines) -> None:
    sequencer = ResponseSequencer()
    copying: list[Iterator[None]] = []
    first, second = (in_order(Log(name, sent_lines), sequencer, copying.append) for name in "ab")
    large = response(bytearray(b"2" * (3 * COPIED_AT_ONCE)))
    large.is_large = True
    second.send(large)
    first.send(response(bytearray(b"1")))
    assert sent_lines == ["a:1."]
    assert len(list(copying[0])) >= 3
    assert sent_lines[1:] == [f"b:{'2' * (3 * COPIED_AT_ONCE)}."]


def test_what_is_refused_in_the_queue_does_not_wait_for_what_runs(make_bench) -> None:
    policy = QueuePolicy(default_timeout_microseconds=20_000)
    bench = make_bench(DynamicBatching(preserve_ordering=True, default_queue_policy=policy), max_batch_size=1)
    running, refused = bench.submit(1.0), bench.submit(2.0)
    assert refused.done.wait(PATIENCE_SECONDS)
    assert refused.error.text == "Request timeout expired"
    assert not running.done.is_set()
    bench.executions[0].finish()
    assert running.error is None
    later = bench.submit(3.0)
    bench.executions[1].finish()
    assert later.number == 6.0


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


MODEL = ModelConfig(
    name="m",
    max_batch_size=8,
    inputs=(InputConfig("IN", DataType.INT32, (2,)),),
    outputs=(OutputConfig("A", DataType.INT32, (2,)), OutputConfig("B", DataType.INT32, (1,))),
)
BOTH, ONLY_B, CLASSES = (
    RequestHead("m", "", (InputHead("IN", "INT32", (1, 2)),), outputs)
    for outputs in ((), (RequestedOutput("B"),), (RequestedOutput("A", {"classification": 1}),))
)
HEADS = (TensorHead("A", DataType.INT32, (1, 2)), TensorHead("B", DataType.INT32, (1, 1)))
B_AT = 64


class Link:
    def __init__(self, sent: list[object], reads: bool = True) -> None:
        self.sent = sent
        self.reads = reads

    def answer_together(self, head: object, slot: Slot, nbytes: int, places: list[int]) -> bool:
        if self.reads:
            self.sent.append((self, [one.name for one in head.outputs], nbytes, places))  # type: ignore[attr-defined]
        return self.reads


class Linked(LinkedResponder):
    def __init__(self, link: Link, token: int) -> None:
        self.link, self.token = link, token

    def send(self, answer: Answer, final: bool = True) -> None:
        assert final
        self.link.sent.append((self.token, answer))


def outcome_of(count: int) -> BatchOutcome:
    """Results of single rows: both outputs of a request, one after the other."""
    memory = np.arange(count * 32, dtype=np.int32)
    outcome = BatchOutcome(None, (1, 2, 3), memoryview(memory).cast("B"))
    outcome.parts = [(128 * index, (HEADS, [slice(0, 8), slice(B_AT, B_AT + 4)])) for index in range(count)]
    outcome.slot = Slot(lambda place: None, 4096)
    return outcome


def answers_to(outcome: BatchOutcome, *asked: tuple[RequestHead, Linked]) -> list[str]:
    """Add all answers and send them; return the errors."""
    validator = RequestValidator(MODEL)
    answers = BatchAnswers(ResponseMaker(MODEL, 1), outcome)
    errors = []
    for index, (head, responder) in enumerate(asked):
        request = InferRequest(head, str(index), [bytes(8)])
        validator.validate(request)
        request.exchange = Exchange(responder)  # type: ignore[arg-type]
        error = answers.add(request, index)
        errors.append("" if error is None else error.text)
    answers.send()
    return errors


def values(answer: object) -> list[list[int]]:
    assert isinstance(answer, InferResponse)
    return [tensor.numpy().ravel().tolist() for tensor in answer.outputs]


def test_those_of_one_link_that_are_alike_go_together() -> None:
    sent: list[object] = []
    first, second = Link(sent), Link(sent)
    asked = [(BOTH, first, 10), (BOTH, second, 20), (BOTH, first, 11), (ONLY_B, first, 12)]
    assert answers_to(outcome_of(4), *[(head, Linked(link, token)) for head, link, token in asked]) == [""] * 4
    assert sent == [
        (first, ["A", "B"], 512, [10, 0, B_AT, 11, 256, 256 + B_AT]),
        (second, ["A", "B"], 512, [20, 128, 128 + B_AT]),
        (first, ["B"], 512, [12, 384 + B_AT]),
    ]


def test_what_is_made_for_one_request_goes_by_itself_and_overtakes_nobody() -> None:
    sent: list[object] = []
    link = Link(sent)
    asked = [(BOTH, 1), (CLASSES, 2), (BOTH, 3)]
    assert answers_to(outcome_of(3), *[(head, Linked(link, token)) for head, token in asked]) == [""] * 3
    together, (token, classes), last = sent
    assert together == (link, ["A", "B"], 384, [1, 0, B_AT])
    assert token == 2 and isinstance(classes, InferResponse) and classes.head.outputs[0].datatype is DataType.BYTES
    assert last == (link, ["A", "B"], 384, [3, 256, 256 + B_AT])


class FailingLinked(Linked):
    def send(self, answer: Answer, final: bool = True) -> None:
        raise RuntimeError("a fault of the server")


def test_an_answer_that_fails_holds_back_no_other_of_its_batch() -> None:
    sent: list[tuple[int, object]] = []
    link = Link(sent, reads=False)  # type: ignore[arg-type]
    asked = [(CLASSES, FailingLinked(link, 1)), (CLASSES, Linked(link, 2)), (BOTH, FailingLinked(link, 3))]
    with pytest.raises(RuntimeError, match="a fault of the server"):
        answers_to(outcome_of(5), *asked, (BOTH, Linked(link, 4)), (BOTH, Linked(link, 5)))
    assert [token for token, _ in sent] == [2, 4, 5]


@pytest.mark.parametrize("fault", ["a failure", "parameters", "a link that does not read"])
def test_otherwise_each_is_answered_by_itself(fault: str) -> None:
    sent: list[tuple[int, object]] = []
    link = Link(sent, reads=fault != "a link that does not read")  # type: ignore[arg-type]
    outcome = outcome_of(2)
    if fault == "a failure":
        outcome.failures[1] = internal("no")
    elif fault == "parameters":
        outcome.parameters[1] = {"k": 1}
    errors = answers_to(outcome, (BOTH, Linked(link, 1)), (BOTH, Linked(link, 2)))
    assert errors == ["", "no" if fault == "a failure" else ""]
    assert [token for token, _ in sent] == [1, 2]
    assert values(sent[0][1]) == [[0, 1], [16]]
    if fault == "a failure":
        assert sent[1][1] is outcome.failures[1]
    else:
        assert values(sent[1][1]) == [[32, 33], [48]]
        assert sent[1][1].parameters == outcome.parameters.get(1, {})  # type: ignore[attr-defined]
