"""What the tensors between steps hold: counted bytes, workers' heaps, objects."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from support.ensembles import FP32, HEAD, Answer, Many, Member, ask, ensemble, follow, plus, serve, step

from rocserve.core.datatypes import DataType
from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import StatusCode, invalid_argument
from rocserve.core.exchange import Exchange
from rocserve.core.model_config import EnsembleStep, InputConfig, ModelConfig, OutputConfig
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.responses import InferResponse
from rocserve.core.serving import ServedModel, ServingTable, ServingTableHolder
from rocserve.core.statistics import ModelStatistics
from rocserve.core.tensors import COUNTED_AT_ONCE, Tensor
from rocserve.core.validation import RequestValidator
from rocserve.plane import heap
from rocserve.plane.heap import Heap, HeapReader
from rocserve.plane.heap import Slot as HeapSlot
from rocserve.scheduling.ensemble import step_tensors
from rocserve.scheduling.ensemble.version import EnsembleVersion


def test_an_answered_request_leaves_nothing_behind():
    """Not even until the next garbage collection: its data may be large."""

    class Data(bytearray):
        """An object that can be weakly referenced."""

    member = Member("a", plus(1), held=True)
    version = ensemble(member, steps=[step("a", "X", "Y")])
    gc.collect()
    gc.disable()
    try:
        data = Data(np.array([1.0, 2.0], np.float32).tobytes())
        answer = Answer()
        version.infer(InferRequest(HEAD, "", [data]), Exchange(answer))
        # As a scheduler does with requests that wait for a while.
        responder = member._waiting[0][2]
        responder.watch_cancellation(functools.partial(print, responder))
        member.finish()
        assert answer.value() == [2.0, 3.0]
        gone = weakref.ref(data)
        # What a client's transport releases.
        del answer.leave
        del data, responder, answer
        member.requests.clear()
        assert gone() is None
    finally:
        gc.enable()


def test_what_goes_between_steps_counts_until_the_ensemble_has_answered():
    second = Member("b", plus(1), held=True)
    version = ensemble(
        Member("a", plus(1)), second, steps=[step("a", "X", "mid"), step("b", "mid", "Y")], memory=2 * 3 * 8
    )
    waiting = [ask(version, 1, 1) for _ in range(3)]
    assert version.memory.answers.own_bytes == 24
    refused = ask(version, 1, 1)
    assert refused.error.code is StatusCode.RESOURCE_EXHAUSTED
    assert refused.error.text.startswith("in ensemble 'e', tensors between the steps of ensembles may take 24 B ")
    # The second step's answer takes the place of its input.
    for left, answer in zip((16, 8, 0), waiting, strict=True):
        second.finish()
        assert answer.value() == [3, 3]
        assert version.memory.answers.own_bytes == left
    assert ask(version, 1, 1).error is None


def test_what_goes_between_steps_is_given_back_when_a_step_fails():
    def refuse(values):
        raise invalid_argument("no")

    last = Member("b", refuse, held=True)
    version = ensemble(Member("a", plus(1)), last, steps=[step("a", "X", "mid"), step("b", "mid", "Y")])
    answer = ask(version, 1, 1)
    assert version.memory.answers.own_bytes == 8
    last.finish()
    assert answer.error.text == "in ensemble 'e', no"
    assert version.memory.answers.own_bytes == 0


def decoupled_run():
    """Return an ensemble whose first member answers many times, its second member, the first one's responder for a
    request that runs, and that request's client."""
    first, second = Member("a", plus(1), held=True), Member("b", plus(1), held=True)
    version = ensemble(first, second, steps=[step("a", "X", "mid"), step("b", "mid", "Y")], decoupled=True)
    answer = Many()
    version.infer(InferRequest(HEAD, "", [bytes(8)]), Exchange(answer))
    responder = first._waiting.pop()[2]
    responder.expect_many()
    return version, second, responder, answer


def test_the_answers_of_a_decoupled_member_count_until_each_has_led_to_one():
    version, second, responder, answer = decoupled_run()
    for value in (1.0, 2.0, 3.0):
        data = np.array([value, value], np.float32).tobytes()
        responder.send(InferResponse.of("a", "1", "", [Tensor("OUT", FP32, (1, 2), data)]), final=False)
    assert version.memory.answers.own_bytes == 24
    second.finish()
    assert answer.value() == [2, 2]
    # The first request has ended; the second step's answers to the others have not arrived.
    assert version.memory.answers.own_bytes == 16
    second._waiting.reverse()
    second.finish()
    # The third step's input takes the place of the second step's.
    assert (answer.count, version.memory.answers.own_bytes) == (1, 16)
    second.finish()
    assert (answer.count, version.memory.answers.own_bytes) == (3, 0)
    responder.send(None)
    assert version.memory.answers.own_bytes == 0


