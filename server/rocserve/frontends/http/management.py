"""All that is asked over HTTP beside inference: URL and JSON to the message of a method, and its answer to JSON.

The methods themselves are those of gRPC (`services/methods.py`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rocserve.core.errors import internal, invalid_argument
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.errors import JSON, PLAIN
from rocserve.frontends.http.json_text import (
    MISSING,
    array,
    boolean,
    find,
    json_bytes,
    member,
    members,
    parse_json,
    text,
    unsigned,
)
from rocserve.frontends.http.protocol import Response
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol.json_form import plain_values


@dataclass(frozen=True, slots=True)
class Place:
    """All in plain form, not percent-encoded; empty what the URL does not have."""

    model: str = ""
    version: str = ""
    region: str = ""
    repository: str = ""


_TRACE_TEXTS = ("trace_rate", "trace_count", "log_frequency")
_LOG_FLAGS = ("log_info", "log_warning", "log_error")
_TRACE_ORDER = ("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file", "trace_mode")
_LOG_ORDER = ("log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format")


def trace_settings(place: Place, body: Buffer) -> pb.TraceSettingRequest:
    """A setting that is null is cleared, which gRPC says by none of its values; unknown ones are passed over."""
    message = pb.TraceSettingRequest(model_name=place.model)
    value = parse_json(body)
    given = value if isinstance(value, dict) else {}
    for name in ("trace_file", "trace_level", *_TRACE_TEXTS):
        if name not in given:
            continue
        entry = given[name]
        # Reading a missing key of a map of messages makes the entry.
        values = message.settings[name].value
        if name == "trace_file":
            values.append(entry if isinstance(entry, str) else "")
        elif entry is not None:
            values.extend([text(level) for level in array(entry)] if name == "trace_level" else [text(entry)])
    return message


def told_trace_settings(response: pb.TraceSettingResponse) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name in _ordered(_TRACE_ORDER, response.settings):
        values = list(response.settings[name].value)
        told[name] = values if name == "trace_level" else "".join(values[:1])
    return told


def log_settings(place: Place, body: Buffer) -> pb.LogSettingsRequest:
    """Settings that are null stay as they are; unknown ones are passed over."""
    message = pb.LogSettingsRequest()
    value = parse_json(body)
    given = value if isinstance(value, dict) else {}
    for name in _LOG_ORDER:
        entry = given.get(name)
        if entry is None:
            continue
        setting = message.settings[name]
        if name in _LOG_FLAGS:
            setting.bool_param = boolean(entry)
        elif name == "log_verbose_level":
            setting.uint32_param = unsigned(entry) & 0xFFFF_FFFF
        else:
            setting.string_param = text(entry)
    return message


def told_log_settings(response: pb.LogSettingsResponse) -> dict[str, Any]:
    settings = response.settings
    names = _ordered(_LOG_ORDER, settings)
    return {
        name: getattr(settings[name], settings[name].WhichOneof("parameter_choice") or "string_param") for name in names
    }


def _ordered(first: tuple[str, ...], found: Any) -> list[str]:
    """The names that are there, those in `first` in that order."""
    return [name for name in first if name in found] + sorted(name for name in found if name not in first)


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
    """Of errors too."""
    is_health: bool = False
    """What is told is whether something holds, which the status says too."""


def nothing(response: Any) -> None:
    """Is told."""


def health_response(told: dict[str, bool], place: Place) -> Response:
    """Open Inference's body, with Triton's status."""
    holds = all(told.values())
    body = {"name": place.model, **told} if place.model else told
    if place.model and not holds:
        body = {**body, "error": "Model version not ready"}
    return Response(200 if holds else 400, json_bytes(body), JSON)


def _told_health(response: Any) -> dict[str, bool]:
    return {field.name: bool(getattr(response, field.name)) for field in response.DESCRIPTOR.fields}


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


def by_url(
    method: str, verbs: frozenset[str], answer: Callable[[Any], Any], content_type: str = JSON, **fields: str
) -> ManagementRoute:
    """A method whose request says what the URL does; `fields`: the request's, by their names in `Place`."""
    request = getattr(pb, f"{method}Request")

    def of(place: Place, body: Buffer) -> Any:
        return request(**{field: getattr(place, name) for field, name in fields.items()})

    return ManagementRoute(method, verbs, of, answer, content_type)


def _health(method: str, **fields: str) -> ManagementRoute:
    return replace(by_url(method, GET_OR_HEAD, _told_health, PLAIN, **fields), is_health=True)


_VERSION = {"name": "model", "version": "version"}
LIVE = _health("ServerLive")
READY = _health("ServerReady")
SERVER_METADATA = by_url("ServerMetadata", GET, plain_values)
MODEL_READY = _health("ModelReady", **_VERSION)
MODEL_METADATA = by_url("ModelMetadata", GET, _model_metadata, **_VERSION)
MODEL_CONFIG = by_url("ModelConfig", GET, _model_config, **_VERSION)
MODEL_STATISTICS = by_url("ModelStatistics", GET, plain_values, **_VERSION)
INDEX = ManagementRoute("RepositoryIndex", POST, _index_request, _index)
LOAD = ManagementRoute("RepositoryModelLoad", POST, _load_request, nothing)
UNLOAD = ManagementRoute("RepositoryModelUnload", POST, _unload_request, nothing)
SHARED_MEMORY = {
    ("system", "status"): by_url("SystemSharedMemoryStatus", GET, _regions, name="region"),
    ("system", "register"): ManagementRoute("SystemSharedMemoryRegister", POST, _system_register_request, nothing),
    ("system", "unregister"): by_url("SystemSharedMemoryUnregister", POST, nothing, name="region"),
    ("cuda", "status"): by_url("CudaSharedMemoryStatus", GET, _regions, name="region"),
    ("cuda", "register"): ManagementRoute("CudaSharedMemoryRegister", POST, _cuda_register_request, nothing),
    ("cuda", "unregister"): by_url("CudaSharedMemoryUnregister", POST, nothing, name="region"),
}
TRACE = {
    "GET": by_url("TraceSetting", GET_OR_POST, told_trace_settings, model_name="model"),
    "POST": ManagementRoute("TraceSetting", GET_OR_POST, trace_settings, told_trace_settings),
}
LOGGING = {
    "GET": by_url("LogSettings", GET_OR_POST, told_log_settings),
    "POST": ManagementRoute("LogSettings", GET_OR_POST, log_settings, told_log_settings),
}
