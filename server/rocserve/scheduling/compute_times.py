"""Measures how long batches take: smoothed times in the engine, and by batch size the time from the start on an
instance to the outputs.

The second measure is a high quantile of the last batches. One slow batch changes nothing, several change it
immediately, and slow batches are forgotten when they leave the window. Batches of up to 1, 2, 4, 8, ... rows are
measured separately. A size that has not run yet counts as the largest measured size below it, so that it is tried. No
estimate is made from one batch alone.
"""

from __future__ import annotations

from collections import deque

from rocserve.scheduling.batch import FormedBatch
from rocserve.workers.results import BatchOutcome

_WINDOW = 32
"""Batches of one size that are remembered. If 5 of them are slow, so is the 90 % quantile."""
_QUANTILE = 0.9
_BATCHES_PER_ESTIMATE = 4
"""Batches after which an estimate from a full window is computed again, because sorting costs a microsecond."""
_LEAST_BATCHES = 2
"""Number of batches of a size from which an estimate is made: the first may have been a warm-up."""
_PROBE_PERIOD_NS = 100_000_000
"""Time without a batch after which a request runs against the estimate: ten probes a second soon show that a model has
become faster, and cost almost nothing if it has not."""


SEND_AHEAD_BELOW_NS = 1_000_000
"""Batches are sent ahead only while the engine takes less than this for one. Then the way to the worker and back is a
large part of the time, and a request that waits in the worker instead of the queue loses almost nothing."""


class ComputeTimes:
    def __init__(self) -> None:
        self.engine_ns = self.request_ns = SEND_AHEAD_BELOW_NS
        """Smoothed engine time of a batch, and its share for one request."""
        self._windows: dict[int, deque[int]] = {}
        self._estimates: dict[int, float] = {}
        """Size class (log2 of the rows, rounded up) -> seconds; emptied when new batches change the estimates."""
        self._added = 0
        self._last_ns = 0
        self._is_probing = False

    def observe(self, batch: FormedBatch, outcome: BatchOutcome) -> None:
        requests = batch.requests
        engine_ns = outcome.output_start_ns - outcome.input_end_ns
        self.engine_ns += (engine_ns - self.engine_ns) >> 3
        self.request_ns += (engine_ns // len(requests) - self.request_ns) >> 2
        if batch.is_first:
            return
        rows = requests[0].plan.batch_size
        nanoseconds = outcome.compute_end_ns - (outcome.input_end_ns if batch.sent_ahead else batch.compute_start_ns)
        if len(requests) > 1:
            if batch.is_grouped:
                nanoseconds //= len(requests)
            else:
                rows = sum([request.plan.batch_size for request in requests])
        self.add(rows, nanoseconds, outcome.compute_end_ns)

    def add(self, rows: int, nanoseconds: int, ended_ns: int) -> None:
        """Record that `rows` rows took `nanoseconds` from their start on an instance to their outputs."""
        self._last_ns = ended_ns
        if self._is_probing:
            self._is_probing = False
            if nanoseconds / 1e9 <= self.of(rows) / 2:
                self._windows.clear()
                self._estimates.clear()
        size = (rows - 1).bit_length()
        window = self._windows.get(size)
        if window is None:
            window = self._windows[size] = deque(maxlen=_WINDOW)
        window.append(nanoseconds)
        self._added += 1
        if len(window) < _WINDOW or not self._added % _BATCHES_PER_ESTIMATE:
            self._estimates.clear()

    def of(self, rows: int) -> float:
        """Return the seconds that most batches of this size stay below; 0 while nothing is known."""
        for size in range((rows - 1).bit_length(), -1, -1):
            estimate = self._estimates.get(size)
            if estimate is not None:
                return estimate
            window = self._windows.get(size)
            if window is not None and len(window) >= _LEAST_BATCHES:
                estimate = self._estimates[size] = sorted(window)[int(_QUANTILE * (len(window) - 1))] / 1e9
                return estimate
        return 0.0

    def may_probe(self, now_ns: int) -> bool:
        """Return whether a request may run that ends too late by the estimate: no batch has run for the probe period,
        nor for the usual time of a batch. If this probe takes half of the estimate or less, all earlier measurements
        are discarded."""
        usual_ns = min((sorted(window)[len(window) // 2] for window in self._windows.values()), default=0)
        self._is_probing = now_ns - self._last_ns >= max(_PROBE_PERIOD_NS, usual_ns)
        return self._is_probing
