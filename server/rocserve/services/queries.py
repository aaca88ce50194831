"""Answers the methods that only read, from liveness to the repository index, and those of the page at the HTTP port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

import rocserve
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import InputConfig, OutputConfig
from rocserve.core.printable import encodable
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.serving import IndexEntry, ServedVersion, ServingTableHolder, parse_version
from rocserve.core.statistics import BatchStatistics, Duration, ResponseStatistics, Statistics
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol import page_pb2
from rocserve.repository.model_repository import ModelRepository
from rocserve.services.control import refuse_repository_name
from rocserve.services.methods import Method
from rocserve.services.readiness import Readiness, Ready
from rocserve.workers.resource_watch import memory_bytes

_LEAST_WIDTH, _USUAL_WIDTH, _MOST_WIDTH = 240.0, 900.0, 4000.0
"""Pixels of a drawing: a narrow phone, a page, a wide screen."""


@dataclass(eq=False)
class QueryService:
    """Answers slow methods on the event loop, others on any thread. Raises ServeError with Triton's codes and texts."""

    _tables: ServingTableHolder
    _repository: ModelRepository
    _server_id: str
    _readiness: Readiness
    _paths: PrivatePaths
    """Removes the server's paths from reasons and properties."""
    _allows_client_shm: bool

    def methods(self) -> Mapping[str, Method]:
        return {
            "ServerLive": Method(pb.ServerLiveRequest, lambda request: pb.ServerLiveResponse(live=True)),
            "ServerReady": Method(
                pb.ServerReadyRequest, lambda request: _ready(pb.ServerReadyResponse, self._readiness.of_server())
            ),
            "ModelReady": Method(pb.ModelReadyRequest, self.model_ready),
            "ServerMetadata": Method(pb.ServerMetadataRequest, self.server_metadata),
            "ModelMetadata": Method(pb.ModelMetadataRequest, self.model_metadata),
            "ModelConfig": Method(pb.ModelConfigRequest, self.model_config),
            "ModelStatistics": Method(pb.ModelStatisticsRequest, self.model_statistics),
            "RepositoryIndex": Method(pb.RepositoryIndexRequest, self.repository_index),
            "Overview": Method(page_pb2.OverviewRequest, self.overview, is_slow=True),
            "LoadReport": Method(page_pb2.LoadReportRequest, self.load_report, is_slow=True),
            "EnsembleGraph": Method(page_pb2.EnsembleGraphRequest, self.ensemble_graph, is_slow=True),
            "RepositoryEvents": Method(page_pb2.RepositoryEventsRequest, self.events, is_slow=True),
        }

    def model_ready(self, request: pb.ModelReadyRequest) -> Any:
        if request.version:
            parse_version(request.version)
        return _ready(pb.ModelReadyResponse, self._readiness.of_model(request.name, request.version))

    def server_metadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        extensions = (
            "classification",
            "sequence",
            "model_repository",
            "model_repository(unload_dependents)",
            "schedule_policy",
            "model_configuration",
            *(("system_shared_memory", "cuda_shared_memory") if self._allows_client_shm else ()),
            "binary_tensor_data",
            "parameters",
            "statistics",
            "trace",
            "logging",
            # Workers of AMD Inference Server, because its clients look here for the workers that they may load.
            "migraphx",
            "rocal",
        )
        return pb.ServerMetadataResponse(name=self._server_id, version=rocserve.__version__, extensions=extensions)

    def model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        table = self._tables.table
        version, model = table.find(request.name, request.version), table.models[request.name]
        config = version.config
        lead = [-1] if config.max_batch_size > 0 else []

        response = pb.ModelMetadataResponse(
            name=config.name,
            versions=[str(number) for number in ([version.version] if request.version else sorted(model.versions))],
            platform=config.platform or config.backend,
            properties={name: self._paths.hide(text) for name, text in version.properties.items()},
        )
        entries: Iterable[InputConfig | OutputConfig]
        for tensors, entries in ((response.inputs, config.inputs), (response.outputs, config.outputs)):
            for entry in entries:
                tensors.add(name=entry.name, datatype=entry.datatype.value, shape=[*lead, *entry.dims])
        return response

    def model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        version = self._tables.table.find(request.name, request.version)
        response = pb.ModelConfigResponse()
        response.config.ParseFromString(version.config_message)
        return response

    def model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        response = pb.ModelStatisticsResponse()
        for version in self._versions(request.name, request.version):
            snapshot = version.statistics.snapshot()
            message = response.model_stats.add(
                name=version.name,
                version=str(version.version),
                last_inference=snapshot.last_inference_ms,
                inference_count=snapshot.inference_count,
                execution_count=snapshot.execution_count,
            )
            _fill_durations(message.inference_stats, snapshot)
            for size, batch in snapshot.batches.items():
                _fill_durations(message.batch_stats.add(batch_size=size), batch)
            for index, responses in snapshot.responses.items():
                _fill_durations(message.response_stats[str(index)], responses)
        return response

    def _versions(self, name: str, version: str) -> Iterable[ServedVersion]:
        table = self._tables.table
        number = parse_version(version) if version else None
        if not name:
            return [served for model in table.all_models for served in model.versions.values()]
        model = table.models.get(name)
        if model is None or not model.versions:
            raise invalid_argument(f"requested model '{name}' is not available")
        if number is not None and number not in model.versions:
            raise invalid_argument(f"requested model version is not available for model '{name}'")
        return model.versions.values() if number is None else [model.versions[number]]

    def repository_index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        refuse_repository_name(request.repository_name)
        response = pb.RepositoryIndexResponse()
        for entry in self._repository.index(request.ready):
            response.models.add(
                name=encodable(entry.name), version=entry.version, state=entry.state, reason=self._shown(entry.reason)
            )
        return response

    async def overview(self, request: page_pb2.OverviewRequest) -> page_pb2.OverviewResponse:
        names = frozenset(request.names)
        # A screen shows fewer.
        if len(names) > 200:
            raise invalid_argument(f"expected at most 200 names of models, got {len(names)}")
        # For hundreds of models this takes long, and must not delay others.
        return await asyncio.to_thread(
            lambda: page_pb2.OverviewResponse(
                server=self._server_id,
                version=rocserve.__version__,
                ready=self._readiness.is_ready(),
                now_ms=time.time_ns() // 1_000_000,
                models=[self._model(row) for row in self._repository.index(ready_only=False, names=names)],
            )
        )

    def _model(self, row: IndexEntry) -> page_pb2.ModelOverview:
        overview = page_pb2.ModelOverview(
            name=encodable(row.name), version=row.version, state=row.state, reason=self._shown(row.reason)
        )
        overview.lacks_files = row.lacks_files
        overview.repository = encodable(row.repository)
        served = row.served
        if served is None:
            return overview
        numbers, properties = served.statistics.snapshot(), served.properties
        overview.platform = served.config.platform or served.config.backend
        overview.engine = encodable(properties.get("engine", ""))
        overview.devices = encodable(properties.get("devices", ""))
        overview.load_seconds = served.load_seconds
        overview.load_check = self._shown(served.load_check.text)
        overview.load_warning = self._shown(served.load_check.warning)
        overview.rejected_count = numbers.reject.count
        overview.pending_requests = served.pending_requests
        overview.last_inference_ms = numbers.last_inference_ms
        overview.success_count, overview.success_ns = numbers.success.count, numbers.success.ns
        overview.queue_ns = numbers.queue.ns
        overview.failure_count = numbers.fail.count
        overview.inference_count, overview.execution_count = numbers.inference_count, numbers.execution_count
        overview.cache_hit_count, overview.cache_miss_count = numbers.cache_hit.count, numbers.cache_miss.count
        for size, batch in numbers.batches.items():
            overview.batches[size] = batch.compute_infer.count
        for quantile, value in served.statistics.quantiles((0.5, 0.9, 0.99)).quantiles:
            if value == value:  # NaN: there was no request.
                overview.latencies_us.add(quantile=quantile, value=value)
        overview.worker_memory_bytes.extend(memory_bytes(pid) // models for pid, models in served.worker_pids.items())
        overview.worker_restarts = served.worker_restarts
        for time_ms, text in served.statistics.failures:
            overview.failures.add(time_ms=time_ms, text=self._shown(text))
        return overview

    async def load_report(self, request: page_pb2.LoadReportRequest) -> page_pb2.LoadReportResponse:
        version = parse_version(request.version) if request.version else None
        response, failure = await self._repository.load_report(request.name, version)
        if failure is not None:
            response.reason = self._shown(failure.error.text)
            response.traceback = self._shown(failure.error.trace)
            response.attempts, response.failed_ms = failure.attempts, failure.failed_ms
            response.waits_for_files = failure.waits_for_files
            if failure.retry_at is not None:
                response.retry_ms = int(1000 * (time.time() + failure.retry_at - time.monotonic()))
        return response

    async def ensemble_graph(self, request: page_pb2.EnsembleGraphRequest) -> page_pb2.EnsembleGraphResponse:
        version = parse_version(request.version) if request.version else None
        width = min(max(request.width, _LEAST_WIDTH), _MOST_WIDTH) if request.width else _USUAL_WIDTH
        return await self._repository.ensemble_drawing(request.name, version, width)

    async def events(self, request: page_pb2.RepositoryEventsRequest) -> page_pb2.RepositoryEventsResponse:
        events = self._repository.events
        response = page_pb2.RepositoryEventsResponse()
        for event in await events.after(request.after, 10.0):
            response.events.append(event)
            # The event stays as it is recorded.
            response.events[-1].reason = self._shown(event.reason)
        response.is_last = events.has_ended
        return response

    def _shown(self, text: str) -> str:
        return encodable(self._paths.hide(text))


def _ready(kind: Callable[..., Message], ready: Ready) -> Any:
    """Return the message, or a coroutine that returns it."""
    if isinstance(ready, bool):
        return kind(ready=ready)

    async def answer(ready: Coroutine[Any, Any, bool]) -> Message:
        return kind(ready=await ready)

    return answer(ready)


def _fill_durations(message: Message, counters: Statistics | BatchStatistics | ResponseStatistics) -> None:
    for name in (field.name for field in message.DESCRIPTOR.fields if field.message_type is not None):
        duration, counted = getattr(message, name), getattr(counters, name, Duration())
        # Set even at zero, so that clients that print the message always find every phase.
        duration.SetInParent()
        duration.count, duration.ns = counted.count, counted.ns
