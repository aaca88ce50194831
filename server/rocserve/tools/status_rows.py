"""The rows of `rocserve status`: the repository index joined with the statistics, and the rates between two polls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rocserve.core.printable import printable
from rocserve_client import IndexEntry, ModelStatistics

Key = tuple[str, str]
"""A model's name and version."""

_NOT_KNOWN: Mapping[Key, str] = {}


@dataclass(frozen=True, slots=True)
class StatusRow:
    """One version of a model; the figures are None for one that has no statistics."""

    model: str
    version: str
    state: str
    reason: str
    engine: str = ""
    """What runs it, in a few words; "" where that is not known."""
    succeeded: int | None = None
    failed: int | None = None
    mean_batch: float | None = None
    """Batch elements an execution."""
    request_ms: float | None = None
    """Mean time of a request that succeeded, from its arrival to its answer."""
    queue_ms: float | None = None
    """Mean time of a request in the queue."""
    compute_ms: float | None = None
    """Mean time of a request's batch: inputs, inference and outputs."""
    rate: float | None = None
    """Requests a second, failed ones included, since the poll before; None at the first."""


class StatusRows:
    """Makes the rows of each poll and remembers the counters that the next poll's rates need."""

    def __init__(self) -> None:
        self._counts: dict[Key, int] = {}
        self._updated_at: float | None = None

    def update(
        self,
        index: Iterable[IndexEntry],
        statistics: Iterable[ModelStatistics],
        now: float,
        engines: Mapping[Key, str] = _NOT_KNOWN,
    ) -> list[StatusRow]:
        """The rows in the order of names and versions; `now` is time.monotonic() seconds."""
        by_key = {(stats.name, stats.version): stats for stats in statistics}
        entries = sorted(index, key=lambda entry: (entry.name, len(entry.version), entry.version))
        elapsed = None if self._updated_at is None else now - self._updated_at
        rows = []
        for entry in entries:
            key = (entry.name, entry.version)
            rows.append(self._row(entry, engines.get(key, ""), by_key.get(key), elapsed))
        self._counts = {key: stats.success.count + stats.fail.count for key, stats in by_key.items()}
        self._updated_at = now
        return rows

    def _row(self, entry: IndexEntry, engine: str, stats: ModelStatistics | None, elapsed: float | None) -> StatusRow:
        if stats is None:
            return StatusRow(entry.name, entry.version, entry.state, printable(entry.reason), engine)
        compute_ns = stats.compute_input.ns + stats.compute_infer.ns + stats.compute_output.ns
        return StatusRow(
            model=entry.name,
            version=entry.version,
            state=entry.state,
            reason=printable(entry.reason),
            engine=engine,
            succeeded=stats.success.count,
            failed=stats.fail.count,
            mean_batch=_mean(stats.inference_count, stats.execution_count),
            request_ms=_mean(stats.success.ns / 1e6, stats.success.count),
            queue_ms=_mean(stats.queue.ns / 1e6, stats.queue.count),
            compute_ms=_mean(compute_ns / 1e6, stats.compute_infer.count),
            rate=self._rate(stats, elapsed),
        )

    def _rate(self, stats: ModelStatistics, elapsed: float | None) -> float | None:
        before = self._counts.get((stats.name, stats.version))
        if before is None or not elapsed:
            return None
        # A version that was loaded again in between counts from zero.
        return max(0, stats.success.count + stats.fail.count - before) / elapsed


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None