def test_a_step_that_is_answered_leaves_nothing_to_tell_of_its_clients_end():
    """A stream may never end; the tensors of its finished steps are not kept until then."""

    class Watcher:
        def __call__(self) -> None:
            left.append(self)

    left: list[Watcher] = []
    _, second, responder, answer = decoupled_run()
    watchers: list[weakref.ref[Watcher]] = []
    for _ in range(2):
        responder.send(InferResponse.of("a", "1", "", [Tensor("OUT", FP32, (1, 2), bytes(8))]), final=False)
        watcher = Watcher()
        second._waiting[-1][2].watch_cancellation(watcher)
        watchers.append(weakref.ref(watcher))
        del watcher
    second.finish()
    assert [watcher() is None for watcher in watchers] == [True, False]
    answer.leave()
    assert left == [watchers[1]()]


class Texts:
    """A member that answers with this many empty strings."""

    version = 1
    sees_requests = is_cold = False
    properties: ClassVar[dict[str, str]] = {}

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.config = ModelConfig(
            name=name,
            inputs=(InputConfig("IN", DataType.BYTES, (-1,)),),
            outputs=(OutputConfig("OUT", DataType.BYTES, (-1,)),),
        )
        self.requests: list[InferRequest] = []
        self._output = Tensor("OUT", DataType.BYTES, (count,), bytes(4 * count))

    def infer(self, request: InferRequest, responder) -> None:
        self.requests.append(request)
        responder.send(InferResponse.of(self.name, "1", request.id, [self._output]))


class InAHeap(Member):
    """Answers as a worker does, in its own heap."""

    def __init__(self, name: str, rule, is_large: bool = False) -> None:
        super().__init__(name, rule, max_batch_size=ROWS)
        self._is_large = is_large
        self._heap = Heap("outputs", 1 << 20)
        self.reader = HeapReader(self._heap.open_for_reading())
        self.placed: list[int] = []
        self.returned: list[int] = []

    def _answer(self, request, plan, responder) -> None:
        values = self._rule(np.frombuffer(request.data[0], np.float32))
        offset, view = self._heap.allocate(values.nbytes)
        self.placed.append(offset)
        view[:] = values.tobytes()
        outputs = [Tensor("OUT", FP32, plan.inputs[0].shape, self.reader.view(offset, values.nbytes))]
        response = InferResponse.of(self.name, "1", request.id, outputs)
        response.slot = HeapSlot(self.returned.append, offset, self.reader)
        response.is_large = self._is_large
        responder.send(response)


ROWS = 1024
"""Rows of 8 bytes: so many that keeping them is cheaper than copying."""


def test_a_tensor_lies_where_its_worker_has_left_it_until_its_reader_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heap, "MOST_KEPT_BYTES", 2 * 8 * ROWS)
    first, last = InAHeap("first", plus(1)), Member("last", plus(1), max_batch_size=ROWS, held=True)
    steps = [step("first", "X", "m"), step("last", "m", "Y")]
    version = ensemble(first, last, steps=steps, max_batch_size=ROWS)
    answers = [ask(version, *range(2 * ROWS)) for _ in range(3)]
    # There is no room for the third one's.
    one, other, third = first.placed
    assert [first.reader.offset_of(request.data[0]) for request in last.requests] == [one, other, None]
    # Its worker may read them in that heap.
    assert [getattr(request.data, "offset", None) for request in last.requests] == [one, other, None]
    assert first.returned == [third]
    last.requests.clear()
    for answer in answers:
        last.finish()
        assert answer.value() == [value + 2 for value in range(2 * ROWS)]
    assert first.returned == [third, one, other]
    ask(version, *range(2 * ROWS))
    assert first.reader.offset_of(last.requests[0].data[0]) == first.placed[-1]


