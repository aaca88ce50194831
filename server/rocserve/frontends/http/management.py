"""All that is asked over HTTP beside inference: URL and JSON to the message of a method, and its answer to JSON.

The methods themselves are those of gRPC (`services/methods.py`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rocserve.core.errors import internal, invalid_argument
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.errors import JSON, PLAIN, HttpError
from rocserve.frontends.http.json_text import parse_json
from rocserve.frontends.http.json_values import MISSING, boolean, find, member, members, text, unsigned
from rocserve.frontends.http.places import Place
from rocserve.frontends.http.setting_values import log_settings, told_log_settings, told_trace_settings, trace_settings
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol.json_form import plain_values

GET = frozenset({"GET"})
GET_OR_HEAD = frozenset({"GET", "HEAD"})
POST = frozenset({"POST"})
GET_OR_POST = frozenset({"GET", "POST"})


@dataclass(frozen=True, slots=True)
class ManagementRoute:
    """A method of gRPC under its URL."""

    method: str
    verbs: frozenset[str]
    request: Callable[[Place, Buffer], Any]
    """From the URL and a POST's body to the method's request."""
    answer: Callable[[Any], Any]
    """From the method's response to what is told as JSON, or as it is when it is bytes; None = nothing is told.

    Raises:
        HttpError: the response is told by an HTTP status.
    """
    content_type: str = JSON


def _nothing(response: Any) -> None:
    return None


def _live(response: pb.ServerLiveResponse) -> None:
    _check(response.live)


def _ready(response: pb.ServerReadyResponse) -> None:
    _check(response.ready)


def _model_ready(response: pb.ModelReadyResponse) -> None:
    _check(response.ready, "Model version not ready")


def _check(holds: bool, text: str = "") -> None:
    if not holds:
        raise HttpError(400, text)


def _server_metadata(response: pb.ServerMetadataResponse) -> Any:
    return plain_values(response)


def _model_metadata(response: pb.ModelMetadataResponse) -> Any:
    told = plain_values(response)
    if not told["properties"]:
        del told["properties"]
    return told


def _model_config(response: pb.ModelConfigResponse) -> Any:
    return plain_values(response.config)


def _index_request(place: Place, body: Buffer) -> pb.RepositoryIndexRequest:
    # As in Triton a repository in the URL says nothing.
    ready = find(parse_json(body), "ready") if body else MISSING
    return pb.RepositoryIndexRequest(ready=ready is not MISSING and boolean(ready))


def _index(response: pb.RepositoryIndexResponse) -> Any:
    return [{name: value for name, value in plain_values(row).items() if value} for row in response.models]


def _load_request(place: Place, body: Buffer) -> pb.RepositoryModelLoadRequest:
    message = pb.RepositoryModelLoadRequest(repository_name=place.repository, model_name=place.model)
    parameters = find(parse_json(body), "parameters") if body and not place.repository else MISSING
    given = {} if parameters is MISSING else members(parameters)
    for name, entry in given.items():
        value = text(entry)
        if name == "config":
            message.parameters[name].string_param = value
        elif name.startswith("file:"):
            message.parameters[name].bytes_param = _decoded(name, value)
        else:
            raise internal("unexpected error on creating Triton parameter")
    return message


def _unload_request(place: Place, body: Buffer) -> pb.RepositoryModelUnloadRequest:
    message = pb.RepositoryModelUnloadRequest(repository_name=place.repository, model_name=place.model)
    dependents = find(find(parse_json(body), "parameters"), "unload_dependents") if body else MISSING
    if dependents is not MISSING:
        value = boolean(dependents, "Unable to parse 'unload_dependents'")
        message.parameters["unload_dependents"].bool_param = value
    return message


def _system_register_request(place: Place, body: Buffer) -> pb.SystemSharedMemoryRegisterRequest:
    _check_region(place.region, "system")
    value = parse_json(body)
    key, offset, size = find(value, "key"), find(value, "offset"), find(value, "byte_size")
    if key is MISSING:
        raise invalid_argument("Shared memory register request has no 'key' field")
    message = pb.SystemSharedMemoryRegisterRequest(name=place.region, key=text(key))
    if offset is not MISSING:
        message.offset = unsigned(offset)
    if size is MISSING:
        raise invalid_argument("Shared memory register request has no 'byte_size' field")
    message.byte_size = unsigned(size)
    return message


def _cuda_register_request(place: Place, body: Buffer) -> pb.CudaSharedMemoryRegisterRequest:
    _check_region(place.region, "cuda")
    value = parse_json(body)
    handle = find(value, "raw_handle")
    if handle is MISSING:
        raise invalid_argument("Shared memory register request has no 'raw_handle' field")
    return pb.CudaSharedMemoryRegisterRequest(
        name=place.region,
        raw_handle=_decoded("raw_handle", text(member(handle, "b64"))),
        byte_size=unsigned(member(value, "byte_size")),
        device_id=unsigned(member(value, "device_id")) & 0x7FFF_FFFF,
    )


def _check_region(region: str, kind: str) -> None:
    if not region:
        raise invalid_argument(f"'region name' is necessary to register {kind} shared memory region")


def _regions(response: pb.SystemSharedMemoryStatusResponse | pb.CudaSharedMemoryStatusResponse) -> Any:
    return [plain_values(response.regions[name]) for name in sorted(response.regions)]


def _decoded(name: str, value: str) -> bytes:
    try:
        # What should stand at the end may be missing.
        return base64.b64decode(value + "===")
    except (binascii.Error, ValueError) as error:
        raise invalid_argument(f"the value of '{name}' is not valid base64: {error}") from None


def _trace_request(place: Place, body: Buffer) -> pb.TraceSettingRequest:
    return trace_settings(place.model, parse_json(body))


def _log_request(place: Place, body: Buffer) -> pb.LogSettingsRequest:
    return log_settings(parse_json(body))


LIVE = ManagementRoute("ServerLive", GET_OR_HEAD, lambda place, body: pb.ServerLiveRequest(), _live, PLAIN)
READY = ManagementRoute("ServerReady", GET_OR_HEAD, lambda place, body: pb.ServerReadyRequest(), _ready, PLAIN)
SERVER_METADATA = ManagementRoute(
    "ServerMetadata", GET, lambda place, body: pb.ServerMetadataRequest(), _server_metadata
)
MODEL_READY = ManagementRoute(
    "ModelReady",
    GET_OR_HEAD,
    lambda place, body: pb.ModelReadyRequest(name=place.model, version=place.version),
    _model_ready,
    PLAIN,
)
MODEL_METADATA = ManagementRoute(
    "ModelMetadata",
    GET,
    lambda place, body: pb.ModelMetadataRequest(name=place.model, version=place.version),
    _model_metadata,
)
MODEL_CONFIG = ManagementRoute(
    "ModelConfig",
    GET,
    lambda place, body: pb.ModelConfigRequest(name=place.model, version=place.version),
    _model_config,
)
MODEL_STATISTICS = ManagementRoute(
    "ModelStatistics",
    GET,
    lambda place, body: pb.ModelStatisticsRequest(name=place.model, version=place.version),
    plain_values,
)
INDEX = ManagementRoute("RepositoryIndex", POST, _index_request, _index)
LOAD = ManagementRoute("RepositoryModelLoad", POST, _load_request, _nothing)
UNLOAD = ManagementRoute("RepositoryModelUnload", POST, _unload_request, _nothing)
SHARED_MEMORY = {
    ("system", "status"): ManagementRoute(
        "SystemSharedMemoryStatus",
        GET,
        lambda place, body: pb.SystemSharedMemoryStatusRequest(name=place.region),
        _regions,
    ),
    ("system", "register"): ManagementRoute("SystemSharedMemoryRegister", POST, _system_register_request, _nothing),
    ("system", "unregister"): ManagementRoute(
        "SystemSharedMemoryUnregister",
        POST,
        lambda place, body: pb.SystemSharedMemoryUnregisterRequest(name=place.region),
        _nothing,
    ),
    ("cuda", "status"): ManagementRoute(
        "CudaSharedMemoryStatus",
        GET,
        lambda place, body: pb.CudaSharedMemoryStatusRequest(name=place.region),
        _regions,
    ),
    ("cuda", "register"): ManagementRoute("CudaSharedMemoryRegister", POST, _cuda_register_request, _nothing),
    ("cuda", "unregister"): ManagementRoute(
        "CudaSharedMemoryUnregister",
        POST,
        lambda place, body: pb.CudaSharedMemoryUnregisterRequest(name=place.region),
        _nothing,
    ),
}
TRACE = {
    "GET": ManagementRoute(
        "TraceSetting",
        GET_OR_POST,
        lambda place, body: pb.TraceSettingRequest(model_name=place.model),
        told_trace_settings,
    ),
    "POST": ManagementRoute("TraceSetting", GET_OR_POST, _trace_request, told_trace_settings),
}
LOGGING = {
    "GET": ManagementRoute("LogSettings", GET_OR_POST, lambda place, body: pb.LogSettingsRequest(), told_log_settings),
    "POST": ManagementRoute("LogSettings", GET_OR_POST, _log_request, told_log_settings),
}
