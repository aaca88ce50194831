"""Ensembles as graphs: order, fan-out, only the needed steps, members with other batching, errors."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from support.dispatching import dispatcher_of

from rocserve.core.datatypes import DataType
from rocserve.core.device_references import DEVICE_PROPERTY, DeviceReference, pack_references, references_of
from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import ServeError, StatusCode, invalid_argument, unavailable
from rocserve.core.exchange import Exchange
from rocserve.core.latencies import Distribution, HistogramReading, LatencyOptions
from rocserve.core.model_config import EnsembleStep, InputConfig, InstanceGroup, InstanceKind, ModelConfig, OutputConfig
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest, InputHead, RequestedOutput, RequestHead, RequestPlan
from rocserve.core.responses import Answer as Answered
from rocserve.core.responses import InferResponse
from rocserve.core.sequences import SequenceTag
from rocserve.core.serving import ServedModel, ServingTable, ServingTableHolder
from rocserve.core.statistics import ModelStatistics
from rocserve.core.tensors import COUNTED_AT_ONCE, Tensor, TensorHead
from rocserve.core.validation import RequestValidator
from rocserve.plane import heap
from rocserve.plane.heap import Heap, HeapReader
from rocserve.plane.heap import Slot as HeapSlot
from rocserve.scheduling.ensemble import step_tensors
from rocserve.scheduling.ensemble.version import EnsembleVersion
from rocserve.scheduling.response_cache import CachedAnswers, ResponseCache

FP32 = DataType.FP32
HEAD = RequestHead("e", "", (InputHead("X", "FP32", (1, 2)),))


class Member:
    """A member that answers immediately with `rule` of its input, or keeps the request until `finish`."""

    def __init__(
        self, name: str, rule, max_batch_size: int = 8, held: bool = False, outputs=("OUT",), labels=()
    ) -> None:
        self.name = name
        self.version = 1
        self.sees_requests = False
        self.is_cold = False
        self.wanted = 0
        self.config = ModelConfig(
            name=name,
            max_batch_size=max_batch_size,
            inputs=(InputConfig("IN", FP32, (2,)),),
            outputs=tuple(OutputConfig(output, FP32, (2,), labels=labels) for output in outputs),
        )
        self.config_message = b""
        self.statistics = ModelStatistics()
        self.properties: dict[str, str] = {}
        self.requests: list[InferRequest] = []
        self._rule = rule
        self._held = held
        self._waiting: list = []
        self._validator = RequestValidator(self.config)

    def want(self) -> None:
        self.wanted += 1

    def infer(self, request: InferRequest, responder) -> None:
        try:
            plan = self._validator.validate(request)
        except ServeError as error:
            responder.send(error)
            return
        self.requests.append(request)
        if self._held:
            self._waiting.append((request, plan, responder))
        else:
            self._answer(request, plan, responder)

    def finish(self) -> None:
        self._answer(*self._waiting.pop(0))

    def _answer(self, request, plan, responder) -> None:
        try:
            values = self._rule(np.frombuffer(request.data[0], np.float32))
        except ServeError as error:
            responder.send(error)
            return
        shape = plan.inputs[0].shape
        outputs = [Tensor(name, FP32, shape, memoryview(values.tobytes())) for name in plan.outputs]
        responder.send(InferResponse.of(self.name, "1", request.id, outputs))


class Answer:
    def __init__(self) -> None:
        self.response: InferResponse | None = None
        self.error: ServeError | None = None
        self.count = 0

    def send(self, answer: Answered, final: bool = True) -> None:
        if isinstance(answer, ServeError):
            self.error = answer
        elif answer is not None:
            self.response = answer
        self.count += answer is not None

    def watch_cancellation(self, callback) -> None:
        self.leave = callback

    def value(self, index: int = 0) -> list[float]:
        assert self.error is None, self.error
        return np.frombuffer(self.response.outputs[index].data, np.float32).tolist()


class Many(Answer):
    """The client of a stream."""

    def expect_many(self) -> None: ...


def step(model: str, reads: str, writes: str, output: str = "OUT") -> EnsembleStep:
    return EnsembleStep(model, -1, {"IN": reads}, {output: writes})


def ensemble(
    *members: Member,
    steps,
    outputs=("Y",),
    max_batch_size: int = 8,
    decoupled: bool = False,
    memory: int = 1 << 20,
    latencies: LatencyOptions | None = None,
) -> EnsembleVersion:
    tables = ServingTableHolder()
    tables.table = ServingTable({member.name: ServedModel(member.name, {1: member}, member) for member in members})
    config = ModelConfig(
        name="e",
        backend="ensemble",
        max_batch_size=max_batch_size,
        inputs=(InputConfig("X", FP32, (2,)),),
        outputs=tuple(OutputConfig(name, FP32, (2,)) for name in outputs),
        ensemble_steps=tuple(steps),
        decoupled=decoupled,
    )
    statistics = ModelStatistics(None if latencies is None else latencies.distributions(config))
    version = EnsembleVersion(config, b"", 1, statistics, dispatcher_of(tables), RequestMemory(memory))
    # The repository adds these.
    version.properties, version.is_cold = {}, False
    return version


def ask(version: EnsembleVersion, *values: float, outputs=(), shape=None, **parameters) -> Answer:
    head = RequestHead(
        "e",
        "",
        (InputHead("X", "FP32", shape or (len(values) // 2, 2)),),
        tuple(outputs),
        parameters,
    )
    answer = Answer()
    version.infer(InferRequest(head, "id-1", [np.array(values, np.float32).tobytes()]), Exchange(answer))
    return answer


def plus(number: float):
    return lambda values: values + number


def test_fan_out_runs_at_once_and_fan_in_waits_for_both():
    left, right = Member("left", plus(1), held=True), Member("right", plus(2), held=True)
    joined: list[np.ndarray] = []
    version = ensemble(
        left,
        right,
        Member("last", lambda values: joined.append(values) or values),
        steps=[step("left", "X", "l"), step("right", "X", "r"), step("last", "l", "Y")],
        outputs=("Y", "r"),
    )
    answer = ask(version, 0, 0)
    assert len(left.requests) == len(right.requests) == 1
    left.finish()
    assert answer.response is None
    right.finish()
    assert [tensor.name for tensor in answer.response.outputs] == ["Y", "r"]
    assert [answer.value(0), answer.value(1)] == [[1, 1], [2, 2]]


def test_only_needed_steps_run_and_only_needed_outputs_are_asked_for():
    wanted, unwanted = Member("wanted", plus(1), outputs=("OUT", "EXTRA")), Member("unwanted", plus(2))
    version = ensemble(
        wanted,
        unwanted,
        steps=[
            EnsembleStep("wanted", -1, {"IN": "X"}, {"OUT": "Y", "EXTRA": "spare"}),
            step("unwanted", "X", "Z"),
        ],
        outputs=("Y", "Z"),
    )
    assert ask(version, 1, 1, outputs=[RequestedOutput("Y")]).value() == [2, 2]
    assert unwanted.requests == []
    assert [output.name for output in wanted.requests[0].head.outputs] == ["OUT"]


def test_a_member_is_asked_with_the_same_head_again():
    member = Member("a", plus(1))
    version = ensemble(member, steps=[step("a", "X", "Y")])
    ask(version, 1, 1)
    ask(version, 2, 2)
    assert member.requests[0].head is member.requests[1].head


def test_a_parameter_keeps_its_type_where_another_request_has_an_equal_one():
    member = Member("a", plus(1))
    version = ensemble(member, steps=[step("a", "X", "Y")])
    for value in (1, True, 1.0):
        ask(version, 1, 1, own=value)
    assert [repr(request.head.parameters["own"]) for request in member.requests] == ["1", "True", "1.0"]


@pytest.mark.parametrize(
    ("member_batch", "ensemble_batch", "member_shape", "shape"), [(0, 8, (2,), (1, 2)), (8, 0, (1, 2), (2,))]
)
def test_a_batch_dimension_of_one_is_removed_or_added(
    member_batch: int, ensemble_batch: int, member_shape: tuple[int, ...], shape: tuple[int, ...]
):
    member = Member("a", plus(1), max_batch_size=member_batch)
    answer = ask(ensemble(member, steps=[step("a", "X", "Y")], max_batch_size=ensemble_batch), 1, 2, shape=shape)
    assert member.requests[0].head.inputs[0].shape == member_shape
    assert answer.response.outputs[0].shape == shape


def test_the_ensembles_own_reshapes_are_applied():
    plain = ensemble(Member("a", plus(1.0)), steps=[step("a", "X", "Y")])
    config = replace(
        plain.config,
        inputs=(InputConfig("X", FP32, (1, 2), reshape=(2,)),),
        outputs=(OutputConfig("Y", FP32, (2, 1, 1), reshape=(2,)),),
    )
    version = EnsembleVersion(config, b"", 1, ModelStatistics(), plain.dispatcher, RequestMemory(1 << 20))
    answer = ask(version, 1, 2, 3, 4, shape=(2, 1, 2))
    assert answer.value() == [2, 3, 4, 5]
    assert answer.response.outputs[0].shape == (2, 2, 1, 1)


def test_two_failing_steps_answer_once():
    def refuse(values: np.ndarray) -> np.ndarray:
        raise invalid_argument("no")

    version = ensemble(
        Member("a", refuse), Member("b", refuse), steps=[step("a", "X", "Y"), step("b", "X", "Z")], outputs=("Y", "Z")
    )
    assert ask(version, 1, 2).count == 1


def test_no_step_begins_after_another_has_failed():
    def refuse(values: np.ndarray) -> np.ndarray:
        raise invalid_argument("no")

    member = Member("b", plus(1), held=True)
    version = ensemble(
        Member("a", refuse), member, steps=[step("a", "X", "Y"), step("b", "X", "Z")], outputs=("Y", "Z")
    )
    assert ask(version, 1, 2).count == 1
    assert not member.requests


@pytest.mark.parametrize("sequence", [True, "x" * 129], ids=["of no type", "too long"])
def test_what_a_member_says_of_a_sequence_and_cannot_be_is_the_requests_error(sequence):
    class Says(Member):
        def infer(self, request: InferRequest, responder) -> None:
            self.responder = responder

    member = Says("a", plus(1))
    answer = ask(ensemble(member, steps=[step("a", "X", "Y")]), 1, 2)
    output = Tensor("OUT", FP32, (1, 2), bytes(8))
    member.responder.send(InferResponse.of("a", "1", "id-1", [output], {"sequence_id": sequence}))
    assert answer.count == 1
    assert answer.error.text.startswith("in ensemble 'e', ")


def test_a_member_that_is_gone_is_named():
    version = ensemble(Member("a", plus(1)), steps=[step("gone", "X", "Y")])
    answer = ask(version, 1, 2)
    assert answer.error.code is StatusCode.NOT_FOUND
    assert "gone" in answer.error.text
    assert answer.error.text.startswith("in ensemble 'e', ")


def test_a_member_replaced_meanwhile_serves_the_next_request():
    version = ensemble(Member("a", plus(1)), steps=[step("a", "X", "Y")])
    assert ask(version, 1, 1).value() == [2, 2]
    serve(version, Member("a", plus(5)))
    assert ask(version, 1, 1).value() == [6, 6]


CHAIN = [step("a", "X", "Z"), step("b", "Z", "Y")]


def test_a_request_runs_on_the_members_that_were_served_when_it_began():
    first = Member("a", plus(1), held=True)
    version = ensemble(first, Member("b", plus(10)), steps=CHAIN)
    follow(version)
    members, unused = version.members, []
    before = ask(version, 0, 0)
    serve(version, Member("a", plus(2)), Member("b", plus(20)))
    follow(version)
    members.wait(lambda: unused.append(True))
    assert ask(version, 0, 0).value() == [22, 22]
    assert not unused
    first.finish()
    assert before.value() == [11, 11]
    assert unused == [True]
    assert not members.versions, "what was replaced does not stay in memory"


def test_the_steps_of_an_inner_ensemble_run_on_the_same_members():
    first, kept = Member("first", plus(100), held=True), Member("b", plus(10))
    inner = ensemble(Member("a", plus(1)), kept, steps=CHAIN)
    inner.name = "inner"
    outer = ensemble(
        steps=[step("first", "X", "M"), EnsembleStep("inner", -1, {"X": "M"}, {"Y": "Y"})],
    )
    inner.dispatcher.tables = outer.dispatcher.tables
    serve(outer, first, inner, Member("a", plus(1)), kept)
    follow(inner, outer)
    old = inner.members
    before = ask(outer, 0, 0)
    serve(outer, first, inner, Member("a", plus(2)), Member("b", plus(20)))
    follow(inner, outer)
    assert not old.is_in_use
    first.finish()
    assert before.value() == [111, 111]
    after = ask(outer, 0, 0)
    first.finish()
    assert after.value() == [122, 122]


def test_the_labels_are_those_of_the_members_that_ran():
    first = Member("a", plus(1), held=True)
    version = ensemble(first, Member("b", plus(1), labels=("cat", "dog")), steps=CHAIN)
    follow(version)
    outputs = (RequestedOutput("Y", {"classification": 1}),)
    head = RequestHead("e", "", HEAD.inputs, outputs)
    data = np.array([1.0, 2.0], np.float32).tobytes()
    version.infer(InferRequest(head, "", [data]), Exchange(answer := Answer()))
    serve(version)
    first.finish()
    assert bytes(answer.response.outputs[0].data).endswith(b":1:dog")


@pytest.mark.parametrize("is_cold_before", [False, True])
def test_a_step_finds_a_cold_member_by_name(is_cold_before):
    first, evicted = Member("a", plus(1), held=True), Member("b", plus(10))
    evicted.is_cold = is_cold_before
    version = ensemble(first, evicted, steps=CHAIN)
    follow(version)
    answer = ask(version, 0, 0)
    assert evicted.wanted == is_cold_before
    evicted.is_cold = True
    serve(version, first, Member("b", plus(20)))
    first.finish()
    assert answer.value() == [21, 21]
    assert not evicted.requests


def test_a_failed_request_is_over_when_its_inner_ensemble_is():
    slow = Member("a", plus(1), held=True)
    inner = ensemble(slow, steps=[step("a", "X", "Y")])
    inner.name = "inner"

    def refuse(values: np.ndarray) -> np.ndarray:
        raise invalid_argument("no")

    other = Member("other", refuse, held=True)
    steps = [EnsembleStep("inner", -1, {"X": "X"}, {"Y": "Y"}), step("other", "X", "Z")]
    outer = ensemble(steps=steps, outputs=("Y", "Z"))
    inner.dispatcher.tables = outer.dispatcher.tables
    serve(outer, inner, slow, other)
    follow(inner, outer)
    answer = ask(outer, 0, 0)
    outer.members.leave()
    other.finish()
    assert answer.error is not None
    assert outer.members.is_in_use, "a step still runs"
    slow.finish()
    assert not outer.members.is_in_use


def test_cancelling_reaches_a_waiting_step():
    cancelled = []

    class Waiting(Member):
        def infer(self, request, responder) -> None:
            responder.watch_cancellation(lambda: cancelled.append(self.name))

    version = ensemble(
        Waiting("a", plus(1)),
        Waiting("b", plus(1)),
        steps=[step("a", "X", "Y"), step("b", "X", "Z")],
        outputs=("Y", "Z"),
    )
    ask(version, 1, 1).leave()
    assert sorted(cancelled) == ["a", "b"]


def test_no_step_begins_after_the_client_has_left():
    class Watching(Member):
        def infer(self, request, responder) -> None:
            responder.watch_cancellation(lambda: None)
            super().infer(request, responder)

    first, second = Watching("a", plus(1), held=True), Member("b", plus(1))
    answer = ask(ensemble(first, second, steps=[step("a", "X", "Z"), step("b", "Z", "Y")]), 1, 1)
    answer.leave()
    first.finish()
    assert not second.requests
    assert answer.error.code is StatusCode.CANCELLED


def test_the_end_waits_for_running_requests():
    member = Member("a", plus(1), held=True)
    version = ensemble(member, steps=[step("a", "X", "Y")])
    answer = ask(version, 1, 1)
    drained: list[bool] = []
    version.close(lambda: drained.append(True))
    assert not drained
    member.finish()
    assert drained == [True]
    assert answer.value() == [2, 2]


def follow(*versions: EnsembleVersion) -> None:
    """Let new requests run on the members in the table, as a publication does. Inner ensembles come first."""
    for version in versions:
        before, version.members = version.members, version.find_members(version.dispatcher.table.models)
        before.leave()


def serve(version: EnsembleVersion, *members) -> None:
    """Publish these members alone."""
    version.dispatcher.tables.table = ServingTable({one.name: ServedModel(one.name, {1: one}, one) for one in members})


def cached(version: EnsembleVersion) -> ResponseCache:
    """Give an ensemble a response cache."""
    cache = ResponseCache(1 << 20)
    version.answers = CachedAnswers(cache, version.config, version.statistics, logging.getLogger("test"))
    follow(version)
    return cache


def test_answers_to_sequences_are_not_kept():
    member = Member("a", plus(1))
    version = ensemble(member, steps=[step("a", "X", "Y")])
    cached(version)
    data = np.array([1.0, 2.0], np.float32).tobytes()
    for sequence, runs in ((None, 1), (None, 1), (SequenceTag(1, starts=True), 2), (SequenceTag(1), 3)):
        version.infer(InferRequest(HEAD, "", [data], sequence=sequence), Exchange(answer := Answer()))
        assert answer.value() == [2.0, 3.0]
        assert len(member.requests) == runs


@pytest.mark.parametrize("is_nested", [False, True], ids=["a member", "a member's member"])
@pytest.mark.parametrize("sees_requests", [False, True], ids=["tensors", "requests"])
def test_what_a_member_sees_decides_which_requests_are_equal(sees_requests, is_nested):
    member = Member("a", plus(1))
    member.sees_requests = sees_requests
    version = ensemble(member, steps=[step("a", "X", "Y")])
    if is_nested:
        inner, version = version, ensemble(steps=[EnsembleStep("inner", -1, {"X": "X"}, {"Y": "Y"})])
        served = {"a": ServedModel("a", {1: member}, member), "inner": ServedModel("inner", {1: inner}, inner)}
        version.dispatcher.tables.table = inner.dispatcher.tables.table = ServingTable(served)
        follow(inner)
    cached(version)
    data = np.array([1.0, 2.0], np.float32).tobytes()
    for parameters, identity in (({}, ""), ({"factor": 2}, ""), ({"factor": 3}, ""), ({"factor": 3}, "id"), ({}, "")):
        head = RequestHead("e", "", HEAD.inputs, (), parameters)
        version.infer(InferRequest(head, identity, [data]), Exchange(answer := Answer()))
        assert answer.response.id == identity
    assert len(member.requests) == (4 if sees_requests else 1)


def test_an_inner_ensemble_keeps_its_answers_whoever_asks():
    member = Member("a", plus(1))
    inner = ensemble(member, steps=[step("a", "X", "Y")])
    inner.name = "inner"
    outer = ensemble(steps=[EnsembleStep("inner", -1, {"X": "X"}, {"Y": "Y"})])
    inner.dispatcher.tables = outer.dispatcher.tables
    serve(outer, inner, member)
    cached(inner)
    follow(outer)
    for version in (inner, outer, inner):
        assert ask(version, 1, 2).value() == [2.0, 3.0]
    assert len(member.requests) == 1


def test_an_answer_from_the_cache_loads_no_members():
    member = Member("a", plus(1))
    member.is_cold = True
    version = ensemble(member, steps=[step("a", "X", "Y")])
    cached(version)
    for _ in range(2):
        assert ask(version, 1, 2).value() == [2.0, 3.0]
    assert member.wanted == 1


def test_an_answer_of_members_that_were_replaced_meanwhile_is_not_kept():
    old, new = Member("a", plus(1), held=True), Member("a", plus(10))
    version = ensemble(old, steps=[step("a", "X", "Y")])
    cache = cached(version)
    data = np.array([1.0, 2.0], np.float32).tobytes()
    version.infer(InferRequest(HEAD, "", [data]), Exchange(before := Answer()))
    serve(version, new)
    follow(version)
    for runs in (1, 1):
        version.infer(InferRequest(HEAD, "", [data]), Exchange(after := Answer()))
        assert after.value() == [11.0, 12.0]
        assert len(new.requests) == runs
    kept = cache.nbytes
    old.finish()
    assert before.value() == [2.0, 3.0]
    assert cache.nbytes == kept


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


def test_a_members_refusal_keeps_what_it_says_about_a_retry():
    refusal = unavailable("Exceeds maximum queue size: model 'a' is being loaded")
    refusal.retry_seconds, refusal.is_overload = 1.0, True

    def refuse(values):
        raise refusal

    error = ask(ensemble(Member("a", refuse), steps=[step("a", "X", "Y")]), 1, 1).error
    assert error.text.startswith("in ensemble 'e', ")
    assert (error.code, error.retry_seconds, error.is_overload) == (StatusCode.UNAVAILABLE, 1.0, True)


def test_the_answers_of_a_decoupled_member_count_until_each_has_led_to_one():
    first, second = Member("a", plus(1), held=True), Member("b", plus(1), held=True)
    version = ensemble(first, second, steps=[step("a", "X", "mid"), step("b", "mid", "Y")], decoupled=True)
    answer = Many()
    version.infer(InferRequest(HEAD, "", [bytes(8)]), Exchange(answer))
    responder = first._waiting.pop()[2]
    responder.expect_many()
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
    first, second = Member("a", plus(1), held=True), Member("b", plus(1), held=True)
    version = ensemble(first, second, steps=[step("a", "X", "mid"), step("b", "mid", "Y")], decoupled=True)
    answer = Many()
    version.infer(InferRequest(HEAD, "", [bytes(8)]), Exchange(answer))
    responder = first._waiting.pop()[2]
    responder.expect_many()
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


def test_the_first_response_of_a_decoupled_ensemble_is_timed() -> None:
    member = Member("a", plus(1), held=True)
    histograms = LatencyOptions(histograms=True)
    version = ensemble(member, steps=[step("a", "X", "Y")], decoupled=True, latencies=histograms)
    version.infer(InferRequest(HEAD, "", [bytes(8)]), Exchange(Many()))
    responder = member._waiting.pop()[2]
    responder.expect_many()
    counts = []
    for final in (False, False, True):
        responder.send(InferResponse.of("a", "1", "", [Tensor("OUT", FP32, (1, 2), bytes(8))]), final=final)
        reading = version.statistics.totals().latencies[Distribution.FIRST_RESPONSE_HISTOGRAM]
        assert isinstance(reading, HistogramReading)
        counts.append(reading.count)
    assert counts == [1, 1, 1]


def test_a_request_is_answered_as_the_ensemble_was_configured_when_it_came() -> None:
    """Its client knows whether many answers come."""
    member = Member("a", plus(1), held=True)
    version = ensemble(member, steps=[step("a", "X", "Y")])
    first, later = Answer(), Many()
    version.infer(InferRequest(HEAD, "", [bytes(8)]), Exchange(first))
    version.reconfigure(replace(version.config, decoupled=True), b"")
    version.infer(InferRequest(HEAD, "", [bytes(8)]), Exchange(later))
    to_first, to_later = (waiting[2] for waiting in member._waiting)
    with pytest.raises(ServeError, match="was not when the ensemble was loaded"):
        to_first.expect_many()
    to_later.expect_many()


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


class OnGpu(Member):
    """Returns references if the request allows them."""

    def __init__(self, name: str, device: str = "GPU-0", **more) -> None:
        super().__init__(name, lambda values: values, **more)
        self.properties = {DEVICE_PROPERTY: device} if device else {}
        self.config = replace(self.config, instance_groups=(InstanceGroup("g", InstanceKind.GPU, 1, (0,)),))
        self.slots: list[weakref.ref] = []
        self.plans: list[RequestPlan] = []

    def _answer(self, request, plan, responder) -> None:
        self.plans.append(plan)
        rows = plan.batch_size
        outputs = []
        for name in plan.outputs:
            if name in plan.reference_outputs:
                places = [DeviceReference(self.name.encode(), 0, 512, 8 * row, FP32, (2,)) for row in range(rows)]
                outputs.append(pack_references(name, places))
            else:
                outputs.append(Tensor(name, FP32, (rows, 2), memoryview(bytes(8 * rows))))
        response = InferResponse.of(self.name, "1", request.id, outputs)
        response.slot = Slot()
        self.slots.append(weakref.ref(response.slot))
        responder.send(response)


class Slot:
    pass


def test_a_tensor_stays_on_the_gpu_until_its_reader_has_answered() -> None:
    a, b = OnGpu("a"), OnGpu("b", held=True)
    version = ensemble(a, b, steps=[step("a", "X", "T"), step("b", "T", "Y")])
    answer = ask(version, 1, 2, 3, 4)
    assert (a.requests[0].head.references, a.plans[0].reference_outputs) == (frozenset(), ("OUT",))
    [request] = b.requests
    assert request.head.references == {"IN"}
    assert request.head.inputs == (InputHead("IN", "FP32", (2, 2)),)
    [reference] = references_of(Tensor("IN", FP32, (2, 2), request.data[0]))[1:]
    assert reference == DeviceReference(b"a", 0, 512, 8, FP32, (2,))
    del request
    assert a.slots[0]() is not None
    b.requests.clear()
    b.finish()
    assert answer.value() == [0, 0, 0, 0]
    gc.collect()
    assert a.slots[0]() is None
    assert not a.plans[0].is_cacheable
    assert not b.plans[0].is_cacheable
    layout = b.plans[0].form.layout
    assert layout.inputs == (TensorHead("IN", DataType.BYTES, (2,)),)
    assert (layout.references, layout.reference_outputs) == ((TensorHead("IN", FP32, (2, 2)),), ())


@pytest.mark.parametrize(
    ("devices", "outputs"),
    [
        (("GPU-0", "GPU-1", "GPU-0"), ("Y", "Z")),
        (("GPU-0", "", "GPU-0"), ("Y", "Z")),
        (("", "GPU-0", "GPU-0"), ("Y", "Z")),
        (("GPU-0", "GPU-0", "GPU-0"), ("T", "Y", "Z")),
    ],
)
def test_a_tensor_comes_by_way_of_the_host(devices: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    members = [OnGpu(name, device) for name, device in zip("abc", devices, strict=True)]
    steps = [step("a", "X", "T"), step("b", "T", "Y"), step("c", "T", "Z")]
    answer = ask(ensemble(*members, steps=steps, outputs=outputs), 1, 2)
    assert answer.error is None
    for member in members:
        assert (member.requests[0].head.references, member.requests[0].head.reference_outputs) == (
            frozenset(),
            frozenset(),
        )


def test_a_member_may_leave_the_gpu_before_its_step() -> None:
    a, b = OnGpu("a", held=True), OnGpu("b")
    answer = ask(ensemble(a, b, steps=[step("a", "X", "T"), step("b", "T", "Y")]), 1, 2)
    b.properties = {}
    a.finish()
    assert answer.error.code is StatusCode.UNAVAILABLE
    assert answer.error.text == "in ensemble 'e', model 'b' has just left the GPU on which tensor 'T' lies"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("b", {"instance_groups": (InstanceGroup("g", InstanceKind.GPU, 1, (0, 1)),)}),
        ("a", {"outputs": (OutputConfig("OUT", DataType.BYTES, (2,)),)}),
    ],
    ids=["its reader is on several GPUs", "it is text"],
)
def test_a_tensor_does_not_stay_on_a_gpu(name: str, change: dict[str, object]) -> None:
    members = {"a": OnGpu("a"), "b": OnGpu("b")}
    members[name].config = replace(members[name].config, **change)
    ask(ensemble(*members.values(), steps=[step("a", "X", "T"), step("b", "T", "Y")]), 1, 2)
    assert members["a"].requests[0].head.reference_outputs == frozenset()
