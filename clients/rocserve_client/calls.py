"""Every call of the service as data: its method, its request and how its answer is read.

The sync and the asyncio client differ only in how they carry such a call to the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rocserve.protocol import grpc_service_pb2, model_config_pb2

from rocserve_client.messages import Inputs, Outputs, RequestOptions, decode_infer_response, encode_infer_request
from rocserve_client.results import (
    BatchStatistics,
    Duration,
    IndexEntry,
    InferResult,
    ModelMetadata,
    ModelStatistics,
    ServerMetadata,
    TensorMetadata,
)

Answer = TypeVar("Answer")

_SERVICE = "/inference.GRPCInferenceService"
STREAM_METHOD = f"{_SERVICE}/ModelStreamInfer"


@dataclass(frozen=True, slots=True)
class UnaryCall(Generic[Answer]):
    path: str
    request: bytes
    decode: Callable[[bytes], Answer]


def infer(model: str, inputs: Inputs, outputs: Outputs, options: RequestOptions) -> UnaryCall[InferResult]:
    request = encode_infer_request(model, inputs, outputs, options)
    return UnaryCall(f"{_SERVICE}/ModelInfer", request, decode_infer_response)


def server_live() -> UnaryCall[bool]:
    return _call("ServerLive", grpc_service_pb2.ServerLiveRequest(), lambda answer: bool(answer.live))


def server_ready() -> UnaryCall[bool]:
    return _call("ServerReady", grpc_service_pb2.ServerReadyRequest(), lambda answer: bool(answer.ready))


def model_ready(model: str, version: str) -> UnaryCall[bool]:
    request = grpc_service_pb2.ModelReadyRequest(name=model, version=version)
    return _call("ModelReady", request, lambda answer: bool(answer.ready))


def server_metadata() -> UnaryCall[ServerMetadata]:
    return _call(
        "ServerMetadata",
        grpc_service_pb2.ServerMetadataRequest(),
        lambda answer: ServerMetadata(answer.name, answer.version, tuple(answer.extensions)),
    )


def model_metadata(model: str, version: str) -> UnaryCall[ModelMetadata]:
    request = grpc_service_pb2.ModelMetadataRequest(name=model, version=version)
    return _call("ModelMetadata", request, _read_model_metadata)


def model_config(model: str, version: str) -> UnaryCall[model_config_pb2.ModelConfig]:
    request = grpc_service_pb2.ModelConfigRequest(name=model, version=version)
    return _call("ModelConfig", request, _read_model_config)


def statistics(model: str, version: str) -> UnaryCall[tuple[ModelStatistics, ...]]:
    request = grpc_service_pb2.ModelStatisticsRequest(name=model, version=version)
    return _call("ModelStatistics", request, lambda answer: tuple(map(_read_statistics, answer.model_stats)))


def repository_index(ready: bool) -> UnaryCall[tuple[IndexEntry, ...]]:
    return _call(
        "RepositoryIndex",
        grpc_service_pb2.RepositoryIndexRequest(ready=ready),
        lambda answer: tuple(IndexEntry(m.name, m.version, m.state, m.reason) for m in answer.models),
    )


def load_model(model: str, config: str | None, files: Mapping[str, bytes] | None) -> UnaryCall[None]:
    request = grpc_service_pb2.RepositoryModelLoadRequest(model_name=model)
    if config is not None:
        request.parameters["config"].string_param = config
    for path, content in (files or {}).items():
        request.parameters[f"file:{path}"].bytes_param = content
    return _call("RepositoryModelLoad", request, _read_nothing)


def unload_model(model: str, unload_dependents: bool) -> UnaryCall[None]:
    request = grpc_service_pb2.RepositoryModelUnloadRequest(model_name=model)
    if unload_dependents:
        request.parameters["unload_dependents"].bool_param = True
    return _call("RepositoryModelUnload", request, _read_nothing)


def _call(method: str, request: Any, read: Callable[[Any], Answer]) -> UnaryCall[Answer]:
    """A call whose answer is a small message, named after its method as KServe v2 names them all."""
    message = getattr(grpc_service_pb2, f"{method}Response")
    return UnaryCall(f"{_SERVICE}/{method}", request.SerializeToString(), lambda data: read(message.FromString(data)))


def _read_nothing(_: Any) -> None:
    return None


def _read_model_config(answer: Any) -> model_config_pb2.ModelConfig:
    config: model_config_pb2.ModelConfig = answer.config
    return config


def _read_model_metadata(answer: Any) -> ModelMetadata:
    return ModelMetadata(
        name=answer.name,
        versions=tuple(answer.versions),
        platform=answer.platform,
        inputs=_read_tensors(answer.inputs),
        outputs=_read_tensors(answer.outputs),
    )


def _read_tensors(tensors: Any) -> tuple[TensorMetadata, ...]:
    return tuple(TensorMetadata(t.name, t.datatype, tuple(t.shape)) for t in tensors)


def _read_statistics(answer: Any) -> ModelStatistics:
    stats = answer.inference_stats
    return ModelStatistics(
        name=answer.name,
        version=answer.version,
        last_inference_ms=answer.last_inference,
        inference_count=answer.inference_count,
        execution_count=answer.execution_count,
        success=_read_duration(stats.success),
        fail=_read_duration(stats.fail),
        queue=_read_duration(stats.queue),
        compute_input=_read_duration(stats.compute_input),
        compute_infer=_read_duration(stats.compute_infer),
        compute_output=_read_duration(stats.compute_output),
        cache_hit=_read_duration(stats.cache_hit),
        cache_miss=_read_duration(stats.cache_miss),
        batches=tuple(
            BatchStatistics(
                batch_size=batch.batch_size,
                compute_input=_read_duration(batch.compute_input),
                compute_infer=_read_duration(batch.compute_infer),
                compute_output=_read_duration(batch.compute_output),
            )
            for batch in answer.batch_stats
        ),
    )


def _read_duration(duration: Any) -> Duration:
    return Duration(duration.count, duration.ns)
