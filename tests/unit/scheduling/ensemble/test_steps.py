"""Ensembles as graphs: order, fan-out, only the needed steps, members with other batching, errors, ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.ensembles import FP32, HEAD, Answer, Many, Member, ask, ensemble, follow, plus, serve, step

from rocserve.core.errors import ServeError, StatusCode, invalid_argument, unavailable
from rocserve.core.exchange import Exchange
from rocserve.core.latencies import Distribution, HistogramReading, LatencyOptions
from rocserve.core.model_config import EnsembleStep, InputConfig, OutputConfig
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest, RequestedOutput
from rocserve.core.responses import InferResponse
from rocserve.core.statistics import ModelStatistics
from rocserve.core.tensors import Tensor
from rocserve.scheduling.ensemble.version import EnsembleVersion


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


def test_a_members_refusal_keeps_what_it_says_about_a_retry():
    refusal = unavailable("Exceeds maximum queue size: model 'a' is being loaded")
    refusal.retry_seconds, refusal.is_overload = 1.0, True

    def refuse(values):
        raise refusal

    error = ask(ensemble(Member("a", refuse), steps=[step("a", "X", "Y")]), 1, 1).error
    assert error.text.startswith("in ensemble 'e', ")
    assert (error.code, error.retry_seconds, error.is_overload) == (StatusCode.UNAVAILABLE, 1.0, True)


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
