"""Counts the work of one model version, for the statistics extension of KServe v2 (Triton's). All durations are
nanoseconds. Each request of a batch is charged the whole batch's phases. A failed request counts in `fail` (and
`cancel` or `reject`) only. A batch counts as one execution however many requests it has."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.latencies import (
    WINDOW_NS,
    Distribution,
    HistogramReading,
    LatencyDistributions,
    SlidingSummary,
    SummaryReading,
)

_MOST_PLACES = 1000
"""Limit of response counters: each index has one, and indices from the last on share it, as a stream may never end."""


@dataclass(slots=True, eq=False)
class PhaseTotals:
    """Total nanoseconds of the parts of a request, for example of an ensemble's steps."""

    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0

    def add_run(self, times: tuple[int, int, int, int]) -> None:
        """Add an execution: the times of its start, the engine's start, the engine's end and its own end."""
        begin, input_end, output_start, end = times
        self.compute_input += input_end - begin
        self.compute_infer += output_start - input_end
        self.compute_output += end - output_start

    def add_all(self, others: PhaseTotals) -> None:
        """Add the sums of an ensemble that is a member of another ensemble."""
        self.compute_input += others.compute_input
        self.compute_infer += others.compute_infer
        self.compute_output += others.compute_output


@dataclass(slots=True)
class Duration:
    """A number of events, and their time together."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns


@dataclass(slots=True)
class BatchStatistics:
    """The times of a model's executions of one batch size."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def add(self, phases: tuple[int, int, int], count: int = 1) -> None:
        """`phases`: the time of input, engine and output of all `count` executions together."""
        moved, ran, laid = phases
        self.compute_input.add(moved, count)
        self.compute_infer.add(ran, count)
        self.compute_output.add(laid, count)


@dataclass(slots=True)
class ResponseStatistics:
    """Responses with one index: all first responses to a request, all second ones, and so on."""

    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class Statistics(BatchStatistics):
    """All counters, either live or as a consistent copy. The phases count requests."""

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
    real_elements: int = 0
    """Elements of the inputs that were padded (core/padding.py), as clients sent them."""
    padded_elements: int = 0
    """Elements that were added to them."""
    backend_failures: int = 0
    """How many failures are the model's or its engine's fault."""
    latencies: Mapping[str, SummaryReading | HistogramReading] = field(default_factory=dict)
    """Distributions by metric; empty if only sums are kept."""
    batches: dict[int, BatchStatistics] = field(default_factory=lambda: defaultdict(BatchStatistics))
    """Batch size -> counters of its executions; ascending in a snapshot's copy."""
    responses: dict[int, ResponseStatistics] = field(default_factory=lambda: defaultdict(ResponseStatistics))
    """Index of a response among the responses to its request -> counters; only for decoupled models."""


class Outcomes(NamedTuple):
    """The number of requests that a version has answered, their nanoseconds, and the number of failed ones."""

    answered: int
    answered_ns: int
    failed: int


class Execution(NamedTuple):
    """A batch that has run. All times are time.monotonic_ns(). A tuple, because one is created for each batch."""

    compute_start: int
    """When the batch was formed and its inputs began to move to the worker."""
    input_end: int
    """When the worker had the inputs and the engine began."""
    output_start: int
    """When the engine ended."""
    compute_end: int
    """When the server could read the outputs."""
    queue_starts: Sequence[int]
    """When each successful request entered the queue."""
    request_end: int
    """When the requests are answered."""
    rows: int
    """Rows of the batch, padding included; of one request if `is_grouped`."""
    is_grouped: bool = False
    """Each request ran alone, with `rows` rows: each is an execution, with an equal part of the times."""
    padding_rows: int = 0
    """How many of `rows` are padding: these count in the batch size, but not as inferences."""
    real_elements: int = 0
    """Elements of the inputs that were padded, as the clients sent them."""
    padded_elements: int = 0
    """Elements that were added to them."""


_Counters = TypeVar("_Counters", bound=BatchStatistics | ResponseStatistics)


