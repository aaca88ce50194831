"""Counters of one model version, as the statistics extension of KServe v2 (Triton's) reports them.

All durations are nanoseconds. Each request of a batch is charged the whole batch's phases; a failure counts in `fail`
only; a batch counts one execution however many requests it holds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass


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

    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """time.monotonic_ns() at the phases of one execution."""

    compute_start: int
    """The batch was formed; its inputs begin to move to the worker."""
    input_end: int
    """The worker has the inputs; the engine begins."""
    output_start: int
    """The engine has ended."""
    compute_end: int
    """The outputs are where the server reads them."""


@dataclass(frozen=True, slots=True)
class StatisticsSnapshot:
    """A consistent copy of the counters."""

    inference_count: int
    execution_count: int
    last_inference_ms: int
    """Milliseconds since the epoch; 0 = never."""
    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cancel: Duration
    reject: Duration
    batches: dict[int, BatchStatistics]


class ModelStatistics:
    """The counters; updated once a batch under a lock of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.inference_count = 0
        self.execution_count = 0
        self._last_inference_ms = 0
        self._success = Duration()
        self._fail = Duration()
        self._queue = Duration()
        self._compute_input = Duration()
        self._compute_infer = Duration()
        self._compute_output = Duration()
        self._cancel = Duration()
        self._reject = Duration()
        self._batches: dict[int, BatchStatistics] = {}

    def record_batch(
        self, times: BatchTimes, queue_starts: Sequence[int], request_ends: Sequence[int], batch_size: int
    ) -> None:
        """One execution: the requests of it that succeeded, and the rows of all that ran."""
        now_ms = time.time_ns() // 1_000_000
        requests = len(queue_starts)
        compute_input = times.input_end - times.compute_start
        compute_infer = times.output_start - times.input_end
        compute_output = times.compute_end - times.output_start
        with self._lock:
            self._last_inference_ms = now_ms
            self.execution_count += 1
            self.inference_count += batch_size
            started = sum(queue_starts)
            self._success.add(sum(request_ends) - started, requests)
            self._queue.add(times.compute_start * requests - started, requests)
            self._compute_input.add(compute_input * requests, requests)
            self._compute_infer.add(compute_infer * requests, requests)
            self._compute_output.add(compute_output * requests, requests)
            batch = self._batches.get(batch_size)
            if batch is None:
                batch = self._batches[batch_size] = BatchStatistics(Duration(), Duration(), Duration())
            batch.compute_input.add(compute_input)
            batch.compute_infer.add(compute_infer)
            batch.compute_output.add(compute_output)

    def record_ensemble(self, started_ns: int, ended_ns: int, batch_size: int) -> None:
        """A request that an ensemble answered; its members count their own phases."""
        with self._lock:
            self._last_inference_ms = time.time_ns() // 1_000_000
            self.execution_count += 1
            self.inference_count += batch_size
            self._success.add(ended_ns - started_ns)

    def record_failure(self, started_ns: int, ended_ns: int) -> None:
        with self._lock:
            self._fail.add(ended_ns - started_ns)

    def record_rejection(self, started_ns: int, ended_ns: int) -> None:
        """A request that was refused by the queue (full, or its time was up): a failure, counted apart as well."""
        with self._lock:
            self._fail.add(ended_ns - started_ns)
            self._reject.add(ended_ns - started_ns)

    def record_cancellation(self, started_ns: int, ended_ns: int) -> None:
        """A request that was dropped because its client had gone."""
        with self._lock:
            self._cancel.add(ended_ns - started_ns)

    def snapshot(self) -> StatisticsSnapshot:
        with self._lock:
            return StatisticsSnapshot(
                inference_count=self.inference_count,
                execution_count=self.execution_count,
                last_inference_ms=self._last_inference_ms,
                success=_copy(self._success),
                fail=_copy(self._fail),
                queue=_copy(self._queue),
                compute_input=_copy(self._compute_input),
                compute_infer=_copy(self._compute_infer),
                compute_output=_copy(self._compute_output),
                cancel=_copy(self._cancel),
                reject=_copy(self._reject),
                batches={
                    size: BatchStatistics(_copy(b.compute_input), _copy(b.compute_infer), _copy(b.compute_output))
                    for size, b in sorted(self._batches.items())
                },
            )


def _copy(duration: Duration) -> Duration:
    return Duration(duration.count, duration.ns)
