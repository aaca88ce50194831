"""The methods that only read: liveness, readiness, metadata, configuration, statistics, the index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from google.protobuf.message import Message

import rocserve
from rocserve.core.errors import ServeError, invalid_argument, unimplemented
from rocserve.core.model_config import InputConfig, OutputConfig
from rocserve.core.printable import encodable
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.serving import ServedVersion, ServingTableHolder, parse_version
from rocserve.core.statistics import BatchStatistics, Duration, ResponseStatistics, StatisticsSnapshot
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.repository.model_repository import ModelRepository


class Readiness:
    """Read from any thread; `begin_exit` is called on the loop."""

    def __init__(self, is_repository_ready: Callable[[], bool]) -> None:
        self._is_repository_ready = is_repository_ready
        self.is_exiting = False

    def is_ready(self) -> bool:
        return not self.is_exiting and self._is_repository_ready()

    def begin_exit(self) -> None:
        """Not ready from now on, nor are the models."""
        self.is_exiting = True


EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
    # Workers of AMD Inference Server: its clients look here for those that they may load.
    "migraphx",
    "rocal",
)


class QueryService:
    """Each method takes a request and gives its answer; safe on any thread.

    Raises:
        ServeError: with Triton's codes and words.
    """

    def __init__(
        self,
        tables: ServingTableHolder,
        repository: ModelRepository,
        server_id: str,
        readiness: Readiness,
        paths: PrivatePaths,
    ) -> None:
        """`paths`: takes those of the server out of reasons and properties."""
        self._tables = tables
        self._repository = repository
        self._server_id = server_id
        self._readiness = readiness
        self._paths = paths

    def server_live(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    def server_ready(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._readiness.is_ready())

    def model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        if request.version:
            parse_version(request.version)
        try:
            self._tables.table.find(request.name, request.version)
        except ServeError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=not self._readiness.is_exiting)

    def server_metadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name=self._server_id, version=rocserve.__version__, extensions=EXTENSIONS)

    def model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        version = self._tables.table.find(request.name, request.version)
        model = self._tables.table.models[request.name]
        numbers = [version.version] if request.version else sorted(model.versions)
        properties = {name: self._paths.hide(text) for name, text in version.properties.items()}
        return _metadata(version, numbers, properties)

    def model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        version = self._tables.table.find(request.name, request.version)
        response = pb.ModelConfigResponse()
        response.config.ParseFromString(version.config_message)
        return response

    def model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        response = pb.ModelStatisticsResponse()
        for version in self._versions(request.name, request.version):
            _fill_statistics(response.model_stats.add(), version.name, version.version, version.statistics.snapshot())
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
        if request.repository_name:
            raise unimplemented("'repository_name' specification is not supported")
        response = pb.RepositoryIndexResponse()
        for entry in self._repository.index(request.ready):
            reason = encodable(self._paths.hide(entry.reason))
            response.models.add(name=encodable(entry.name), version=entry.version, state=entry.state, reason=reason)
        return response


def _metadata(
    version: ServedVersion, versions: Iterable[int], properties: Mapping[str, str]
) -> pb.ModelMetadataResponse:
    config = version.config
    lead = [-1] if config.max_batch_size > 0 else []

    def tensor(entry: InputConfig | OutputConfig) -> pb.ModelMetadataResponse.TensorMetadata:
        return pb.ModelMetadataResponse.TensorMetadata(
            name=entry.name, datatype=entry.datatype.value, shape=[*lead, *entry.dims]
        )

    return pb.ModelMetadataResponse(
        name=config.name,
        versions=[str(version) for version in versions],
        platform=config.platform or config.backend,
        inputs=[tensor(entry) for entry in config.inputs],
        outputs=[tensor(entry) for entry in config.outputs],
        properties=properties,
    )


def _fill_statistics(message: pb.ModelStatistics, name: str, version: int, snapshot: StatisticsSnapshot) -> None:
    message.name = name
    message.version = str(version)
    message.last_inference = snapshot.last_inference_ms
    message.inference_count = snapshot.inference_count
    message.execution_count = snapshot.execution_count
    _fill_durations(message.inference_stats, snapshot)
    for size, batch in snapshot.batches.items():
        _fill_durations(message.batch_stats.add(batch_size=size), batch)
    for index, responses in snapshot.responses.items():
        _fill_durations(message.response_stats[str(index)], responses)


def _fill_durations(message: Message, counters: StatisticsSnapshot | BatchStatistics | ResponseStatistics) -> None:
    """The durations of a message, from those of the same names."""
    for name in (field.name for field in message.DESCRIPTOR.fields if field.message_type is not None):
        duration, counted = getattr(message, name), getattr(counters, name, Duration())
        # Set even at zero, so that clients that print the message always find every phase.
        duration.SetInParent()
        duration.count, duration.ns = counted.count, counted.ns