class ModelStatistics:
    """The counters of one model version. `snapshot` and `totals` copy one moment's, on any thread."""

    def __init__(self, latencies: LatencyDistributions | None = None) -> None:
        """`latencies`: distributions next to the sums; this object's lock guards them."""
        self._latencies = latencies
        self._lock = threading.Lock()
        self._numbers = Statistics()
        self._failures: deque[tuple[int, str]] = deque(maxlen=20)
        self._watched: SlidingSummary | None = None
        """Latencies of whole requests in microseconds; None while nobody reads them."""
        self._watched_ns = 0
        """time.monotonic_ns() of the last `quantiles` call."""
        # A deque, because its append and popleft are atomic: record_batch needs no lock for them.
        self._uncounted: deque[Execution] = deque()

    def continue_from(self, before: ModelStatistics) -> None:
        """Continue the counters of `before` after a reload. Called before anything is counted here."""
        latencies = before._latencies or self._latencies
        vars(self).update({name: value for name, value in vars(before).items() if name != "_lock"})
        self._latencies = latencies

    def record_batch(self, execution: Execution) -> None:
        # Counted later, many together, because this is called for every batch on the thread that answers.
        self._uncounted.append(execution)
        if len(self._uncounted) >= 256:
            with self._lock:
                self._count()

    def _count(self) -> None:
        """Count the recorded batches. Called under the lock."""
        numbers, uncounted, latencies = self._numbers, self._uncounted, self._latencies
        request_end = requests = executions = rows = success_ns = queue_ns = input_ns = infer_ns = output_ns = 0
        # Batch size -> executions, and the time of their three phases.
        sizes: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        while uncounted:
            begin, input_end, output_start, end, starts, request_end, size, is_grouped, absent, real, padded = (
                uncounted.popleft()
            )
            numbers.real_elements += real
            numbers.padded_elements += padded
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
        """Count a request that an ensemble answered. `begun_ns`: when its first steps were sent. `batch_size`: its
        rows. `phases`: the sums over its members, which also count for themselves."""
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
                self._latencies.summarise(Distribution.REQUEST_SUMMARY, ended_ns - started_ns, ended_ns)
                self._latencies.observe(Distribution.REQUEST_HISTOGRAM, (ended_ns - started_ns) / 1e6)
                self._latencies.note_response(ended_ns - started_ns)
                self._latencies.observe(Distribution.BATCH_SIZE_HISTOGRAM, batch_size)
            self._watch(ended_ns - started_ns, ended_ns)

    def record_cache_hit(self, started_ns: int, ended_ns: int) -> None:
        """Count a request that the response cache answered: a success without compute and queue time."""
        with self._lock:
            self._numbers.success.add(ended_ns - started_ns)
            self._numbers.queue.add(0)
            self._numbers.cache_hit.add(ended_ns - started_ns)
            if self._latencies is not None:
                self._latencies.note_request(ended_ns - started_ns, 0, ended_ns)
                self._latencies.summarise(Distribution.CACHE_HIT_SUMMARY, ended_ns - started_ns, ended_ns)
            self._watch(ended_ns - started_ns, ended_ns)

    def record_cache_miss(self, ns: int) -> None:
        """Count the time of a missed look-up and of storing the response. The request itself is counted elsewhere."""
        with self._lock:
            self._numbers.success.add(ns, count=0)
            self._numbers.cache_miss.add(ns)
            if self._latencies is not None:
                self._latencies.summarise(Distribution.CACHE_MISS_SUMMARY, ns, time.monotonic_ns())

    def record_response(self, index: int, started_ns: int, made_ns: int, sent_ns: int, failed: bool = False) -> None:
        """Count a response of a decoupled model, or an error. `started_ns`: the previous response, or the batch's
        start. `made_ns`: when the model had made it. `sent_ns`: when it had been sent to the client."""
        with self._lock:
            place = self._numbers.responses[min(index, _MOST_PLACES - 1)]
            place.compute_infer.add(made_ns - started_ns)
            place.compute_output.add(sent_ns - made_ns)
            (place.fail if failed else place.success).add(sent_ns - started_ns)

    def record_empty_response(self, index: int, started_ns: int, made_ns: int) -> None:
        """Count the message that ends a request's responses, if it is sent alone. Times as in `record_response`."""
        with self._lock:
            place = self._numbers.responses[min(index, _MOST_PLACES - 1)]
            place.compute_infer.add(made_ns - started_ns)
            place.empty_response.add(made_ns - started_ns)

    def record_first_response(self, ns: int) -> None:
        """Record how long a request to a decoupled model, or a decoupled ensemble, waited for its first response."""
        if self._latencies is not None:
            with self._lock:
                self._latencies.observe(Distribution.FIRST_RESPONSE_HISTOGRAM, ns / 1e6)

    def record_failure(self, started_ns: int, ended_ns: int, by_backend: bool = False) -> None:
        """Count a failed request. `by_backend`: the model, its engine or its worker failed, not the request."""
        with self._lock:
            self._count_failure(started_ns, ended_ns)
            self._numbers.backend_failures += by_backend

    def record_refusal(self, error: ServeError, started_ns: int, ended_ns: int) -> None:
        """Count a request that was not run: as failed, and as cancelled (its client had left) or rejected (with its
        error)."""
        is_cancelled = error.code is StatusCode.CANCELLED
        with self._lock:
            self._count_failure(started_ns, ended_ns)
            (self._numbers.cancel if is_cancelled else self._numbers.reject).add(ended_ns - started_ns)
        if not is_cancelled:
            self.note_failure(error.text)

    def _count_failure(self, started_ns: int, ended_ns: int) -> None:
        """Called under the lock."""
        self._numbers.fail.add(ended_ns - started_ns)
        if self._latencies is not None:
            self._latencies.note_response(ended_ns - started_ns)

    def note_failure(self, text: str) -> None:
        """Keep an error that a client got, without counting it."""
        self._failures.append((time.time_ns() // 1_000_000, text[:500]))

    @property
    def failures(self) -> Sequence[tuple[int, str]]:
        """Return the last errors, oldest first: milliseconds since the epoch, and the text."""
        return tuple(self._failures.copy())

    def quantiles(self, quantiles: Sequence[float]) -> SummaryReading:
        """Return latency quantiles of the last minute in microseconds. Latencies are recorded from the first call until
        a minute without calls, so they cost nothing while nobody reads them."""
        now = time.monotonic_ns()
        with self._lock:
            return self._watching(now).read(quantiles, now)

    def latency_buckets(self) -> Mapping[int, int]:
        """Return the number of the last minute's latencies by bucket (see `quantiles_of`), recorded as in
        `quantiles`."""
        now = time.monotonic_ns()
        with self._lock:
            return self._watching(now).buckets(now)

    def _watching(self, now: int) -> SlidingSummary:
        """Return the latencies, which are recorded from now on. Called under the lock."""
        self._watched_ns = now
        self._count()
        if self._watched is None:
            self._watched = SlidingSummary()
        return self._watched

    def _watch(self, nanoseconds: int, ended_ns: int) -> None:
        """Record a latency if somebody reads them. Called under the lock."""
        if self._watched is None:
            return
        self._watched.observe(nanoseconds // 1000, ended_ns)
        if ended_ns - self._watched_ns > WINDOW_NS:
            self._watched = None

    def outcomes(self) -> Outcomes:
        """Return how many requests were answered and failed, at a far lower cost than `totals`."""
        with self._lock:
            self._count()
            numbers = self._numbers
            return Outcomes(numbers.success.count, numbers.success.ns, numbers.fail.count)

    def totals(self) -> Statistics:
        """Return the sums without `batches` and `responses`, at a cost that does not depend on their number."""
        return self._read("batches", "responses")

    def snapshot(self) -> Statistics:
        return self._read()

    def _read(self, *without: str) -> Statistics:
        with self._lock:
            self._count()
            copy = _copied(self._numbers, without)
            if self._latencies is not None:
                copy.latencies = self._latencies.read(time.monotonic_ns())
            return copy


def _copied(counters: _Counters, without: Collection[str] = ()) -> _Counters:
    """Return a copy without some fields. Counters by number are sorted."""
    values: dict[str, Any] = {}
    for name in counters.__dataclass_fields__.keys() - without:
        value = getattr(counters, name)
        if isinstance(value, Duration):
            value = Duration(value.count, value.ns)
        elif isinstance(value, dict):
            value = {number: _copied(value[number]) for number in sorted(value)}
        values[name] = value
    return type(counters)(**values)
