"""Requests that wait for a version's load, in a scheduler without instances."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest
from support.hand_instances import Answer
from support.hand_loop import HandLoop

from rocserve.core.errors import StatusCode, unavailable
from rocserve.core.exchange import RECEIVED, Exchange
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.statistics import ModelStatistics
from rocserve.core.validation import RequestValidator
from rocserve.scheduling.cold_scheduler import ColdScheduler
from rocserve.scheduling.model_scheduler import ModelScheduler
from rocserve.scheduling.queue import QueueFull, QueueLimits
from rocserve.scheduling.scheduler import SchedulerParts

from .conftest import config

HEAD = RequestHead("m", "", (InputHead("IN", "FP32", (1, 2)),))


class Cold:
    """A cold scheduler and the means to feed it."""

    def __init__(self, wait_seconds: float = 60.0, **limits: int) -> None:
        self.loop = HandLoop()
        self.statistics = ModelStatistics()
        self.log = logging.getLogger("test")
        self.emptied = 0
        parts = SchedulerParts(config(), 1, self.statistics, self.loop, QueueLimits(**limits), self.log)  # type: ignore[arg-type]
        self.scheduler = ColdScheduler(parts, wait_seconds, self._note_empty)

    def _note_empty(self) -> None:
        self.emptied += 1

    def submit(self, value: float, deadline: float | None = None) -> tuple[InferRequest, Answer]:
        request = InferRequest(HEAD, str(value), [np.full((1, 2), value, np.float32).tobytes()], deadline)
        answer = Answer(self.loop)
        self.loop.turning(self.scheduler.submit)(request, Exchange(answer))
        return request, answer


def test_requests_are_refused_after_the_wait_or_at_their_deadline():
    cold = Cold(wait_seconds=0.05)
    (_, patient), (_, hurried) = cold.submit(1.0), cold.submit(2.0, deadline=time.monotonic() + 0.01)
    cold.loop.wait_for(lambda: patient.error and hurried.error)
    assert hurried.error.code is StatusCode.DEADLINE_EXCEEDED
    assert patient.error.text == "model 'm' was not loaded within 0.05 s; ask again"
    assert cold.emptied == 1
    counted = cold.statistics.snapshot()
    assert (counted.fail.count, counted.reject.count) == (2, 2)


def test_a_client_that_leaves_is_taken_out():
    cold = Cold()
    (_, gone), (request, stays) = cold.submit(1.0), cold.submit(2.0)
    gone.leave()
    assert gone.error.code is StatusCode.CANCELLED and stays.error is None
    assert (cold.emptied, cold.scheduler.waiting) == (0, 1)
    assert cold.scheduler.take_all() == [request]


def test_a_full_queue_refuses_and_an_outage_refuses_all():
    cold = Cold(max_requests=2)
    answers = [cold.submit(value)[1] for value in (1.0, 2.0)]
    with pytest.raises(QueueFull):
        cold.submit(3.0)
    cold.loop.turning(cold.scheduler.fail_queue)(unavailable("out of order"))
    assert [answer.error.text for answer in answers] == ["out of order"] * 2
    assert cold.emptied == 1


def test_a_full_queue_counts_bytes_of_requests_that_nobody_has_validated():
    cold = Cold(max_bytes=15)
    cold.submit(1.0)
    with pytest.raises(QueueFull):
        cold.submit(2.0)


def test_the_loaded_version_gets_the_requests_as_they_came():
    cold = Cold(wait_seconds=0.02)
    waiting = [cold.submit(value) for value in (1.0, 2.0, 3.0)]
    before = waiting[1][1].leave
    loaded = ModelScheduler(
        SchedulerParts(config(), 1, ModelStatistics(), cold.loop, QueueLimits(), cold.log)  # type: ignore[arg-type]
    )
    requests = cold.scheduler.take_all()
    assert requests == [request for request, _ in waiting]
    for request in requests:
        assert (request.exchange.on_left, request.expires_at, request.exchange.state) == (None, None, RECEIVED)
        RequestValidator(config()).validate(request)
        loaded.submit(request, request.exchange)
    # The loaded version watches the clients after a while; what the cold one waited for is over.
    cold.loop.run(0.05)
    assert [answer.error for _, answer in waiting] == [None] * 3
    # A call tells all who watch it.
    before()
    waiting[1][1].leave()
    assert [answer.error and answer.error.code for _, answer in waiting] == [None, StatusCode.CANCELLED, None]
    assert loaded.waiting == 2 and not cold.emptied
