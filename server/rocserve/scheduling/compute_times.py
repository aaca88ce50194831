"""Measures how long batches take: smoothed times in the engine, and, by a batch's work (RequestPlan.work), the time
from its start on an instance to its outputs. Also counts how many requests in a row were quick and ended no worker.

The second measure is kept separately for work up to 1, 2, 4, 8, ..., and read in two ways: the time that
most batches stay below, a quantile of the last ones, and the best time, that of the fastest of the very last ones. A
size that has not run yet counts as the largest measured size below it, so that it is tried. No estimate is made from a
single batch.

Measurements decide which batches run, and only batches that run are measured. So that outdated times lock out no model,
each measurement expires:

- A slow batch changes little, several change the quantile, and they are forgotten when they leave the window.
- When a size has not run for long, its measurements are dropped, and it is tried again.
- When the last batches, of any size, took half of the quantile or less, the machine has become faster: all
  measurements are dropped.
- While requests are refused and nothing runs, one of them runs now and then (`may_probe`). If it is in time, the next
  ones may be too, because it is then the fastest of the last batches.
"""

from __future__ import annotations

from collections import deque

from rocserve.scheduling.batch import FormedBatch
from rocserve.workers.results import BatchOutcome

_WINDOW = 32
"""Batches of one size that are remembered. If 9 of them are slow, so is the 75 % quantile."""
_LEAST_BATCHES = 2
"""Number of batches of a size from which an estimate is made: the first may have been a warm-up."""
_LATEST = 5
"""Batches that show how fast the machine is now: of so many at least one is fast, also while others use the CPUs."""


SEND_AHEAD_BELOW_NS = 3_000_000
"""Batches are sent ahead only while the engine takes less than this for one: 64 requests of a small Python model take
about 1 ms. Then the round trip to the worker is a large part of the time, in which the engine would wait: 15 % of the
throughput of that model. A request that waits in the worker instead of the queue loses almost nothing."""


_SLOW_NS = 20_000_000
"""Engine time after which a batch is no longer that of a quick model; a busy machine seldom makes one take so long."""


class ComputeTimes:
    def __init__(self) -> None:
        self.engine_ns = self.request_ns = SEND_AHEAD_BELOW_NS
        """Smoothed engine time of a batch, and its share for one request."""
        self.calm_requests = 0
        """Number of requests since the last batch that was slow or ended its worker."""
        self._windows: dict[int, deque[int]] = {}
        """Size class (log2 of the work, rounded up) -> nanoseconds of its last batches."""
        self._ended_ns: dict[int, int] = {}
        """Size class -> time.monotonic_ns() when its last batch ended."""
        self._ages_checked_ns = 0
        self._latest = deque[tuple[int, int]](maxlen=_LATEST)
        """Work and nanoseconds of the last batches of all sizes."""
        self._estimates: dict[int, float] = {}
        """Size class -> seconds that most batches stay below; emptied when new batches change the estimates."""
        self._at_best: dict[int, float] = {}
        """Work -> `at_best`; emptied by each batch."""
        self._added = 0
        self._last_ns = 0

    def observe(self, batch: FormedBatch, outcome: BatchOutcome) -> None:
        requests = batch.requests
        engine_ns = outcome.output_start_ns - outcome.input_end_ns
        self.calm_requests = self.calm_requests + len(requests) if engine_ns < _SLOW_NS else 0
        self.engine_ns += (engine_ns - self.engine_ns) >> 3
        self.request_ns += (engine_ns // len(requests) - self.request_ns) >> 2
        if batch.is_first:
            return
        work = requests[0].plan.work
        nanoseconds = outcome.compute_end_ns - (outcome.input_end_ns if batch.sent_ahead else batch.compute_start_ns)
        if len(requests) > 1:
            if batch.is_grouped:
                nanoseconds //= len(requests)
            else:
                work = sum([request.plan.work for request in requests])
        self.add(work, nanoseconds, outcome.compute_end_ns)

    def note_end(self) -> None:
        """Note that a worker has ended with a batch."""
        self.calm_requests = 0

    def add(self, work: int, nanoseconds: int, ended_ns: int) -> None:
        """Record that a batch of this work took `nanoseconds` from its start on an instance to its outputs."""
        self._last_ns = ended_ns
        size = (work - 1).bit_length()
        window = self._windows.get(size)
        if window is None:
            window = self._windows[size] = deque(maxlen=_WINDOW)
        window.append(nanoseconds)
        self._ended_ns[size] = ended_ns
        self._latest.append((work, nanoseconds))
        self._at_best.clear()
        self._added += 1
        # After a full window only every fourth batch changes the estimate, because sorting costs a microsecond.
        if len(window) < _WINDOW or not self._added % 4:
            self._estimates.clear()

    def review(self, now_ns: int) -> None:
        """Drop the measurements of sizes that have not run for long, and all if the machine has become faster."""
        if now_ns - self._ages_checked_ns >= 1_000_000_000:
            self._ages_checked_ns = now_ns
            for size, window in list(self._windows.items()):
                # A size is measured again if it has not run for 50 times as long as its last batch took: two batches
                # that run too late then cost 4 % of the time. Clients pause too, for some seconds.
                if now_ns - self._ended_ns[size] >= max(50 * window[-1], 10_000_000_000):
                    self._drop(size)
        if len(self._latest) == _LATEST and all(
            nanoseconds / 1e9 <= self.of(work) / 2 for work, nanoseconds in self._latest
        ):
            for size in list(self._windows):
                self._drop(size)
            self._latest.clear()

    def _drop(self, size: int) -> None:
        del self._windows[size]
        self._estimates.clear()
        self._at_best.clear()

    def of(self, work: int) -> float:
        """Return the seconds that most batches of this size stay below; 0 while nothing is known."""
        for size in range((work - 1).bit_length(), -1, -1):
            estimate = self._estimates.get(size)
            if estimate is not None:
                return estimate
            window = self._windows.get(size)
            if window is not None and len(window) >= _LEAST_BATCHES:
                estimate = self._estimates[size] = sorted(window)[int(0.75 * (len(window) - 1))] / 1e9
                return estimate
        return 0.0

    def at_best(self, work: int) -> float:
        """Return the seconds of the fastest of the last batches of this size; 0 while nothing is known."""
        known = self._at_best.get(work)
        if known is None:
            known = 0.0
            for size in range((work - 1).bit_length(), -1, -1):
                window = self._windows.get(size, ())
                if len(window) >= _LEAST_BATCHES:
                    known = min([*window][-_LATEST:]) / 1e9
                    break
            self._at_best[work] = known
        return known

    @property
    def at_best_of_any_size(self) -> float:
        """The seconds of the fastest of the last batches of all sizes; 0 while nothing is known."""
        if len(self._latest) < _LEAST_BATCHES:
            return 0.0
        return min(nanoseconds for _, nanoseconds in self._latest) / 1e9

    def may_probe(self, now_ns: int) -> bool:
        """Return whether a request may run that ends too late by the estimate: no batch has run for the probe period,
        nor for the usual time of a batch."""
        usual_ns = min((sorted(window)[len(window) // 2] for window in self._windows.values()), default=0)
        # Ten probes a second soon show that a model has become faster, and cost almost nothing if it has not.
        return now_ns - self._last_ns >= max(100_000_000, usual_ns)
