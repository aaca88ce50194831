"""Describes every call of the service as data: the method, the request, and how to read the answer. Both clients use
these; they differ only in how they send a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol import model_config_pb2
from rocserve_client.connection import SERVICE
from rocserve_client.errors import InvalidArgument
from rocserve_client.messages import (
    Inputs,
    OneInput,
    Outputs,
    RequestOptions,
    decode_infer_response,
    decode_message,
    encode_infer_request,
)
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
from rocserve_client.tensors import cast_input

Answer = TypeVar("Answer")
Response = TypeVar("Response", bound=Message)

_SERVICE = f"/{SERVICE}"
STREAM_METHOD = f"{_SERVICE}/ModelStreamInfer"


@dataclass(frozen=True, slots=True)
class UnaryCall(Generic[Answer]):
    path: str
    request: bytes
    decode: Callable[[bytes], Answer]


def infer(model: str, inputs: Inputs, outputs: Outputs, options: RequestOptions) -> UnaryCall[InferResult]:
    request = encode_infer_request(model, inputs, outputs, options)
    return UnaryCall(f"{_SERVICE}/ModelInfer", request, decode_infer_response)


def described_inputs(metadata: ModelMetadata, inputs: Inputs | OneInput, cast: bool) -> Inputs:
    """Return the inputs by name, in the model's datatypes if they are to be cast. Raises InvalidArgument if a value
    without a name is for a model with several inputs, or if a value cannot be cast."""
    if not isinstance(inputs, Mapping):
        if len(metadata.inputs) != 1:
            names = ", ".join(entry.name for entry in metadata.inputs)
            raise InvalidArgument(
                f"model '{metadata.name}' has {len(metadata.inputs)} inputs; give them by their names, in a dict:"
                f" {names}"
            )
        inputs = {metadata.inputs[0].name: inputs}
    if not cast:
        return inputs
    datatypes = {entry.name: entry.datatype for entry in metadata.inputs}
    # The server refuses an input that it does not know, with the names of those that it does.
    return {
        name: cast_input(name, value, datatypes[name]) if name in datatypes else value for name, value in inputs.items()
    }


def with_cast_advice(error: InvalidArgument, cast: bool) -> InvalidArgument:
    """Return the error of a request; one about a datatype gets the advice to cast."""
    if cast or "data-type is '" not in error.text:
        return error
    return InvalidArgument(f"{error.text}; infer(..., cast=True) converts the inputs to the model's datatypes")


def server_live() -> UnaryCall[bool]:
    return _call(pb.ServerLiveRequest(), pb.ServerLiveResponse, lambda answer: answer.live)


def server_ready() -> UnaryCall[bool]:
    return _call(pb.ServerReadyRequest(), pb.ServerReadyResponse, lambda answer: answer.ready)


def model_ready(model: str, version: str) -> UnaryCall[bool]:
    request = pb.ModelReadyRequest(name=model, version=version)
    return _call(request, pb.ModelReadyResponse, lambda answer: answer.ready)


def server_metadata() -> UnaryCall[ServerMetadata]:
    def read(answer: pb.ServerMetadataResponse) -> ServerMetadata:
        return ServerMetadata(answer.name, answer.version, tuple(answer.extensions))

    return _call(pb.ServerMetadataRequest(), pb.ServerMetadataResponse, read)


def model_metadata(model: str, version: str) -> UnaryCall[ModelMetadata]:
    request = pb.ModelMetadataRequest(name=model, version=version)
    return _call(request, pb.ModelMetadataResponse, _read_model_metadata)


def model_config(model: str, version: str) -> UnaryCall[model_config_pb2.ModelConfig]:
    request = pb.ModelConfigRequest(name=model, version=version)
    return _call(request, pb.ModelConfigResponse, lambda answer: answer.config)


def statistics(model: str, version: str) -> UnaryCall[tuple[ModelStatistics, ...]]:
    request = pb.ModelStatisticsRequest(name=model, version=version)
    return _call(request, pb.ModelStatisticsResponse, lambda answer: tuple(map(_read_statistics, answer.model_stats)))


def repository_index(ready: bool) -> UnaryCall[tuple[IndexEntry, ...]]:
    def read(answer: pb.RepositoryIndexResponse) -> tuple[IndexEntry, ...]:
        return tuple(IndexEntry(entry.name, entry.version, entry.state, entry.reason) for entry in answer.models)

    return _call(pb.RepositoryIndexRequest(ready=ready), pb.RepositoryIndexResponse, read)


def load_model(
    model: str, config: str | None, files: Mapping[str, bytes] | None, version: str | int
) -> UnaryCall[None]:
    request = pb.RepositoryModelLoadRequest(model_name=model)
    if config is not None:
        request.parameters["config"].string_param = config
    for path, content in (files or {}).items():
        request.parameters[f"file:{path}"].bytes_param = content
    if version != "":
        request.parameters["version"].string_param = str(version)
    return _call(request, pb.RepositoryModelLoadResponse, lambda _: None)


def unload_model(model: str, unload_dependents: bool, version: str | int) -> UnaryCall[None]:
    request = pb.RepositoryModelUnloadRequest(model_name=model)
    if unload_dependents:
        request.parameters["unload_dependents"].bool_param = True
    if version != "":
        request.parameters["version"].string_param = str(version)
    return _call(request, pb.RepositoryModelUnloadResponse, lambda _: None)


def _call(request: Message, response: type[Response], read: Callable[[Response], Answer]) -> UnaryCall[Answer]:
    """Return a call with a small message as its answer. KServe v2 names a method's messages after the method."""
    method = response.DESCRIPTOR.name.removesuffix("Response")
    path = f"{_SERVICE}/{method}"
    return UnaryCall(path, request.SerializeToString(), lambda data: read(decode_message(data, response)))


def _read_model_metadata(answer: pb.ModelMetadataResponse) -> ModelMetadata:
    return ModelMetadata(
        name=answer.name,
        versions=tuple(answer.versions),
        platform=answer.platform,
        inputs=_read_tensors(answer.inputs),
        outputs=_read_tensors(answer.outputs),
        properties=dict(answer.properties),
    )


def _read_tensors(tensors: Iterable[pb.ModelMetadataResponse.TensorMetadata]) -> tuple[TensorMetadata, ...]:
    return tuple(TensorMetadata(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in tensors)


def _read_statistics(answer: pb.ModelStatistics) -> ModelStatistics:
    return ModelStatistics(
        name=answer.name,
        version=answer.version,
        last_inference_ms=answer.last_inference,
        inference_count=answer.inference_count,
        execution_count=answer.execution_count,
        batches=tuple(
            BatchStatistics(batch.batch_size, **_read_durations(batch, _OF_A_BATCH)) for batch in answer.batch_stats
        ),
        **_read_durations(answer.inference_stats, _OF_A_MODEL),
    )


_OF_A_BATCH = ("compute_input", "compute_infer", "compute_output")
_OF_A_MODEL = ("success", "fail", "queue", *_OF_A_BATCH, "cache_hit", "cache_miss")


def _read_durations(message: Message, names: Iterable[str]) -> dict[str, Duration]:
    durations = {name: getattr(message, name) for name in names}
    return {name: Duration(one.count, one.ns) for name, one in durations.items()}
