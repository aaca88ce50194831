"""Which requests of unlike lengths share a batch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from support.hand_instances import Nobody

from rocserve.core.errors import StatusCode
from rocserve.core.exchange import Exchange
from rocserve.core.model_config import DynamicBatching
from rocserve.core.padding import PaddedDimension, Padding
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.validation import RequestValidator
from rocserve.scheduling.batch_policy import BatchDecision, DynamicBatcher, Triage
from rocserve.scheduling.bucket_batcher import MOST_PADDED, BucketBatcher
from rocserve.scheduling.compute_times import ComputeTimes
from rocserve.scheduling.queue import QueueLimits, RequestQueue

from .conftest import Bench, config

PADDING = Padding((PaddedDimension("length", (4, 8, 16, 32), {"IN": (1,)}, {"OUT": (1,)}),))
BATCHING = DynamicBatching()
_ENGINE_NS = 10_000_000
"""No batch is sent ahead then."""


def formed(bench: Bench, *widths: int, **options) -> list[list[int]]:
    """The lengths in the batches that requests form which wait behind a running batch."""
    bench.submit(0.0, rows=8, width=32)
    assert len(bench.executions) == 1
    for width in widths:
        bench.submit(1.0, width=width, **options)
    bench.finish_all(_ENGINE_NS)
    return [[len(data) // 4 for (data,) in execution.requests] for execution in bench.executions[1:]]


@pytest.mark.parametrize(
    ("widths", "batches"),
    [
        ([3, 4, 2], [[3, 4, 2]]),
        # The oldest decides, and the others of its bucket pass those of other buckets.
        ([3, 20, 4, 17], [[3, 4], [20, 17]]),
        ([3, 4, 2, 1, 4, 4, 4, 4, 4], [[3, 4, 2, 1, 4, 4, 4, 4], [4]]),
        # 64 elements for 56 or 52 real ones; 64 for 40 would be too many.
        ([16, 16, 16, 8], [[16, 16, 16, 8]]),
        ([16, 16, 16, 4], [[16, 16, 16, 4]]),
        ([16, 16, 4, 4], [[16, 16], [4, 4]]),
        # All of a bucket or none, because one of them saves no batch.
        ([16, 16, 16, 4, 4, 4], [[16, 16, 16], [4, 4, 4]]),
        # The next smaller bucket comes first.
        ([32, 32, 32, 4, 16], [[32, 32, 32, 16], [4]]),
        # A larger one never joins.
        ([4, 8], [[4], [8]]),
    ],
)
def test_without_a_delay(make_bench, widths: list[int], batches: list[list[int]]) -> None:
    assert formed(make_bench(BATCHING, padding=PADDING), *widths) == batches


def test_no_request_passes_another_if_answers_keep_their_order(make_bench) -> None:
    bench = make_bench(DynamicBatching(preserve_ordering=True), padding=PADDING)
    assert formed(bench, 16, 16, 16, 4, 3, 16, 32, 4) == [[16, 16, 16, 4], [3], [16], [32], [4]]


def test_a_delay_passes_for_each_bucket_by_itself(make_bench, clock: list[int]) -> None:
    bench = make_bench(DynamicBatching((2,), max_queue_delay_microseconds=5000), padding=PADDING)
    answers = [bench.submit(1.0, width=20)]
    clock[0] += 1_000_000
    answers.append(bench.submit(1.0, width=4))
    assert not bench.executions, "both wait for one more"
    answers.append(bench.submit(1.0, width=3))
    assert [len(data) // 4 for (data,) in bench.executions[0].requests] == [4, 3], "the oldest need not be among them"
    bench.executions[0].finish()
    bench.loop.wait_for(lambda: len(bench.executions) == 2)
    bench.executions[1].finish()
    assert all(answer.response is not None for answer in answers)


def test_a_lower_level_does_not_pass_a_higher_one(make_bench) -> None:
    bench = make_bench(DynamicBatching(priority_levels=2, default_priority_level=1), padding=PADDING)
    bench.submit(0.0, rows=8, width=32)
    for width, level in ((20, 1), (3, 1), (21, 2), (4, 2)):
        bench.submit(1.0, width=width, priority=level)
    bench.finish_all(_ENGINE_NS)
    batches = [[len(data) // 4 for (data,) in execution.requests] for execution in bench.executions[1:]]
    assert batches == [[20], [3, 4], [21]]


def test_a_busy_instance_is_sent_a_full_batch_and_few_decisions_find_that(
    make_bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: list[int] = []
    decide = BucketBatcher.decide

    def noted(batcher: BucketBatcher, queue: RequestQueue, now_ns: int) -> BatchDecision:
        decided.append(queue.count)
        return decide(batcher, queue, now_ns)

    bench = make_bench(BATCHING, padding=PADDING)
    bench.warm_up(1)
    bench.submit(0.0, rows=8, width=32)
    before = len(bench.executions)
    monkeypatch.setattr(BucketBatcher, "decide", noted)
    for width in (20, 4, 21, 3, 22, 23, 24, 25, 26):
        bench.submit(1.0, width=width)
    assert len(bench.executions) == before, "seven of the oldest's bucket wait, and it takes eight"
    bench.submit(1.0, width=27)
    (ahead,) = bench.executions[before:]
    assert [len(data) // 4 for (data,) in ahead.requests] == [20, 21, 22, 23, 24, 25, 26, 27]
    # With eight waiting, the batch was found to lack two; after it, two wait for a free instance.
    assert decided == [1, 8, 10, 2]


def test_what_is_padded_is_counted(make_bench) -> None:
    bench = make_bench(BATCHING, padding=PADDING)
    formed(bench, 16, 16, 16, 4)
    totals = bench.statistics.totals()
    assert (totals.real_elements, totals.padded_elements) == (8 * 32 + 52, 12)


class Waiting:
    """A queue, and requests of random lengths for it."""

    def __init__(self, seed: int, keeps_order: bool = False) -> None:
        self.queue = RequestQueue(BATCHING, QueueLimits())
        self.batcher = BucketBatcher(DynamicBatcher(8, (8,), 0), PADDING, keeps_order)
        self._validator = RequestValidator(config(BATCHING), padding=PADDING)
        self._random = random.Random(seed)
        self._now_ns = 0

    def come(self, rows: int = 0, width: int = 0, deadline: float | None = None) -> InferRequest:
        """Add a request, random unless its size is given."""
        rows = rows or self._random.choice((1, 1, 1, 2, 8))
        width = width or min(int(self._random.lognormvariate(2, 0.8)) + 1, 32)
        request = InferRequest(RequestHead("m", "", ()), "", [], deadline)
        request.exchange = Exchange(Nobody())
        request.plan = self._validator.plan(RequestHead("m", "", (InputHead("IN", "FP32", (rows, width)),)), "")
        request.nbytes, request.queue_start_ns = 4 * rows * width, self._now_ns
        self._now_ns += 1
        self.queue.push(request)
        return request

    def batches(self, count: int) -> Iterator[tuple[Sequence[InferRequest], Sequence[InferRequest]]]:
        """Yield what waited, and what of it runs."""
        for _ in range(count):
            for _ in range(self._random.randrange(1, 12)):
                self.come()
            waiting = list(self.queue)
            decision = self.batcher.decide(self.queue, self._now_ns)
            chosen = decision.members(self.queue)
            assert len(chosen) == decision.request_count > 0
            assert self.queue.take_chosen(chosen) == [*chosen]
            assert list(self.queue) == [request for request in waiting if request not in chosen], "the others stay"
            yield waiting, chosen


@pytest.mark.parametrize("seed", range(3))
def test_random_requests(seed: int) -> None:
    for waiting, chosen in Waiting(seed).batches(300):
        oldest, rows = waiting[0], sum(request.plan.batch_size for request in chosen)
        bucket = oldest.plan.bucket
        assert bucket is not None
        own = [request for request in waiting if request.plan.bucket is bucket]
        joined = [request for request in chosen if request.plan.bucket is not bucket]
        assert chosen[0] is oldest and rows <= 8
        assert [request for request in chosen if request not in joined] == own[: len(chosen) - len(joined)]
        left = own[len(chosen) - len(joined) :]
        assert not left or rows + left[0].plan.batch_size > 8, "as many of its bucket as there is room for"
        if joined:
            real = sum(request.plan.real_elements for request in chosen)
            assert not left and rows * bucket.row_elements <= (1 + MOST_PADDED) * real
        for smaller in {request.plan.bucket for request in joined}:
            assert smaller is not None and smaller.sizes < bucket.sizes
            assert all(request in joined for request in waiting if request.plan.bucket is smaller)


def test_random_requests_in_their_order() -> None:
    for waiting, chosen in Waiting(7, keeps_order=True).batches(300):
        assert waiting[: len(chosen)] == [*chosen]


def late(bench: Bench, clock: list[int]) -> float:
    """Let the engine take 1 ms for a row of 4 elements and 100 ms for one of 32. Returns a deadline in 50 ms."""
    for width, milliseconds in ((4, 1), (32, 100)) * 6:
        bench.submit(1.0, width=width)
        clock[0] += milliseconds * 1_000_000
        bench.executions[-1].finish()
    return clock[0] / 1e9 + 0.05


def test_a_deadline_is_compared_with_the_time_of_its_bucket(make_bench, clock: list[int]) -> None:
    bench = make_bench(BATCHING, padding=PADDING)
    deadline = late(bench, clock)
    busy = bench.submit(0.0, rows=8, width=4)
    long, short = (bench.submit(1.0, width=width, deadline=deadline) for width in (32, 4))
    bench.executions[-1].finish()
    assert busy.response is not None
    assert long.error is not None and long.error.code is StatusCode.DEADLINE_EXCEEDED
    bench.executions[-1].finish()
    assert short.response is not None


def test_a_batch_is_not_filled_beyond_a_deadline() -> None:
    waiting, times = Waiting(0), ComputeTimes()
    triage = Triage(waiting.queue, waiting.batcher, times, keeps_order=False)
    for _ in range(3):
        for rows in (1, 2, 4):
            # Of 32 elements each, eight times those of the smallest size.
            times.add(8 * rows, rows * 100_000_000, 1)
    assert waiting.batcher.largest == 64
    requests = [waiting.come(1, width, deadline=0.25) for width in (32, 8, 31, 30, 4)]
    for request in requests:
        triage.note(request)
    own = waiting.batcher.decide(waiting.queue, 1).members(waiting.queue)
    assert own == [requests[place] for place in (0, 2, 3, 1)]
    decision = triage.decide(1, 0)
    assert decision.members(waiting.queue) == [requests[0], requests[2]] and decision.is_full
