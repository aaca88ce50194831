"""The methods that the page of the HTTP port asks beside all others: what models do, and what becomes of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import rocserve
from rocserve.core.printable import encodable
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.serving import IndexEntry, ServedVersion
from rocserve.protocol import page_pb2 as pb
from rocserve.repository.model_repository import ModelRepository
from rocserve.workers.resource_watch import memory_bytes

_QUANTILES = (0.5, 0.9, 0.99)
_WAIT_SECONDS = 10.0
"""For the next event; then the answer is that there is none yet."""


class PageService:
    """Reads counters and states that are there for others too; only quantiles are counted for it, while it is asked."""

    def __init__(
        self, repository: ModelRepository, server_id: str, is_ready: Callable[[], bool], paths: PrivatePaths
    ) -> None:
        """`paths`: takes those of the server out of reasons and failures."""
        self._repository = repository
        self._server_id = server_id
        self._is_ready = is_ready
        self._paths = paths

    async def overview(self, request: pb.OverviewRequest) -> pb.OverviewResponse:
        """Of hundreds of models it takes a while, which nobody else is to wait for."""
        return await asyncio.to_thread(self._overview)

    def _overview(self) -> pb.OverviewResponse:
        return pb.OverviewResponse(
            server=self._server_id,
            version=rocserve.__version__,
            ready=self._is_ready(),
            now_ms=time.time_ns() // 1_000_000,
            models=[self._model(row) for row in self._repository.index(ready_only=False)],
        )

    def _model(self, row: IndexEntry) -> pb.ModelOverview:
        overview = pb.ModelOverview(
            name=encodable(row.name), version=row.version, state=row.state, reason=self._shown(row.reason)
        )
        if row.served is not None:
            self._fill(overview, row.served)
        return overview

    def _fill(self, overview: pb.ModelOverview, served: ServedVersion) -> None:
        numbers, properties = served.statistics.snapshot(), served.properties
        overview.platform = served.config.platform or served.config.backend
        overview.engine = encodable(properties.get("engine", ""))
        overview.devices = encodable(properties.get("devices", ""))
        overview.load_seconds = served.load_seconds
        overview.pending_requests = served.pending_requests
        overview.last_inference_ms = numbers.last_inference_ms
        overview.success_count, overview.success_ns = numbers.success.count, numbers.success.ns
        overview.queue_ns = numbers.queue.ns
        overview.failure_count = numbers.fail.count
        overview.inference_count, overview.execution_count = numbers.inference_count, numbers.execution_count
        overview.cache_hit_count, overview.cache_miss_count = numbers.cache_hit.count, numbers.cache_miss.count
        for size, batch in numbers.batches.items():
            overview.batches[size] = batch.compute_infer.count
        for quantile, value in served.statistics.quantiles(_QUANTILES).quantiles:
            if value == value:  # NaN: there was no request.
                overview.latencies_us.add(quantile=quantile, value=value)
        overview.worker_memory_bytes.extend(memory_bytes(pid) // models for pid, models in served.worker_pids.items())
        overview.worker_restarts = served.worker_restarts
        for failure in served.statistics.failures:
            overview.failures.add(time_ms=failure.time_ms, text=self._shown(failure.text))

    async def events(self, request: pb.RepositoryEventsRequest) -> pb.RepositoryEventsResponse:
        events = self._repository.events
        response = pb.RepositoryEventsResponse()
        for event in await events.after(request.after, _WAIT_SECONDS):
            row = event.row
            response.events.add(
                number=event.number,
                time_ms=event.time_ms,
                name=encodable(row.name),
                version=row.version,
                state=row.state,
                reason=self._shown(row.reason),
            )
        response.is_last = events.has_ended
        return response

    def _shown(self, text: str) -> str:
        return encodable(self._paths.hide(text))
