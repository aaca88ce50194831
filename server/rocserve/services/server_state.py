"""Reports the state of the whole server, and the work of all models in the last ten minutes, for the page at the HTTP
port."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

from rocserve.core.custom_metrics import MetricFamily
from rocserve.core.latencies import quantiles_of
from rocserve.core.serving import ServedVersion, ServingTableHolder
from rocserve.core.statistics import Outcomes
from rocserve.protocol import page_pb2

PERIOD_SECONDS = 5.0
"""Time between two points; the page draws one for each pixel or two."""
_SPAN_SECONDS = 600.0

_NOTHING = Outcomes(0, 0, 0)

_VersionKey = tuple[str, str, int]
"""Namespace, name and version: a reload replaces the version's object, but continues its counters."""


class ServerHistory:
    """Makes a point every five seconds, in a thread, because thousands of models take a while. Points are read on any
    thread."""

    def __init__(self, tables: ServingTableHolder, clock: Callable[[], float] = time.monotonic) -> None:
        self._tables = tables
        self._clock = clock
        self._points: deque[page_pb2.ServerPoint] = deque(maxlen=int(_SPAN_SECONDS / PERIOD_SECONDS))
        self._counted: Mapping[_VersionKey, Outcomes] = {}
        """As of the last point."""
        self._counted_at = clock()
        self._looked_at = -math.inf

    async def run(self) -> None:
        """Make points until this is cancelled."""
        took = 0.0
        while True:
            # A point of thousands of models takes long to make: points cost at most 0.2 % of a CPU.
            await asyncio.sleep(max(PERIOD_SECONDS, 500 * took))
            took = await asyncio.to_thread(self._timed_sample)

    def after(self, at_ms: int) -> Sequence[page_pb2.ServerPoint]:
        """Return the points after a time. For the next minute, new points have quantiles."""
        self._looked_at = self._clock()
        oldest_ms = max(at_ms, time.time_ns() // 1_000_000 - int(1000 * _SPAN_SECONDS))
        return [point for point in self._points.copy() if point.at_ms > oldest_ms]

    def _timed_sample(self) -> float:
        """Make a point, and return the seconds of a CPU that it took: on a busy machine it waits in between."""
        began = time.thread_time()
        self.sample()
        return time.thread_time() - began

    def sample(self) -> None:
        """Make a point."""
        versions = {
            (model.namespace, version.name, version.version): version
            for model in self._tables.table.all_models
            for version in model.versions.values()
            if version.has_statistics
        }
        counted = {key: version.statistics.outcomes() for key, version in versions.items()}
        now = self._clock()
        seconds = max(now - self._counted_at, 1e-3)
        answered = answered_ns = failed = 0
        for key, outcomes in counted.items():
            before = self._counted.get(key, _NOTHING)
            # After an unload and another load, the counters begin at zero.
            if before.answered > outcomes.answered or before.failed > outcomes.failed:
                before = _NOTHING
            answered += outcomes.answered - before.answered
            answered_ns += outcomes.answered_ns - before.answered_ns
            failed += outcomes.failed - before.failed
        self._counted, self._counted_at = counted, now
        p50_us, p99_us = self._quantiles(versions.values(), now)
        self._points.append(
            page_pb2.ServerPoint(
                at_ms=time.time_ns() // 1_000_000,
                answered_rate=answered / seconds,
                failed_rate=failed / seconds,
                mean_us=answered_ns / answered / 1000 if answered else 0.0,
                p50_us=p50_us,
                p99_us=p99_us,
                waiting=sum(version.pending_requests for version in versions.values()),
            )
        )

    def _quantiles(self, versions: Iterable[ServedVersion], now: float) -> tuple[float, float]:
        # Quantiles are computed for a minute after the last reading of points.
        if now - self._looked_at > 60.0:
            return 0.0, 0.0
        buckets = Counter[int]()
        for version in versions:
            buckets.update(version.statistics.latency_buckets())
        p50, p99 = (value for _, value in quantiles_of(buckets, (0.5, 0.99)))
        return (p50, p99) if buckets else (0.0, 0.0)


async def server_state(
    history: ServerHistory,
    gauges: Callable[[], Iterable[MetricFamily]],
    started_ms: int,
    request: page_pb2.ServerStateRequest,
) -> page_pb2.ServerStateResponse:
    """`gauges` returns the metrics of the machine's processors, memory and GPUs."""
    # GPUs may take their time.
    families = await asyncio.to_thread(gauges)
    values = {family.name: _values(family) for family in families}
    response = page_pb2.ServerStateResponse(
        now_ms=time.time_ns() // 1_000_000,
        started_ms=started_ms,
        cpu_use=values.get("nv_cpu_utilization", {}).get("", -1.0),
        memory_used_bytes=int(values.get("nv_cpu_memory_used_bytes", {}).get("", 0)),
        memory_total_bytes=int(values.get("nv_cpu_memory_total_bytes", {}).get("", 0)),
    )
    used, use = values.get("nv_gpu_memory_used_bytes", {}), values.get("nv_gpu_utilization", {})
    for gpu, total in values.get("nv_gpu_memory_total_bytes", {}).items():
        response.gpus.add(
            use=use.get(gpu, -1.0), memory_used_bytes=int(used.get(gpu, 0)), memory_total_bytes=int(total)
        )
    response.points.extend(history.after(request.after_ms))
    return response


def _values(family: MetricFamily) -> Mapping[str, float]:
    """Return the values of a gauge by GPU; "" = of the machine."""
    return {sample.labels.get("gpu_uuid", ""): cast(float, sample.value) for sample in family.samples}
