"""The scheduler of a model that sees single requests: each request ends once, however its worker ends."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from support.hand_instances import Answer as Responder
from support.hand_loop import Flag, HandLoop, Turned
from support.outputs import outputs_from

from rocserve.backends.request_model import Answer, ModelResponse
from rocserve.core.errors import ServeError, StatusCode, unavailable
from rocserve.core.exchange import Exchange
from rocserve.core.latencies import Distribution, LatencyOptions
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.responses import LARGE_RESPONSE, InferResponse
from rocserve.core.statistics import ModelStatistics
from rocserve.core.tensors import tensor_from_numpy
from rocserve.core.trace import Trace
from rocserve.core.validation import RequestValidator
from rocserve.scheduling.batch_policy import CALM_REQUESTS
from rocserve.scheduling.model_scheduler import ModelScheduler
from rocserve.scheduling.queue import QueueLimits
from rocserve.scheduling.scheduler import SchedulerParts
from rocserve.workers.instance import WorkerGone
from rocserve.workers.instance_requests import RequestLost
from rocserve.workers.results import Outputs

from .conftest import config


class HandOutcome:
    """What a worker reports about a batch."""

    is_large = False
    slot = None

    def __init__(
        self, error: ServeError | None, in_flight: set[int], failures: dict[int, ServeError], begun: int | None
    ) -> None:
        self.error = error
        self.begun = begun
        self.failures = failures
        self.input_end_ns = 1
        self.output_start_ns = self.compute_end_ns = 1001
        self.open = in_flight
        self.parameters = {index: {"index": index} for index in range(8)}

    def outputs_of(self, index: int) -> Outputs:
        return outputs_from([tensor_from_numpy("OUT", np.full((1, 1), index, np.float32))])


class HandInstance:
    """An instance whose batches the test finishes."""

    name = ""

    def __init__(self, loop: HandLoop) -> None:
        self.closed = False
        self.batches_at_once = 1
        self.open: dict[int, Callable[[Answer | None, bool], None]] = {}
        self.cancelled: list[int] = []
        self._last = 0
        self._loop = loop
        self.batches: list[Callable[[HandOutcome], None]] = []
        self.sizes: list[int] = []
        self.on_execute: Callable[[], None] = lambda: None

    def execute(self, form, members, on_outcome) -> None:
        self.on_execute()
        if self.closed:
            raise WorkerGone("gone")
        self.batches.append(self._loop.turning(on_outcome))
        self.sizes.append(len(members))

    def open_request(self, on_answer: Callable[[Answer | None, bool], None], trace: Trace | None) -> int:
        self._last += 1
        self.open[self._last] = on_answer
        return self._last

    def close_requests(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.open.pop(number, None)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def say(self, number: int, answer: Answer | None, final: bool) -> None:
        on_answer = self.open.pop(number) if final else self.open[number]
        self._loop.turning(on_answer)(answer, final)

    def end(self) -> None:
        """End the worker, with its open requests."""
        in_flight, self.open = self.open, {}
        for on_answer in in_flight.values():
            on_answer(RequestLost(StatusCode.UNAVAILABLE, "it died"), True)

    def finish(
        self,
        error: ServeError | None = None,
        in_flight: set[int] | None = None,
        failures: dict[int, ServeError] | None = None,
        begun: int | None = None,
    ) -> None:
        self.batches.pop(0)(HandOutcome(error, in_flight or set(), failures or {}, begun))


class Model:
    def __init__(self, loop: HandLoop, decoupled: bool = False) -> None:
        self.loop = loop
        settings = replace(config(max_batch_size=1), decoupled=decoupled)
        self.statistics = ModelStatistics(LatencyOptions(histograms=True).distributions(settings))
        log = logging.getLogger("test")
        parts = SchedulerParts(settings, 1, self.statistics, loop, QueueLimits(), log, answers_requests=True)
        self.scheduler = Turned(loop, ModelScheduler(parts))
        self._validator = RequestValidator(settings)
        self._head = RequestHead("m", "", (InputHead("IN", "FP32", (1, 1)),))

    def instance(self) -> HandInstance:
        instance = HandInstance(self.loop)
        self.scheduler.attach(instance)  # type: ignore[arg-type]
        return instance

    def submit(self, told: Told | None = None) -> Told:
        request = InferRequest(self._head, "r", [np.zeros(1, np.float32).tobytes()])
        told = told or Told(self.loop)
        self._validator.validate(request)
        self.scheduler.submit(request, Exchange(told))
        return told

    def warm_up(self, instance: HandInstance) -> None:
        """Run requests one by one: the model must first prove that it is fast and ends no worker."""
        for _ in range(CALM_REQUESTS):
            self.submit()
            instance.finish()

    def counts(self) -> tuple[int, int, int]:
        """Executions, successes, failures."""
        counted = self.statistics.snapshot()
        return counted.execution_count, counted.success.count, counted.fail.count


class Told(Responder):
    """Records every response."""

    def __init__(self, loop: HandLoop) -> None:
        super().__init__(loop)
        self.values: list[float] = []
        self.keeps_slots = False
        self.kept: list[object] = []

    def send(self, answer: InferResponse | ServeError | None, final: bool = True) -> None:
        assert not self.done.is_set(), "told more after the end"
        if isinstance(answer, ServeError):
            self.error = answer
        elif answer is not None:
            if self.keeps_slots:
                self.kept.append(answer.slot)
            self.values.append(float(answer.outputs[0].numpy()[0, 0]))
        if final:
            self.done.set()
            # The receiver of the outcome knows the request; if that takes a while, so does this one.
            self.leave = None


@pytest.fixture
def model(loop: HandLoop) -> Model:
    return Model(loop)


def value(number: float) -> ModelResponse:
    return ModelResponse([tensor_from_numpy("OUT", np.full((1, 1), number, np.float32))])


def test_what_follows_a_large_response_waits_until_it_is_sent(loop: HandLoop) -> None:
    """Other requests must not wait for it, so it takes several turns."""
    model = Model(loop, decoupled=True)
    instance, told = model.instance(), model.submit()
    told.keeps_slots = True
    instance.finish(in_flight={0})
    large = np.full((1, LARGE_RESPONSE // 4 + 1), 1, np.float32)
    for number in (1, 2):
        instance.say(1, ModelResponse([tensor_from_numpy("OUT", large * number)], slot=Slot()), False)
    instance.say(1, value(3), False)
    instance.say(1, None, True)
    assert (told.values, told.done.is_set()) == ([1.0], False)
    told.kept.clear()
    loop.turn()
    assert (told.values, told.done.is_set()) == ([1.0, 2.0], False)
    told.kept.clear()
    loop.turn()
    assert (told.values, told.done.is_set()) == ([1.0, 2.0, 3.0], True)
    assert model.counts() == (1, 1, 0)


class Slot:
    """The slot of a response."""


def drained(model: Model) -> Flag:
    event = Flag(model.loop)
    model.scheduler.close(event.set)
    return event


def test_an_answer_with_the_batch(model: Model) -> None:
    instance = model.instance()
    told = model.submit()
    instance.finish()
    assert told.values == [0.0]
    assert instance.open == {}
    assert model.counts() == (1, 1, 0)


def with_its_batch(instance: HandInstance) -> None:
    instance.finish()


def beside_its_batch(instance: HandInstance) -> None:
    instance.finish(in_flight={0})
    instance.say(1, value(4), True)


def before_its_batch(instance: HandInstance) -> None:
    instance.say(1, value(4), True)
    instance.finish(in_flight={0})


def by_the_end_of_its_worker(instance: HandInstance) -> None:
    instance.finish(in_flight={0})
    instance.end()


@pytest.mark.parametrize("end", [with_its_batch, beside_its_batch, before_its_batch, by_the_end_of_its_worker])
def test_nothing_of_a_request_is_left_for_the_garbage_collector(
    model: Model, end: Callable[[HandInstance], None]
) -> None:
    instance = model.instance()
    gc.disable()
    try:
        told = weakref.ref(model.submit())
        end(instance)
        # Until then it is among those whose clients may leave.
        model.loop.wait_for(lambda: told() is None)
    finally:
        gc.enable()


def test_a_request_stays_open_until_its_last_response(model: Model) -> None:
    instance = model.instance()
    told, following = model.submit(), model.submit()
    instance.finish(in_flight={0})
    # The instance is free for the next request meanwhile.
    instance.finish()
    assert following.values == [0.0]
    event = drained(model)
    assert not event.is_set()
    assert model.counts() == (1, 1, 0)
    instance.say(1, value(4), False)
    instance.say(1, value(5), False)
    assert told.values == [4.0, 5.0]
    assert not told.done.is_set()
    instance.say(1, None, True)
    assert told.done.is_set()
    assert event.is_set()
    assert model.counts() == (2, 2, 0)


def test_the_last_response_may_come_before_the_batch(model: Model) -> None:
    instance = model.instance()
    told = model.submit()
    instance.say(1, value(4), True)
    assert told.done.is_set()
    event = drained(model)
    assert not event.is_set()
    instance.finish(in_flight={0})
    assert told.values == [4.0]
    assert event.is_set()
    assert model.counts() == (1, 1, 0)


def test_a_failed_batch_fails_only_what_is_not_answered(model: Model) -> None:
    instance = model.instance()
    told = model.submit()
    instance.say(1, value(4), True)
    instance.finish(error=unavailable("it died"))
    assert told.error is None
    other = model.submit()
    instance.finish(error=unavailable("it died"))
    assert other.error is not None
    assert model.counts() == (1, 1, 1)


def test_an_error_beside_its_batch_is_a_failure(model: Model) -> None:
    instance = model.instance()
    told = model.submit()
    instance.finish(in_flight={0})
    instance.say(1, ServeError(StatusCode.NOT_FOUND, "no"), True)
    assert told.error is not None
    assert told.error.code is StatusCode.NOT_FOUND
    assert model.counts() == (0, 0, 1)


def test_responses_of_a_decoupled_model_are_counted_by_their_place(loop: HandLoop) -> None:
    model = Model(loop, decoupled=True)
    instance = model.instance()
    for number in (1, 2):
        model.submit()
        instance.finish(in_flight={0})
        instance.say(number, value(4), False)
        if number == 1:
            instance.say(number, ServeError(StatusCode.NOT_FOUND, "no"), False)
        instance.say(number, None, True)
    counted = model.statistics.snapshot()
    places = [
        (place.success.count, place.fail.count, place.empty_response.count) for place in counted.responses.values()
    ]
    assert places == [(2, 0, 0), (0, 1, 1), (0, 0, 1)]
    assert counted.latencies[Distribution.FIRST_RESPONSE_HISTOGRAM].count == 2


def test_responses_of_other_models_have_no_places(model: Model) -> None:
    instance = model.instance()
    model.submit()
    beside_its_batch(instance)
    assert model.statistics.snapshot().responses == {}


def test_a_dead_worker_fails_what_is_open(model: Model) -> None:
    instance = model.instance()
    told = model.submit()
    instance.finish(in_flight={0})
    instance.end()
    assert told.error is not None
    assert told.error.text == "it died"
    assert drained(model).is_set()


def test_what_never_ran_is_run_elsewhere(model: Model) -> None:
    instance = model.instance()

    def die() -> None:
        # The worker's end may come between the opening of the request and its sending.
        instance.closed = True
        instance.end()

    instance.on_execute = die
    told = model.submit()
    assert not told.done.is_set()
    successor = model.instance()
    successor.finish()
    assert told.values == [0.0]
    assert model.counts() == (1, 1, 0)
    assert drained(model).is_set()


def test_a_batch_behind_the_dead_is_run_elsewhere(model: Model) -> None:
    instance = model.instance()
    told = model.submit()
    instance.closed = True
    instance.finish(error=WorkerGone("gone"))
    instance.end()
    successor = model.instance()
    successor.finish()
    assert told.values == [0.0]


def test_clients_of_requests_that_run_long_are_watched(model: Model) -> None:
    instance = model.instance()
    told = model.submit()
    model.loop.wait_for(lambda: told.leave is not None)
    told.leave()
    assert instance.cancelled == [1]
    # A fast request is not.
    instance.finish()
    quick = model.submit()
    instance.finish()
    later = model.submit()
    model.loop.wait_for(lambda: later.leave is not None)
    assert quick.leave is None
    instance.finish()


def test_of_a_group_only_what_had_begun_fails_with_its_worker(model: Model) -> None:
    instance = model.instance()
    model.warm_up(instance)
    before = model.counts()
    asked = [model.submit() for _ in range(9)]
    while (size := instance.sizes[-len(instance.batches)]) < 3:
        instance.finish()
    done = sum(told.done.is_set() for told in asked)
    instance.closed = True
    instance.finish(error=RequestLost(StatusCode.UNAVAILABLE, "it died"), begun=2)
    while instance.batches:
        instance.finish(error=WorkerGone("gone"))
    instance.end()
    successor = model.instance()
    while successor.batches:
        successor.finish()
    assert [told.error is not None for told in asked] == [False] * done + [True] * 2 + [False] * (7 - done)
    # The model has ended a worker, so requests run alone for a while.
    assert size > 2 and set(successor.sizes) == {1}
    executions, successes, failures = model.counts()
    assert (executions - before[0], successes - before[1], failures - before[2]) == (7, 7, 2)


def test_a_request_whose_client_has_left_does_not_run_in_the_next_worker(model: Model) -> None:
    """Its model would not learn again that nobody waits, and might answer without end."""
    instance = model.instance()
    left, stays = model.submit(), model.submit()
    model.loop.wait_for(lambda: left.leave is not None)
    left.leave()
    assert instance.cancelled == [1] and not left.done.is_set()
    instance.closed = True
    while instance.batches:
        instance.finish(error=WorkerGone("gone"))
    instance.end()
    assert left.error is not None and left.error.code is StatusCode.CANCELLED
    successor = model.instance()
    successor.finish()
    assert successor.sizes == [1] and stays.error is None and stays.done.is_set()


def test_after_its_first_call_a_model_gets_nothing_ahead(model: Model) -> None:
    instance = model.instance()
    model.warm_up(instance)
    # The engine is fast, so a second batch is sent ahead.
    model.submit(), model.submit()
    assert len(instance.batches) == 2
    instance.finish(), instance.finish()
    model.scheduler.stop_sending_ahead()
    model.submit(), model.submit()
    assert len(instance.batches) == 1
    instance.finish(), instance.finish()


def test_requests_travel_together_and_end_each_for_itself(model: Model) -> None:
    instance = model.instance()
    model.warm_up(instance)
    before = model.counts()
    asked = [model.submit() for _ in range(9)]
    while sum(told.done.is_set() for told in asked) < 5:
        size = instance.sizes[-len(instance.batches)]
        instance.finish(failures={0: unavailable("not this one")} if size > 2 else None)
    assert max(instance.sizes) > 2
    while instance.batches:
        instance.finish()
    assert all(told.done.is_set() for told in asked)
    assert [told.error for told in asked].count(None) == 8
    # An execution for each.
    executions, successes, failures = model.counts()
    assert (executions - before[0], successes - before[1], failures - before[2]) == (8, 8, 1)


class Failing(Told):
    def send(self, answer: InferResponse | ServeError | None, final: bool = True) -> None:
        raise RuntimeError("a fault of the server")


def test_a_batch_ends_once_though_its_answers_fail(model: Model) -> None:
    instance = model.instance()
    model.warm_up(instance)
    for _ in range(9):
        model.submit(Failing(model.loop))
    fails = partial(pytest.raises, RuntimeError, match="a fault of the server")
    while instance.batches:
        with fails():
            # The last request of a group is answered later.
            size = instance.sizes[-len(instance.batches)]
            instance.finish(in_flight={size - 1} if size > 1 else None)
    assert instance.open
    for number in tuple(instance.open):
        with fails():
            instance.say(number, value(1), True)
    assert model.scheduler.in_flight == 0
