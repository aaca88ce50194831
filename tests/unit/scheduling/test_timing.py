"""Times in answers: of batches, single requests, cached answers and ensembles, on a clock that the test moves."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from support.dispatching import dispatcher_of
from support.ensembles import Member, ensemble, step
from support.hand_loop import HandLoop

from rocserve.core.dispatch import begin_timing
from rocserve.core.exchange import Exchange
from rocserve.core.load_check import NOT_CHECKED, LoadCheckReport
from rocserve.core.model_config import DynamicBatching
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.responses import Answer, InferResponse
from rocserve.core.serving import ServedModel, ServingTable, ServingTableHolder
from rocserve.scheduling.ensemble.version import EnsembleVersion
from rocserve.scheduling.response_cache import CachedAnswers, ResponseCache

from .conftest import Bench
from .test_in_flight_requests import Model, value

MS = 1_000_000


class Client:
    """Keeps the parameters of its answers."""

    def __init__(self) -> None:
        self.told: list[dict[str, object]] = []

    def expect_many(self) -> None: ...

    def watch_cancellation(self, callback: object) -> None: ...

    def send(self, answer: Answer, final: bool = True) -> None:
        if answer is not None:
            assert isinstance(answer, InferResponse), answer
            self.told.append(dict(answer.parameters))


def submit(bench: Bench, rows: int = 1, **parameters: bool) -> Client:
    client = Client()

    def begin() -> None:
        head = RequestHead("m", "", (InputHead("IN", "FP32", (rows, 2)),), (), parameters)
        request = InferRequest(head, "", [np.zeros((rows, 2), np.float32).tobytes()])
        exchange = Exchange(client)
        if head.wants_timing:
            begin_timing(request, exchange)
            request.timing.note_version(7, NOT_CHECKED, bench.config.is_ensemble)
        bench.validator.validate(request)
        bench.scheduler.inner.submit(request, exchange)

    bench.loop.turning(begin)()
    return client


def test_the_times_of_a_batch_and_nothing_for_who_does_not_ask(make_bench, clock: list[int]) -> None:
    bench = make_bench(DynamicBatching(preferred_batch_sizes=(5,), max_queue_delay_microseconds=50_000))
    bench.instances[0].name = "m_0_0"
    asks, silent = submit(bench, 2, timing=True), submit(bench, 2, timing=False)
    clock[0] += 3 * MS
    last = submit(bench)
    (execution,) = bench.executions
    assert execution.request_sizes == (2, 2, 1)
    clock[0] += 2 * MS
    execution.engine_ns = 4 * MS
    outcome = execution.finish()
    assert outcome.compute_end_ns == clock[0] + 4 * MS
    assert silent.told == last.told == [{}]
    (told,) = asks.told
    # The hand-made outcome lies in the future, so the total ends before it.
    assert told == {
        "timing_version": "7",
        "timing_total_ns": 5 * MS,
        "timing_queue_ns": 3 * MS,
        "timing_compute_input_ns": 2 * MS,
        "timing_compute_infer_ns": 4 * MS,
        "timing_compute_output_ns": 0,
        "timing_batch_size": 5,
        "timing_instance": "m_0_0",
        "timing_load_check": "not checked",
    }


@pytest.mark.parametrize("decoupled", [False, True])
def test_answers_beside_their_batch_tell_what_is_known(loop: HandLoop, clock: list[int], decoupled: bool) -> None:
    model = Model(loop, decoupled=decoupled)
    instance, client = model.instance(), Client()
    instance.name = "m_0_0"
    head = RequestHead("m", "", (InputHead("IN", "FP32", (1, 1)),), (), {"timing": True})
    request = InferRequest(head, "r", [np.zeros(1, np.float32).tobytes()])
    exchange = Exchange(client)
    begin_timing(request, exchange)
    model._validator.validate(request)
    model.scheduler.submit(request, exchange)
    clock[0] += MS
    instance.say(1, value(1), True)
    (told,) = client.told
    known = {"timing_queue_ns": 0, "timing_batch_size": 1, "timing_instance": "m_0_0", "timing_total_ns": MS}
    assert known.items() <= told.items()
    assert not any("compute" in name for name in told)


class Timed(Member):
    """A member that takes a millisecond, on an instance of its name."""

    def __init__(self, name: str, clock: list[int], more: int = 0) -> None:
        super().__init__(name, lambda values: values + 1)
        self.load_check = LoadCheckReport((f"{name} is right",))
        self._clock, self._more = clock, more

    def _answer(self, request, plan, responder) -> None:
        begin = self._clock[0]
        if request.timing is not None:
            request.timing.note_start(begin - self._more, begin, f"{self.name}_0_0", plan.batch_size)
            request.timing.note_run((begin, begin, begin + MS, begin + MS))
        self._clock[0] += MS
        super()._answer(request, plan, responder)


def ask(version: EnsembleVersion, **parameters: bool) -> Client:
    version.load_check = LoadCheckReport(("recorded answers are right",))
    tables = ServingTableHolder()
    tables.table = ServingTable({"e": ServedModel("e", {1: version}, version)})
    head = RequestHead("e", "", (InputHead("X", "FP32", (3, 2)),), (), parameters)
    request = InferRequest(head, "", [np.zeros((3, 2), np.float32).tobytes()])
    client = Client()
    dispatcher_of(tables).dispatch(request, Exchange(client))
    return client


def test_an_ensemble_tells_of_its_steps(clock: list[int]) -> None:
    version = ensemble(
        Timed("a", clock, 5), Timed("b", clock, 6), steps=[step("a", "X", "between"), step("b", "between", "Y")]
    )
    (told,) = ask(version, timing=True).told
    steps = json.loads(str(told["timing_steps"]))
    assert [(one["model"], one["instance"], one["queue_ns"], one["total_ns"]) for one in steps] == [
        ("a", "a_0_0", 5, MS),
        ("b", "b_0_0", 6, MS),
    ]
    assert steps[0]["load_check"] == "a is right"
    assert (steps[0]["batch_size"], steps[0]["version"], steps[0]["compute_infer_ns"]) == (3, "1", MS)
    assert (told["timing_total_ns"], told["timing_queue_ns"], told["timing_compute_infer_ns"]) == (2 * MS, 11, 2 * MS)
    assert told["timing_load_check"] == "recorded answers are right"
    (other,) = ask(version).told
    assert not any(name.startswith("timing") for name in other)


def test_a_cached_answer_says_so_and_keeps_no_times_of_the_first_client(clock: list[int]) -> None:
    version = ensemble(Timed("a", clock), steps=[step("a", "X", "Y")])
    version.answers = CachedAnswers(
        ResponseCache(1 << 20), version.config, version.statistics, logging.getLogger("test")
    )
    (first,) = ask(version, timing=True).told
    assert "timing_cached" not in first
    (silent,) = ask(version).told
    assert not any(name.startswith("timing") for name in silent)
    clock[0] += MS
    (cached,) = ask(version, timing=True).told
    assert cached["timing_cached"] is True
    assert cached["timing_total_ns"] == 0
    assert "timing_steps" not in cached