class Sum(Member):
    """Adds up two inputs."""

    def __init__(self) -> None:
        super().__init__("sum", plus(0), max_batch_size=ROWS, held=True)
        inputs = tuple(InputConfig(name, FP32, (2,)) for name in ("IN", "MORE"))
        self.config = replace(self.config, inputs=inputs)
        self._validator = RequestValidator(self.config)

    def _answer(self, request, plan, responder) -> None:
        more = np.frombuffer(request.data[1], np.float32)
        self._rule = lambda values: values + more
        super()._answer(request, plan, responder)


@pytest.mark.parametrize("least", [8 * ROWS, 8 * ROWS + 1])
def test_of_several_inputs_the_large_ones_lie_where_their_workers_have_left_them(
    monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    monkeypatch.setattr(step_tensors, "_NAMED_FROM", least)
    first, last = InAHeap("first", plus(1)), Sum()
    steps = [step("first", "X", "m"), EnsembleStep("sum", -1, {"IN": "X", "MORE": "m"}, {"OUT": "Y"})]
    version = ensemble(first, last, steps=steps, max_batch_size=ROWS)
    answer = ask(version, *range(2 * ROWS))
    (request,) = last.requests
    named = getattr(request.data, "elsewhere", {})
    assert named == ({1: (first.reader, first.placed[0])} if least == 8 * ROWS else {})
    del request, named
    last.requests.clear()
    assert first.returned == []
    last.finish()
    assert answer.value() == [2 * value + 1 for value in range(2 * ROWS)]
    assert first.returned == first.placed


def test_of_large_tensors_only_those_that_may_not_stay_are_copied_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "MOST_KEPT_BYTES", 2 * 8 * ROWS)
    monkeypatch.setattr(step_tensors, "COPIED_AT_ONCE", 0)
    first, last = InAHeap("first", plus(1), is_large=True), Member("last", plus(1), max_batch_size=ROWS, held=True)
    version = ensemble(first, last, steps=[step("first", "X", "m"), step("last", "m", "Y")], max_batch_size=ROWS)
    copying: list[Iterator[None]] = []
    monkeypatch.setattr(version._parts.dispatcher, "work_off", copying.append)
    answers = [ask(version, *range(2 * ROWS)) for _ in range(3)]
    assert [first.reader.offset_of(request.data[0]) for request in last.requests] == first.placed[:2]
    (steps,) = copying
    assert len([*steps]) >= 1
    for answer in answers:
        last.finish()
        assert answer.value() == [value + 2 for value in range(2 * ROWS)]


def test_an_answer_of_the_ensemble_holds_what_lies_in_a_workers_heap() -> None:
    first, last = InAHeap("first", plus(1)), Member("last", plus(1), max_batch_size=ROWS, held=True)
    steps = [step("first", "X", "m"), step("last", "X", "Y")]
    version = ensemble(first, last, steps=steps, outputs=("Y", "m"), max_batch_size=ROWS)
    answer = ask(version, *range(2 * ROWS))
    last.finish()
    assert answer.value(1) == [value + 1 for value in range(2 * ROWS)]
    assert answer.response.slot is not None
    assert first.returned == []
    answer.response = None
    gc.collect()
    assert first.returned == first.placed


def test_many_strings_between_members_are_counted_in_steps():
    begun: list[Iterator[None]] = []
    members = Texts("many", 8 * COUNTED_AT_ONCE), Texts("few", 1)
    tables = ServingTableHolder()
    tables.table = ServingTable({member.name: ServedModel(member.name, {1: member}, member) for member in members})
    config = ModelConfig(
        name="e",
        inputs=(InputConfig("X", DataType.BYTES, (-1,)),),
        outputs=(OutputConfig("Y", DataType.BYTES, (-1,)),),
        ensemble_steps=(step("many", "X", "mid"), step("few", "mid", "Y")),
    )
    version = EnsembleVersion(
        config, b"", 1, ModelStatistics(), Dispatcher(tables, begun.append), RequestMemory(64 * COUNTED_AT_ONCE)
    )
    follow(version)
    answer = Answer()
    version.infer(
        InferRequest(RequestHead("e", "", (InputHead("X", "BYTES", (1,)),)), "", [bytes(4)]), Exchange(answer)
    )
    serve(version)  # The request has its members.
    (counting,) = begun
    assert members[1].requests == []
    assert len(list(counting)) >= 8
    assert members[1].requests[0].element_faults == [""]
    assert answer.response.outputs[0].shape == (1,)
