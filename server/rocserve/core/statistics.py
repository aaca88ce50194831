"""Counters of one model version, as the statistics extension of KServe v2 (Triton's) reports them.

All durations are nanoseconds. Each request of a batch is charged the whole batch's phases; a failure counts in `fail`
only; a batch counts one execution however many requests it holds.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.latencies import (
    BATCH_SIZE_HISTOGRAM,
    CACHE_HIT_SUMMARY,
    CACHE_MISS_SUMMARY,
    FIRST_RESPONSE_HISTOGRAM,
    REQUEST_HISTOGRAM,
    REQUEST_SUMMARY,
    WINDOW_NS,
    LatencyDistributions,
    LatencyReadings,
    SlidingSummary,
    SummaryReading,
)

_COUNTED_AT_ONCE = 256
_MOST_PLACES = 1000
"""Of responses to a request that are counted apart; all behind them count as the last of these. A stream may never end,
and each reading has them all."""
_FAILURES_KEPT = 20
_LONGEST_FAILURE = 500
"""Characters. Both bound what the last failures take."""


@dataclass(frozen=True, slots=True)
class FailureNote:
    time_ms: int
    """Since the epoch."""
    text: str


@dataclass(slots=True, eq=False)
class PhaseTotals:
    """What the parts of a request took together, in nanoseconds: the steps of an ensemble, each in its member."""

    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0

    def add_run(self, times: tuple[int, int, int, int]) -> None:
        """One execution: when it began, the engine began, the engine ended, the outputs were there."""
        begin, input_end, output_start, end = times
        self.compute_input += input_end - begin
        self.compute_infer += output_start - input_end
        self.compute_output += end - output_start

    def add_all(self, others: PhaseTotals) -> None:
        """All of an ensemble that is a member of another one."""
        self.compute_input += others.compute_input
        self.compute_infer += others.compute_infer
        self.compute_output += others.compute_output


@dataclass(slots=True)
class Duration:
    """How often something happened and how long it took in all."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns


@dataclass(slots=True)
class BatchStatistics:
    """Executions of one batch size."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def add(self, phases: tuple[int, int, int], count: int = 1) -> None:
        """`phases`: what input, engine and output took, of all `count` together."""
        moved, ran, laid = phases
        self.compute_input.add(moved, count)
        self.compute_infer.add(ran, count)
        self.compute_output.add(laid, count)


@dataclass(slots=True)
class ResponseStatistics:
    """Responses of one place: the first ones to their requests, the second ones, and so on."""

    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class StatisticsTotals(BatchStatistics):
    """The counters of all batch sizes together, those of a version or a consistent copy of them; the phases are those
    of requests."""

    inference_count: int = 0
    execution_count: int = 0
    last_inference_ms: int = 0
    """Milliseconds since the epoch; 0 = never."""
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)
    reject: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)
    backend_failures: int = 0
    """How many of the failures are the model's or its engine's."""
    latencies: LatencyReadings | None = None
    """None = nothing but the sums is kept."""


@dataclass(slots=True)
class StatisticsSnapshot(StatisticsTotals):
    """The counters, by batch size and by response as well: as many as there are sizes that came."""

    batches: dict[int, BatchStatistics] = field(default_factory=lambda: defaultdict(BatchStatistics))
    """By size, rising."""
    responses: dict[int, ResponseStatistics] = field(default_factory=lambda: defaultdict(ResponseStatistics))
    """Of decoupled models, by the place of the response among those to its request."""


class Execution(NamedTuple):
    """A batch that has run; all times are time.monotonic_ns(). A tuple, for one is made of each batch."""

    compute_start: int
    """The batch was formed; its inputs begin to move to the worker."""
    input_end: int
    """The worker has the inputs; the engine begins."""
    output_start: int
    """The engine has ended."""
    compute_end: int
    """The outputs are where the server reads them."""
    queue_starts: Sequence[int]
    """When each request that succeeded came into the queue."""
    request_end: int
    """When they are answered."""
    rows: int
    """Of all requests that ran."""
    is_grouped: bool = False
    """Each request ran by itself, with so many rows: an execution for each, of whose times it has the same part."""
    absent_rows: int = 0
    """Of the rows, those of no request: they are part of the batch's size, but no inferences."""


