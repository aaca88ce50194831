"""The members on which a request to an ensemble runs."""

from __future__ import annotations

import numpy as np
import pytest
from support.ensembles import HEAD, Answer, Member, ask, ensemble, follow, plus, serve, step

from rocserve.core.errors import StatusCode
from rocserve.core.exchange import Exchange
from rocserve.core.model_config import EnsembleStep
from rocserve.core.requests import InferRequest, RequestedOutput, RequestHead


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
