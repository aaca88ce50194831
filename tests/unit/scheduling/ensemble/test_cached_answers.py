"""Answers of ensembles in the response cache."""

from __future__ import annotations

import numpy as np
import pytest
from support.ensembles import HEAD, Answer, Member, ask, cached, ensemble, follow, plus, serve, step

from rocserve.core.exchange import Exchange
from rocserve.core.model_config import EnsembleStep
from rocserve.core.requests import InferRequest, RequestHead
from rocserve.core.sequences import SequenceTag
from rocserve.core.serving import ServedModel, ServingTable


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
