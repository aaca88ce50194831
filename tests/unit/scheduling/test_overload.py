"""Which requests run when not all can be answered in time; with the test's own clock."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import pytest
from support.hand_instances import Nobody

from rocserve.core.errors import StatusCode
from rocserve.core.exchange import Exchange
from rocserve.core.model_config import DynamicBatching, QueuePolicy
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.validation import RequestValidator
from rocserve.scheduling.batch_policy import BatchPolicy, DynamicBatcher, NoBatching, Triage
from rocserve.scheduling.compute_times import ComputeTimes
from rocserve.scheduling.queue import QueueFull, QueueLimits, RequestQueue

from .conftest import config

SECOND = 1_000_000_000
MS = 1_000_000
PLAN = RequestValidator(config()).validate(
    InferRequest(RequestHead("m", "", (InputHead("IN", "FP32", (1, 2)),)), "", [np.zeros(2, np.float32).tobytes()])
)


def entry_at(now_ns: int, milliseconds: float | None, in_turn: bool = False) -> InferRequest:
    """A request that arrives now, with this deadline."""
    deadline = None if milliseconds is None else now_ns / 1e9 + milliseconds / 1e3
    request = InferRequest(RequestHead("m", "", ()), "", [], deadline, in_turn)
    request.plan, request.nbytes, request.queue_start_ns = PLAN, PLAN.nbytes, now_ns
    request.exchange = Exchange(Nobody())
    return request


class Model:
    """An instance of a model with its queue, and a clock."""

    def __init__(
        self,
        run_ms: Callable[[int], float],
        policy: BatchPolicy | None = None,
        batching: DynamicBatching | None = None,
        **limits: int,
    ) -> None:
        self.policy = policy or NoBatching(None)
        self.queue = RequestQueue(batching, QueueLimits(**limits))
        self.triage = Triage(
            self.queue, self.policy, ComputeTimes(), batching is not None and batching.preserve_ordering
        )
        self.now_ns = SECOND
        self.run_ms = run_ms
        self.ran: list[tuple[InferRequest, int]] = []
        """Each request with the time at which it ended."""
        self.full = 0

    def come(self, milliseconds: float | None, in_turn: bool = False) -> InferRequest:
        entry = entry_at(self.now_ns, milliseconds, in_turn)
        self.queue.admit(entry, self.now_ns / 1e9)
        try:
            self.queue.push(entry)
            if milliseconds is not None:
                self.triage.note(entry)
        except QueueFull:
            self.full += 1
        return entry

    def step(self) -> list[InferRequest]:
        """Run the next batch to its end."""
        if self.queue.deadline_count:
            decision = self.triage.decide(self.now_ns, 0)
        else:
            decision = self.policy.decide(self.queue, self.now_ns)
        batch = self.queue.take(decision.request_count)
        if batch:
            took = int(self.run_ms(len(batch)) * MS)
            self.now_ns += took
            self.triage.times.add(len(batch), took, self.now_ns)
            self.ran += [(entry, self.now_ns) for entry in batch]
        return batch

    def serve(
        self, per_second: float, seconds: float, deadline_ms: Callable[[random.Random], float], burst: int = 1
    ) -> float:
        """Send requests at random times. Returns the answers a second that are in time for their clients: the way to
        the server and back takes up to 10 ms each, of which the server knows nothing."""
        numbers = random.Random(7)
        end = self.now_ns + int(seconds * SECOND)
        arrivals: list[tuple[int, float, float]] = []
        at = float(self.now_ns)
        while at < end:
            at += numbers.expovariate(per_second / burst) * SECOND
            for _ in range(burst):
                way = numbers.uniform(0.5, 10)
                arrivals.append((int(at + way * MS), deadline_ms(numbers), way))
        arrivals.sort()
        by_client: dict[InferRequest, float] = {}
        already = len(self.ran)
        index = 0
        while index < len(arrivals) or self.queue:
            if not self.queue:
                self.now_ns = max(self.now_ns, arrivals[index][0])
            while index < len(arrivals) and arrivals[index][0] <= self.now_ns:
                came, wait, way = arrivals[index]
                now_ns, self.now_ns = self.now_ns, came
                by_client[self.come(wait)] = came + (wait - way) * MS
                self.now_ns = now_ns
                index += 1
            waiting = len(self.queue)
            if not self.step() and len(self.queue) == waiting:
                # It waits for a larger batch.
                self.now_ns += MS
        in_time = [e for e, ended in self.ran[already:] if ended + numbers.uniform(0.5, 10) * MS <= by_client[e]]
        return len(in_time) / seconds


def batches(delay_ms: int = 0) -> DynamicBatcher:
    return DynamicBatcher(8, (8,), delay_ms * MS)


@pytest.mark.parametrize("load", [1.3, 4, 10])
@pytest.mark.parametrize("burst", [1, 10])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: (Model(lambda n: 10), 100), id="single"),
        pytest.param(lambda: (Model(lambda n: 40 + 5 * n, batches()), 100), id="batches"),
        pytest.param(lambda: (Model(lambda n: 40 + 5 * n, batches(delay_ms=500)), 100), id="late batches"),
        pytest.param(lambda: (Model(lambda n: 10, None, DynamicBatching(preserve_ordering=True)), 100), id="in order"),
        pytest.param(
            lambda: (Model(lambda n: 40 + 5 * n, batches(), DynamicBatching(preserve_ordering=True)), 100),
            id="batches in order",
        ),
        pytest.param(lambda: (Model(lambda n: 10, max_requests=8), 100), id="short queue"),
        pytest.param(
            lambda: (
                Model(
                    lambda n: 10,
                    None,
                    DynamicBatching(
                        default_queue_policy=QueuePolicy(delays_timed_out=True, default_timeout_microseconds=50_000)
                    ),
                ),
                100,
            ),
            id="delayed",
        ),
    ],
)
def test_the_goodput_under_overload_is_that_of_the_peak(model, load: float, burst: int):
    bench, capacity = model()
    # With bursts of ten even an unbounded queue is empty now and then.
    least = 0.9 if burst == 1 or load > 2 else 0.6
    assert bench.serve(load * capacity, 10, lambda _: 200, burst) >= least * capacity


def test_varying_compute_times_and_mixed_deadlines_cost_little():
    numbers = random.Random(3)
    bench = Model(lambda n: 10 * numbers.lognormvariate(-0.18, 0.6))
    for load in (1.3, 4, 10):
        assert bench.serve(load * 100, 10, lambda numbers: numbers.choice((50, 200, 1000, 5000))) >= 90


def test_below_the_peak_requests_run_in_order_of_arrival():
    bench = Model(lambda n: 10)
    assert bench.serve(50, 10, lambda _: 500) >= 45
    came = [entry.queue_start_ns for entry, _ in bench.ran]
    assert came == sorted(came)


def test_a_model_that_becomes_slower_and_faster_is_followed():
    run_ms = [10.0]
    bench = Model(lambda n: run_ms[0])
    bench.serve(400, 3, lambda _: 200)
    run_ms[0] = 100.0
    bench.serve(400, 3, lambda _: 200)
    assert bench.serve(400, 10, lambda _: 200) >= 0.85 * 10
    run_ms[0] = 10.0
    bench.serve(400, 3, lambda _: 200)
    assert bench.serve(400, 10, lambda _: 200) >= 90


@pytest.mark.parametrize("slow_batches", [1, 5, 32])
def test_slow_batches_do_not_lock_the_model_out(slow_batches: int):
    bench = Model(lambda n: 10)
    bench.serve(50, 3, lambda _: 200)
    for _ in range(slow_batches):
        bench.triage.times.add(1, 2 * SECOND, bench.now_ns)
    bench.serve(400, 4, lambda _: 200)
    assert bench.serve(400, 5, lambda _: 200) >= 90


def slowed(run_ms: Callable[[int], float]) -> Callable[[int], float]:
    return lambda rows: 10 * run_ms(rows)


def single_ms(_: int) -> float:
    return 10


def batch_ms(rows: int) -> float:
    return 40 + 5 * rows


@pytest.mark.parametrize("load", [1.3, 4])
@pytest.mark.parametrize("in_order", [False, True], ids=["newest first", "in order"])
@pytest.mark.parametrize(
    ("run_ms", "policy", "capacity", "deadline_ms"),
    [pytest.param(single_ms, None, 100, 50, id="single"), pytest.param(batch_ms, batches(), 100, 300, id="batches")],
)
def test_a_machine_that_was_ten_times_slower_for_a_while_leaves_nothing_behind(
    run_ms: Callable[[int], float],
    policy: BatchPolicy | None,
    capacity: float,
    deadline_ms: float,
    in_order: bool,
    load: float,
) -> None:
    """As long as it is so slow, no request can be in time: nothing but the waiting requests shows that it is over."""
    bench = Model(run_ms, policy, DynamicBatching(preserve_ordering=in_order))
    usual = bench.serve(load * capacity, 5, lambda _: deadline_ms)
    assert usual >= 0.8 * capacity
    bench.run_ms = slowed(run_ms)
    assert bench.serve(load * capacity, 5, lambda _: deadline_ms) <= 0.1 * capacity
    bench.run_ms = run_ms
    bench.serve(load * capacity, 1, lambda _: deadline_ms)
    assert bench.serve(load * capacity, 5, lambda _: deadline_ms) >= 0.97 * usual


@pytest.mark.parametrize("in_order", [False, True], ids=["newest first", "in order"])
@pytest.mark.parametrize(("load", "least"), [(1.3, 0.7), (4, 0.93)])
def test_slow_batches_now_and_then_refuse_nobody_who_may_be_in_time(in_order: bool, load: float, least: float) -> None:
    """Three batches of ten take longer than the clients wait, so that most estimates are above all deadlines."""
    numbers = random.Random(5)
    bench = Model(lambda _: 10, None, DynamicBatching(preserve_ordering=in_order))
    bench.serve(400, 3, lambda _: 200)
    bench.run_ms = lambda _: 30 if numbers.random() < 0.7 else 260
    runs = 1000 / (0.7 * 30 + 0.3 * 260)
    assert bench.serve(load * runs, 40, lambda _: 200) >= least * 0.7 * runs


def test_what_is_truly_hopeless_leaves_most_of_the_time_to_others():
    bench = Model(lambda n: 100)
    bench.serve(5, 5, lambda _: 500)
    in_time = bench.serve(1000, 10, lambda numbers: 1000 if numbers.random() < 0.008 else 20)
    assert in_time >= 0.8 * 8
    assert len(bench.ran) <= 5 * 5 + 10 * 10 + 10


def test_requests_without_deadlines_keep_their_order_and_their_share():
    bench = Model(lambda n: 10)
    bench.serve(50, 1, lambda _: 200)
    bench.ran.clear()
    patient = []
    for step in range(300):
        if step % 3 == 0:
            patient.append(bench.come(None))
        for _ in range(4):
            bench.come(200)
        bench.step()
    ran = [entry for entry, _ in bench.ran if entry.deadline is None]
    assert ran == patient[: len(ran)]
    assert len(ran) >= 95
    assert not any(entry.deadline is None for entry in bench.triage.dropped)
    while bench.queue:
        bench.step()
    assert [entry for entry, _ in bench.ran if entry.deadline is None] == patient


def test_many_requests_without_deadlines_do_not_crowd_out_the_others():
    bench = Model(lambda n: 10)
    bench.serve(50, 1, lambda _: 200)
    for _ in range(1000):
        bench.come(None)
    bench.ran.clear()
    in_time = 0
    for _ in range(100):
        bench.come(200)
        entry = bench.step()[0]
        deadline = entry.deadline
        in_time += deadline is not None and bench.now_ns / 1e9 < deadline
    assert in_time >= 35


def test_the_requests_of_a_stream_are_not_overtaken_within_it():
    bench = Model(lambda n: 10)
    bench.serve(50, 1, lambda _: 200)
    bench.ran.clear()
    for _ in range(18):
        bench.come(200, in_turn=True)
    while bench.queue:
        bench.step()
    came = [entry for entry, _ in bench.ran]
    assert len(came) >= 17
    assert came == sorted(came, key=lambda entry: entry.queue_start_ns)


def test_a_batch_takes_in_no_more_than_lets_its_most_urgent_end_in_time():
    bench = Model(lambda n: 10.0 * n, batches())
    for count in (1, 1, 2, 2, 4, 4, 8, 8):
        for _ in range(count):
            bench.come(10_000)
        assert len(bench.step()) == count
    urgent = bench.come(30)
    others = [bench.come(10_000) for _ in range(7)]
    assert bench.step() == [urgent, others[0]]
    assert bench.step() == others[1:]


def test_waiting_for_company_ends_with_half_of_the_time_that_a_request_has():
    bench = Model(lambda n: 10, batches(delay_ms=500))
    for _ in range(3):
        bench.come(10_000)
        bench.now_ns += SECOND
        assert bench.step()
    bench.come(210)
    assert not bench.step()
    decision = bench.triage.decide(bench.now_ns, 0)
    assert decision.decide_again_at_ns == pytest.approx(bench.now_ns + 100 * MS, abs=MS)
    bench.now_ns += 101 * MS
    assert len(bench.step()) == 1


def test_what_waits_for_company_goes_on_waiting_when_a_hopeless_request_comes():
    bench = Model(lambda n: 50, batches(delay_ms=500))
    for _ in range(3):
        bench.come(10_000)
        bench.now_ns += SECOND
        assert bench.step()
    came_ns = bench.now_ns
    waiting = bench.come(None)
    hopeless = bench.come(20)
    decision = bench.triage.decide(bench.now_ns, 0)
    assert (decision.request_count, decision.decide_again_at_ns) == (0, came_ns + 500 * MS)
    assert bench.triage.dropped == [hopeless]
    assert list(bench.queue) == [waiting]


def test_levels_are_overloaded_each_for_itself():
    batching = DynamicBatching(priority_levels=2, default_priority_level=2)
    bench = Model(lambda n: 1, None, batching)
    high = [entry_at(bench.now_ns, 200) for _ in range(3)]
    for entry in high:
        entry.level, entry.may_be_overtaken = 1, True
        bench.queue.push(entry)
        bench.triage.note(entry)
    bench.now_ns += 110 * MS
    low = [bench.come(200) for _ in range(3)]
    ran = [bench.step()[0] for _ in range(6)]
    assert ran == [*reversed(high), *low]


def test_what_a_worker_did_not_run_is_the_next_again():
    bench = Model(lambda n: 10)
    entries = [bench.come(200) for _ in range(5)]
    (level,) = bench.queue.levels()
    for newest_first in (False, True):
        level.newest_first = newest_first
        order = list(bench.queue)
        taken = bench.queue.take(2)
        assert taken == order[:2]
        bench.queue.push_back(taken)
        assert list(bench.queue) == order
    assert bench.queue.deadline_count == len(entries)


def test_both_orders_take_what_they_announce():
    bench = Model(lambda n: 10)
    for step in range(40):
        bench.now_ns += MS
        bench.come(200 if step % 3 else None)
    (level,) = bench.queue.levels()
    for newest_first in (False, True, False, True):
        level.newest_first = newest_first
        announced = list(bench.queue)[:7]
        assert bench.queue.take(7) == announced


def test_compute_times_are_a_high_quantile_for_each_size():
    times = ComputeTimes()
    times.add(1, 9 * SECOND, 0)
    assert times.of(1) == 0.0, "of one batch alone nothing is said"
    for _ in range(20):
        times.add(1, 10 * MS, 0)
    assert times.of(1) == pytest.approx(0.010)
    assert times.of(8) == pytest.approx(0.010), "a size that has not run is taken for a smaller one"
    for _ in range(4):
        times.add(7, 40 * MS, 0)
    assert [times.of(size) for size in (1, 4, 5, 8)] == pytest.approx([0.010, 0.010, 0.040, 0.040])
    for _ in range(8):
        times.add(1, 30 * MS, 0)
    assert times.of(1) == pytest.approx(0.030)
    assert times.at_best(1) == pytest.approx(0.030), "of the last ones"
    times.add(1, 20 * MS, 0)
    assert (times.of(1), times.at_best(1)) == pytest.approx((0.030, 0.020))


def test_a_size_that_has_not_run_for_long_is_measured_again():
    times = ComputeTimes()
    now_ns = SECOND
    for _ in range(4):
        now_ns += 400 * MS
        times.add(8, 400 * MS, now_ns)
    last_ns = now_ns
    while now_ns < last_ns + 50 * 400 * MS:
        assert times.of(8) == pytest.approx(0.4)
        now_ns += 300 * MS
        times.add(1, 300 * MS, now_ns)
        times.review(now_ns)
    times.review(now_ns + SECOND)
    assert times.of(8) == pytest.approx(0.3)
    times.review(now_ns + 50 * 300 * MS)
    assert times.of(1) == times.at_best(1) == 0.0, "what was measured long ago refuses nobody"


def test_batches_that_an_engine_runs_at_the_same_time_do_not_wait_for_each_other(make_bench, clock: list[int]):
    bench = make_bench(max_batch_size=1)
    bench.instances[0].batches_at_once = 4
    for value in range(8):
        bench.submit(float(value))
        bench.executions[-1].engine_ns = 100 * MS
        bench.executions[-1].finish()
        clock[0] += 100 * MS
    running = [bench.submit(0.0) for _ in range(4)]
    last = bench.executions[-1]
    urgent = bench.submit(1.0, deadline=clock[0] / 1e9 + 0.15)
    clock[0] += 40 * MS
    last.engine_ns = 60 * MS
    last.finish()
    assert [answer.done.is_set() for answer in running] == [False, False, False, True]
    assert bench.executions[-1] is not last, "it begins at once, and ends after 0.14 of its 0.15 s"
    bench.executions[-1].finish()
    assert urgent.response is not None


def test_a_slow_worker_does_not_lock_out_the_one_that_replaces_it(make_bench, clock: list[int]):
    """The first took two seconds for each batch, the second takes 1.2, and its clients wait for 1.5."""
    bench = make_bench(max_batch_size=1)
    for value in range(40):
        bench.submit(float(value))
        bench.executions[-1].engine_ns = 2 * SECOND
        bench.executions[-1].finish()
        clock[0] += 2 * SECOND
    bench.scheduler.detach(bench.instances[0])
    clock[0] += SECOND
    other = bench.new_instance()
    bench.scheduler.attach(other)
    answered = 0
    for _ in range(20):
        before = len(other.executions)
        answer = bench.submit(1.0, deadline=clock[0] / 1e9 + 1.5)
        if len(other.executions) > before:
            other.executions[-1].engine_ns = 1200 * MS
            other.executions[-1].finish()
        clock[0] += 1300 * MS
        bench.loop.turn()
        answered += answer.response is not None
    assert answered >= 15


def test_what_cannot_end_in_time_is_refused_at_once_and_counted(make_bench, wait_for):
    bench = make_bench(max_batch_size=1)
    for value in range(4):
        bench.submit(float(value))
        bench.executions[-1].engine_ns = 200 * MS
        bench.executions[-1].finish()
    now = time.monotonic()
    bench.submit(5.0)
    running = bench.executions[-1]
    hopeless = bench.submit(6.0, deadline=now + 0.1)
    hopeful = bench.submit(7.0, deadline=now + 60)
    assert not hopeless.done.is_set(), "an instance may turn out to be free"
    running.engine_ns = 200 * MS
    running.finish()
    assert hopeless.error.code is StatusCode.DEADLINE_EXCEEDED
    assert hopeless.error.text == "Deadline Exceeded"
    bench.executions[-1].engine_ns = 200 * MS
    bench.executions[-1].finish()
    assert hopeful.response is not None
    counted = bench.statistics.snapshot()
    assert (counted.reject.count, counted.fail.count, counted.success.count) == (1, 1, 6)
    with_idle_instance = bench.submit(8.0, deadline=time.monotonic() + 0.1)
    assert with_idle_instance.error.code is StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("seed", range(20))
def test_requests_run_in_the_order_in_which_they_are_listed(seed: int) -> None:
    """With and without deadlines, the oldest or the newest first, some delayed, some put back."""
    numbers = random.Random(seed)
    policy = QueuePolicy(delays_timed_out=True, default_timeout_microseconds=1)
    queue = RequestQueue(DynamicBatching(default_queue_policy=policy), QueueLimits())
    now_ns, ran = SECOND, 0
    for _ in range(60):
        for _ in range(numbers.randrange(6)):
            now_ns += numbers.choice((0, MS))
            entry = entry_at(now_ns, numbers.choice((None, 50)), in_turn=numbers.random() < 0.2)
            queue.admit(entry, now_ns / 1e9)
            queue.push(entry)
        for level in queue.levels():
            if level.overtakable:
                level.newest_first = numbers.random() < 0.5
        if queue and numbers.random() < 0.3:
            queue.delay(numbers.choice([*queue]))
        listed = [*queue]
        taken = queue.take(numbers.randrange(1, 6))
        assert taken == listed[: len(taken)]
        assert [*queue] == listed[len(taken) :]
        assert len(queue) == len(listed) - len(taken)
        if numbers.random() < 0.2:
            queue.push_back(taken)
            assert sorted(map(id, queue)) == sorted(map(id, listed))
        else:
            ran += len(taken)
    assert ran > 60
