"""Measures how long batches take: smoothed, of all in the engine; and by size, what a request still needs once an
instance takes it.

The latter is a high quantile of the last few batches: one slow batch among them changes nothing, some do at once, and
what was slow is forgotten when it has left the window. Batches of up to 1, 2, 4, 8, ... rows are measured apart; a size
that has not run yet counts as the largest below it that has, so that it is tried. No estimate is ever made of one batch
alone.
"""

from __future__ import annotations

from collections import deque

from rocserve.scheduling.batch import FormedBatch
from rocserve.workers.results import BatchOutcome

_WINDOW = 32
"""Batches of a size that are remembered: 5 slow ones among them are the 90 % quantile."""
_QUANTILE = 0.9
_RENEWAL = 4
"""Batches after which an estimate from a full window is made anew: sorting costs a microsecond."""
_FEWEST = 2
"""Batches of a size below which nothing is said of it: the first may have been a warm-up."""
_PROBE_PERIOD_NS = 100_000_000
"""How long nothing must have run before a request is run against the estimate: ten tries a second find out soon that a
model has become faster, and are next to nothing where it has not."""


SHORT_NS = 1_000_000
"""Batches are sent ahead only while the engine takes less than this for one: then the way to the worker and back is a
large part of the time, and a request that waits there instead of in the queue loses next to nothing."""


class ComputeTimes:
    """The last batches of one model version."""

    def __init__(self) -> None:
        self.engine_ns = self.request_ns = SHORT_NS
        """Of a batch in the engine, and of one of its requests."""
        self._windows: dict[int, deque[int]] = {}
        self._estimates: dict[int, float] = {}
        """Those that have been asked for lately."""
        self._added = 0
        self._last_ns = 0
        self._is_probing = False

    def observe(self, batch: FormedBatch, outcome: BatchOutcome) -> None:
        """A batch has been run."""
        entries = batch.entries
        engine_ns = outcome.output_start_ns - outcome.input_end_ns
        self.engine_ns += (engine_ns - self.engine_ns) >> 3
        self.request_ns += (engine_ns // len(entries) - self.request_ns) >> 2
        if batch.is_first:
            return
        rows = entries[0].plan.batch_size
        nanoseconds = outcome.compute_end_ns - (outcome.input_end_ns if batch.sent_ahead else batch.compute_start_ns)
        if len(entries) > 1:
            if batch.is_grouped:
                nanoseconds //= len(entries)
            else:
                rows = sum([entry.plan.batch_size for entry in entries])
        self.add(rows, nanoseconds, outcome.compute_end_ns)

    def add(self, rows: int, nanoseconds: int, ended_ns: int) -> None:
        """So many rows took so long, from when an instance took them until their outputs were there."""
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
        if len(window) < _WINDOW or not self._added % _RENEWAL:
            self._estimates.clear()

    def of(self, rows: int) -> float:
        """The seconds that most batches of this size stay below; 0 while nothing is known."""
        for size in range((rows - 1).bit_length(), -1, -1):
            estimate = self._estimates.get(size)
            if estimate is not None:
                return estimate
            window = self._windows.get(size)
            if window is not None and len(window) >= _FEWEST:
                estimate = self._estimates[size] = sorted(window)[int(_QUANTILE * (len(window) - 1))] / 1e9
                return estimate
        return 0.0

    def may_probe(self, now_ns: int) -> bool:
        """Whether a request may run though the estimate says that it ends too late: nothing has run for a while, as
        long at least as such a batch usually takes. If it takes half of the estimate or less, what was measured before
        is forgotten."""
        usual_ns = min((sorted(window)[len(window) // 2] for window in self._windows.values()), default=0)
        self._is_probing = now_ns - self._last_ns >= max(_PROBE_PERIOD_NS, usual_ns)
        return self._is_probing