class ModelStatistics:
    """The counters of one version. Their lock is for those who read them, on any thread: a copy is of one moment."""

    def __init__(self, latencies: LatencyDistributions | None = None) -> None:
        """`latencies`: distributions beside the sums; guarded by the lock here."""
        self._latencies = latencies
        self._lock = threading.Lock()
        self._numbers = StatisticsSnapshot()
        self._failures: deque[FailureNote] = deque(maxlen=_FAILURES_KEPT)
        self._watched: SlidingSummary | None = None
        """Of whole requests, in microseconds, while somebody reads it."""
        self._watched_ns = 0
        """When somebody has looked last."""
        # A deque because its append and popleft are atomic: batches are noted without the lock.
        self._uncounted: deque[Execution] = deque()

    def go_on_from(self, before: ModelStatistics) -> None:
        """Count on, before anything was counted here, from where another has ended: the version was loaded anew."""
        vars(self).update({name: value for name, value in vars(before).items() if name != "_lock"})

    def record_batch(self, execution: Execution) -> None:
        # Counted later, many at once: this is called for every batch on the thread that answers.
        self._uncounted.append(execution)
        if len(self._uncounted) >= _COUNTED_AT_ONCE:
            with self._lock:
                self._count()

    def _count(self) -> None:
        """Under the lock."""
        numbers, uncounted, latencies = self._numbers, self._uncounted, self._latencies
        request_end = requests = executions = rows = success_ns = queue_ns = input_ns = infer_ns = output_ns = 0
        # By size: how many executions, and what they took.
        sizes: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        while uncounted:
            begin, input_end, output_start, end, starts, request_end, size, is_grouped, absent = uncounted.popleft()
            count = len(starts)
            alike = count if is_grouped else 1
            moved, ran, laid = (
                (input_end - begin) // alike,
                (output_start - input_end) // alike,
                (end - output_start) // alike,
            )
            started = sum(starts)
            requests += count
            executions += alike
            rows += size * alike - absent
            success_ns += request_end * count - started
            queue_ns += begin * count - started
            input_ns += moved * count
            infer_ns += ran * count
            output_ns += laid * count
            sums = sizes[size]
            sums[0] += alike
            sums[1] += moved * alike
            sums[2] += ran * alike
            sums[3] += laid * alike
            if latencies is not None:
                for together in [[start] for start in starts] if is_grouped else [starts]:
                    latencies.note_batch(begin, (moved, ran, laid), together, request_end, size)
            if self._watched is not None:
                for start in starts:
                    self._watch(request_end - start, request_end)
        numbers.execution_count += executions
        numbers.inference_count += rows
        numbers.success.add(success_ns, requests)
        numbers.queue.add(queue_ns, requests)
        numbers.add((input_ns, infer_ns, output_ns), requests)
        for size, (alike, moved, ran, laid) in sizes.items():
            numbers.batches[size].add((moved, ran, laid), alike)
        if request_end:
            age_ns = time.monotonic_ns() - request_end
            numbers.last_inference_ms = (time.time_ns() - age_ns) // 1_000_000

    def record_ensemble(
        self, started_ns: int, begun_ns: int, ended_ns: int, batch_size: int, phases: PhaseTotals
    ) -> None:
        """A request that an ensemble answered: it came, its first steps were about to be sent to their members, the
        answer was there. `batch_size`: its rows. `phases`: the sums over its members, which count for themselves."""
        with self._lock:
            self._numbers.last_inference_ms = time.time_ns() // 1_000_000
            self._numbers.execution_count += 1
            self._numbers.inference_count += batch_size
            self._numbers.success.add(ended_ns - started_ns)
            self._numbers.queue.add(begun_ns - started_ns)
            took = (phases.compute_input, phases.compute_infer, phases.compute_output)
            self._numbers.add(took)
            self._numbers.batches[batch_size].add(took)
            if self._latencies is not None:
                self._latencies.summarise(REQUEST_SUMMARY, ended_ns - started_ns, ended_ns)
                self._latencies.observe(REQUEST_HISTOGRAM, (ended_ns - started_ns) / 1e6)
                self._latencies.observe(BATCH_SIZE_HISTOGRAM, batch_size)
            self._watch(ended_ns - started_ns, ended_ns)

    def record_cache_hit(self, started_ns: int, ended_ns: int) -> None:
        """A request that the response cache answered: a success that computed nothing and did not wait."""
        with self._lock:
            self._numbers.success.add(ended_ns - started_ns)
            self._numbers.queue.add(0)
            self._numbers.cache_hit.add(ended_ns - started_ns)
            if self._latencies is not None:
                self._latencies.note_request(ended_ns - started_ns, 0, ended_ns)
                self._latencies.summarise(CACHE_HIT_SUMMARY, ended_ns - started_ns, ended_ns)
            self._watch(ended_ns - started_ns, ended_ns)

    def record_cache_miss(self, ns: int) -> None:
        """What looking for an answer in vain, and keeping it later, took of a request that is counted otherwise."""
        with self._lock:
            self._numbers.success.add(ns, count=0)
            self._numbers.cache_miss.add(ns)
            if self._latencies is not None:
                self._latencies.summarise(CACHE_MISS_SUMMARY, ns, time.monotonic_ns())

    def record_response(self, index: int, started_ns: int, made_ns: int, sent_ns: int, failed: bool = False) -> None:
        """A response of a decoupled model; `index`: its place among those to its request. The model could begin with it
        (at the request, or at the response before), had made it, the client had been sent it. `failed`: an error."""
        with self._lock:
            place = self._numbers.responses[min(index, _MOST_PLACES - 1)]
            place.compute_infer.add(made_ns - started_ns)
            place.compute_output.add(sent_ns - made_ns)
            (place.fail if failed else place.success).add(sent_ns - started_ns)

    def record_empty_response(self, index: int, started_ns: int, made_ns: int) -> None:
        """That no further response comes, said on its own; times as of `record_response`."""
        with self._lock:
            place = self._numbers.responses[min(index, _MOST_PLACES - 1)]
            place.compute_infer.add(made_ns - started_ns)
            place.empty_response.add(made_ns - started_ns)

    def record_first_response(self, ns: int) -> None:
        """How long a request to a decoupled model waited for its first response."""
        if self._latencies is not None:
            with self._lock:
                self._latencies.observe(FIRST_RESPONSE_HISTOGRAM, ns / 1e6)

    def record_failure(self, started_ns: int, ended_ns: int, by_backend: bool = False) -> None:
        """`by_backend`: the model, its engine or its worker failed; else the request was not for it."""
        with self._lock:
            self._numbers.fail.add(ended_ns - started_ns)
            self._numbers.backend_failures += by_backend

    def record_refusal(self, error: ServeError, started_ns: int, ended_ns: int) -> None:
        """A request that is not run: a failure, counted apart as well. CANCELLED: its client had gone; else it was
        refused (the queue was full, its time was up), and the error is noted."""
        is_cancelled = error.code is StatusCode.CANCELLED
        with self._lock:
            self._numbers.fail.add(ended_ns - started_ns)
            (self._numbers.cancel if is_cancelled else self._numbers.reject).add(ended_ns - started_ns)
        if not is_cancelled:
            self.note_failure(error.text)

    def note_failure(self, text: str) -> None:
        """An error that a client got in place of an answer. Not counted here."""
        self._failures.append(FailureNote(time.time_ns() // 1_000_000, text[:_LONGEST_FAILURE]))

    @property
    def failures(self) -> Sequence[FailureNote]:
        """The last ones, the oldest first."""
        return tuple(self._failures.copy())

    def quantiles(self, quantiles: Sequence[float]) -> SummaryReading:
        """Of the latencies of the last minute, in microseconds. They are counted from the first call on, until there
        has been none for a minute: they cost nothing while nobody reads them."""
        now = time.monotonic_ns()
        with self._lock:
            self._watched_ns = now
            self._count()
            if self._watched is None:
                self._watched = SlidingSummary()
            return self._watched.read(quantiles, now)

    def _watch(self, nanoseconds: int, ended_ns: int) -> None:
        """Under the lock."""
        if self._watched is None:
            return
        self._watched.observe(nanoseconds // 1000, ended_ns)
        if ended_ns - self._watched_ns > WINDOW_NS:
            self._watched = None

    def totals(self) -> StatisticsTotals:
        """At the same cost however many batch sizes there were."""
        with self._lock:
            self._count()
            return self._read_totals()

    def snapshot(self) -> StatisticsSnapshot:
        with self._lock:
            self._count()
            totals = self._read_totals()
            return StatisticsSnapshot(
                **{name: getattr(totals, name) for name in _FIELDS[StatisticsTotals]},
                batches=_copied_by_number(self._numbers.batches),
                responses=_copied_by_number(self._numbers.responses),
            )

    def _read_totals(self) -> StatisticsTotals:
        """Under the lock."""
        totals = _copied(self._numbers, StatisticsTotals)
        if self._latencies is not None:
            totals.latencies = self._latencies.read(time.monotonic_ns())
        return totals


_Counters = TypeVar("_Counters", StatisticsTotals, BatchStatistics, ResponseStatistics)

_FIELDS: Mapping[type[object], Sequence[str]] = {
    kind: tuple(entry.name for entry in fields(kind))
    for kind in (StatisticsTotals, BatchStatistics, ResponseStatistics)
}


def _copied(counters: _Counters, kind: type[_Counters]) -> _Counters:
    """As one of its kind, with durations of its own."""
    values: dict[str, Any] = {}
    for name in _FIELDS[kind]:
        value = getattr(counters, name)
        values[name] = Duration(value.count, value.ns) if isinstance(value, Duration) else value
    return kind(**values)


def _copied_by_number(counters: Mapping[int, _Counters]) -> dict[int, _Counters]:
    return {number: _copied(counters[number], type(counters[number])) for number in sorted(counters)}
