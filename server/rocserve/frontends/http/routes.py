"""Routes URLs to inference and to the methods of gRPC, turns JSON bodies into messages, and the methods' responses into
JSON.

The methods are those of `services/methods.py`. A reader of a body completes a message that already has the fields of
the URL. Readers raise ServeErrors in Triton's words.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from rocserve.core.errors import internal, invalid_argument
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.json_text import (
    MISSING,
    array,
    boolean,
    checked_text,
    find,
    json_bytes,
    member,
    members,
    parse_json,
    shown_json,
    text,
    unsigned,
)
from rocserve.frontends.http.request import JSON, PLAIN, HttpError, Response, path_of
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol.json_form import plain_values
from rocserve.protocol.parameters import write_parameters
from rocserve.repository.content import UNLOAD_DEPENDENTS, VERSION

GET = frozenset({"GET"})
GET_OR_HEAD = frozenset({"GET", "HEAD"})
POST = frozenset({"POST"})
GET_OR_POST = frozenset({"GET", "POST"})


# Settings, in Triton's order.
_TRACE_TEXTS = ("trace_rate", "trace_count", "log_frequency")
_LOG_ORDER: dict[str, tuple[str, Callable[[Any], bool | int | str]]] = {
    "log_file": ("string_param", text),
    "log_info": ("bool_param", boolean),
    "log_warning": ("bool_param", boolean),
    "log_error": ("bool_param", boolean),
    "log_verbose_level": ("uint32_param", lambda value: unsigned(value) & 0xFFFF_FFFF),
    "log_format": ("string_param", text),
}


def read_trace_settings(message: pb.TraceSettingRequest, body: Buffer) -> None:
    """Read trace settings. null clears a setting (in gRPC: no values; trace_file: ""). Unknown settings are ignored."""
    given = parse_json(body)
    for name in ("trace_file", "trace_level", *_TRACE_TEXTS):
        entry = find(given, name)
        if entry is MISSING:
            continue
        # Reading a missing key of a map of messages creates the entry.
        values = message.settings[name].value
        if name == "trace_file":
            values.append(entry if isinstance(entry, str) else "")
        elif entry is not None:
            values.extend([text(level) for level in array(entry)] if name == "trace_level" else [text(entry)])


def trace_settings_json(response: pb.TraceSettingResponse) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name in _ordered(("trace_level", *_TRACE_TEXTS, "trace_file", "trace_mode"), response.settings):
        values = list(response.settings[name].value)
        shown[name] = values if name == "trace_level" else "".join(values[:1])
    return shown


def read_log_settings(message: pb.LogSettingsRequest, body: Buffer) -> None:
    """Read log settings. null leaves a setting unchanged. Unknown settings are ignored."""
    given = parse_json(body)
    for name, (field, read) in _LOG_ORDER.items():
        entry = find(given, name)
        if entry is not MISSING and entry is not None:
            setattr(message.settings[name], field, read(entry))


def log_settings_json(response: pb.LogSettingsResponse) -> dict[str, Any]:
    settings = response.settings
    names = _ordered(_LOG_ORDER, settings)
    return {
        name: getattr(settings[name], settings[name].WhichOneof("parameter_choice") or "string_param") for name in names
    }


def _ordered(first: Any, found: Any) -> list[str]:
    """Return the names in `found`: first those of `first`, in its order, then the others, sorted."""
    return [name for name in first if name in found] + sorted(name for name in found if name not in first)


# Responses, as values for JSON, or as bytes to send unchanged.


def health_response(response: Any, model_name: str) -> Response:
    """Return Open Inference's body with Triton's status. `model_name`: "" for the server."""
    health = {field.name: bool(getattr(response, field.name)) for field in response.DESCRIPTOR.fields}
    holds = all(health.values())
    body: dict[str, str | bool] = {"name": model_name, **health} if model_name else dict(health)
    if model_name and not holds:
        body["error"] = "Model version not ready"
    return Response(200 if holds else 400, json_bytes(body), JSON)


def metadata_json(response: pb.ModelMetadataResponse) -> Any:
    values = plain_values(response)
    if not values["properties"]:
        del values["properties"]
    return values


def _regions_json(response: pb.SystemSharedMemoryStatusResponse | pb.CudaSharedMemoryStatusResponse) -> Any:
    return [plain_values(response.regions[name]) for name in sorted(response.regions)]


def hardware_json(response: pb.HasHardwareResponse) -> None:
    if not response.found:
        raise HttpError(404, "the server does not have that much of the hardware")


# Requests.


def read_index(message: pb.RepositoryIndexRequest, body: Buffer) -> None:
    ready = find(parse_json(body), "ready") if body else MISSING
    message.ready = ready is not MISSING and boolean(ready)


def read_load(message: pb.RepositoryModelLoadRequest, body: Buffer) -> None:
    parameters = _parameters(body) if not message.repository_name else MISSING
    given = {} if parameters is MISSING else members(parameters)
    for name, entry in given.items():
        name = checked_text(name)
        if name == VERSION:
            message.parameters[name].string_param = _version(entry)
            continue
        value = text(entry)
        if name == "config":
            message.parameters[name].string_param = value
        elif name.startswith("file:"):
            message.parameters[name].bytes_param = _decoded(name, value)
        else:
            raise internal("unexpected error on creating Triton parameter")


def read_unload(message: pb.RepositoryModelUnloadRequest, body: Buffer) -> None:
    parameters = _parameters(body)
    for name, entry in {} if parameters is MISSING else members(parameters).items():
        # The method refuses unknown names.
        parameter = message.parameters[checked_text(name)]
        if name == VERSION:
            parameter.string_param = _version(entry)
        elif name == UNLOAD_DEPENDENTS:
            parameter.bool_param = boolean(entry, f"Unable to parse '{name}'")


def _parameters(body: Buffer) -> object:
    """Return the parameters of a load or unload. Raises ServeError for a version outside of them, because the request
    would be one for the whole model."""
    given = parse_json(body) if body else MISSING
    if find(given, VERSION) is not MISSING:
        raise invalid_argument(f'expected {{"parameters": {{"{VERSION}": ...}}}}, got \'{VERSION}\' outside of it')
    return find(given, "parameters")


def _version(entry: object) -> str:
    """Return a version that JSON has as a number or as text. Triton has no such parameter."""
    if type(entry) not in (int, str):
        raise invalid_argument(
            f"expected parameter '{VERSION}' as a number, such as 2 or \"2\", got {shown_json(entry)}"
        )
    return checked_text(str(entry))


def read_system_region(message: pb.SystemSharedMemoryRegisterRequest, body: Buffer) -> None:
    value = _region(message.name, "system", body)
    for name, read in (("key", text), ("offset", unsigned), ("byte_size", unsigned)):
        entry = find(value, name)
        if entry is not MISSING:
            setattr(message, name, read(entry))
        elif name != "offset":
            raise invalid_argument(f"Shared memory register request has no '{name}' field")


def read_cuda_region(message: pb.CudaSharedMemoryRegisterRequest, body: Buffer) -> None:
    value = _region(message.name, "cuda", body)
    handle = find(value, "raw_handle")
    if handle is MISSING:
        raise invalid_argument("Shared memory register request has no 'raw_handle' field")
    message.raw_handle = _decoded("raw_handle", text(member(handle, "b64")))
    message.byte_size = unsigned(member(value, "byte_size"))
    message.device_id = unsigned(member(value, "device_id")) & 0x7FFF_FFFF


def _region(name: str, kind: str, body: Buffer) -> Any:
    if not name:
        raise invalid_argument(f"'region name' is necessary to register {kind} shared memory region")
    return parse_json(body)


def _decoded(name: str, value: str) -> bytes:
    try:
        # The padding at the end may be missing.
        return base64.b64decode(value + "===")
    except (binascii.Error, ValueError) as error:
        raise invalid_argument(f"the value of '{name}' is not valid base64: {error}") from None


# For AMD Inference Server.


def read_parameters(message: pb.ModelLoadRequest | pb.WorkerLoadRequest, body: Buffer) -> None:
    """Read parameters, which are the members of the body itself."""
    given = members(parse_json(body)) if body else {}
    for name, value in given.items():
        if not isinstance(value, bool | int | float | str):
            raise invalid_argument(f"parameter '{name}' must be a boolean, a number or a text, got {value!r}")
        for part in (name, value):
            if isinstance(part, str):
                checked_text(part)
    write_parameters(dict(given), message.parameters)


def read_hardware(message: pb.HasHardwareRequest, body: Buffer) -> None:
    value = parse_json(body)
    name, count = find(value, "name"), find(value, "num")
    message.name = "" if name is MISSING else text(name)
    message.num = 1 if count is MISSING else min(unsigned(count), 0xFFFF_FFFF)


@dataclass(frozen=True, slots=True)
class Route:
    """Gives a method of gRPC a URL."""

    url: str
    """Parts in brackets are optional. A name in braces is a field of the method's request; `{}` is any segment."""
    method: str
    verbs: frozenset[str] = GET
    to_json: Callable[..., Any] | None = plain_values
    """Turns the response into a value for JSON, or into bytes; None = no body. May raise HttpError as the answer."""
    read: Callable[[Any, Buffer], None] | None = None
    """Completes the method's request with a POST's body; None = the URL has everything. Raises ServeError."""
    content_type: str = JSON
    """The content type of answers."""
    shows: tuple[str, ...] = ()
    """Further methods whose answers are in this one. Clients that may not call all of them may not call this either."""

    def request(self, fields: Mapping[str, str], body: Buffer | None) -> Any:
        """Return the method's request. `body`: the body of a POST; None = another verb. Raises ServeError."""
        message = getattr(pb, f"{self.method}Request")(**fields)
        if self.read is not None and body is not None:
            self.read(message, body)
        return message


_MODEL = "/v2/models/{name}[/versions/{version}]"
_REPOSITORY = "/v2/repository[/{repository_name}]/models/{model_name}"
_LOADED_VERSION = "/v2/repository/models/{name}/versions/{version}"
_WORKER = "/v2/workers/{name}"
_SYSTEM_REGION = "/v2/systemsharedmemory[/region/{name}]"
_CUDA_REGION = "/v2/cudasharedmemory[/region/{name}]"

INFER = Route(f"{_MODEL}/infer", "ModelInfer", POST)
GENERATE = Route(f"{_MODEL}/generate", "ModelInfer", POST)
GENERATE_STREAM = Route(f"{_MODEL}/generate_stream", "ModelInfer", POST)
EMBED = Route("/v1/embeddings", "ModelInfer", POST)
RERANK = Route("/v1/rerank", "ModelInfer", POST)
RERANK_2 = Route("/v2/rerank", "ModelInfer", POST)
"""Of version 2 of Cohere's API; the same call."""
PREDICT = Route("/v1/models/{name}[/versions/{version}]:predict", "ModelInfer", POST)
"""Of TensorFlow Serving and KServe's protocol v1."""
MODELS_V1 = Route("/v1/models", "ModelInfer", shows=("ModelMetadata",))
MODEL_V1 = Route("/v1/models/{name}", "ModelInfer", shows=("ModelMetadata",))
"""Of OpenAI's API, TensorFlow Serving and KServe's protocol v1."""
VERSION_V1 = Route("/v1/models/{name}/versions/{version}", "ModelInfer", shows=("ModelMetadata",))
ROUTES = (
    INFER,
    GENERATE,
    GENERATE_STREAM,
    EMBED,
    RERANK,
    RERANK_2,
    PREDICT,
    MODELS_V1,
    MODEL_V1,
    VERSION_V1,
    Route("/v2", "ServerMetadata"),
    Route("/v2/health/live", "ServerLive", GET_OR_HEAD, health_response),
    Route("/v2/health/ready", "ServerReady", GET_OR_HEAD, health_response),
    Route("/v2/models/stats", "ModelStatistics"),
    Route(_MODEL, "ModelMetadata", to_json=metadata_json),
    Route(f"{_MODEL}/ready", "ModelReady", GET_OR_HEAD, health_response),
    Route(f"{_MODEL}/config", "ModelConfig", to_json=lambda response: plain_values(response.config)),
    Route(f"{_MODEL}/stats", "ModelStatistics"),
    Route(
        "/v2/repository[/{}]/index",
        "RepositoryIndex",
        POST,
        lambda response: [
            {name: value for name, value in plain_values(row).items() if value} for row in response.models
        ],
        read_index,
    ),
    Route(f"{_REPOSITORY}/load", "RepositoryModelLoad", POST, None, read_load),
    Route(f"{_REPOSITORY}/unload", "RepositoryModelUnload", POST, None, read_unload),
    Route("/v2/logging", "LogSettings", GET_OR_POST, log_settings_json, read_log_settings),
    Route("/v2/trace/setting", "TraceSetting", GET_OR_POST, trace_settings_json, read_trace_settings),
    Route(
        "/v2/models/{model_name}/trace/setting",
        "TraceSetting",
        GET_OR_POST,
        trace_settings_json,
        read_trace_settings,
    ),
    Route(f"{_SYSTEM_REGION}/status", "SystemSharedMemoryStatus", to_json=_regions_json),
    Route(f"{_SYSTEM_REGION}/register", "SystemSharedMemoryRegister", POST, None, read_system_region),
    Route(f"{_SYSTEM_REGION}/unregister", "SystemSharedMemoryUnregister", POST, None),
    Route(f"{_CUDA_REGION}/status", "CudaSharedMemoryStatus", to_json=_regions_json),
    Route(f"{_CUDA_REGION}/register", "CudaSharedMemoryRegister", POST, None, read_cuda_region),
    Route(f"{_CUDA_REGION}/unregister", "CudaSharedMemoryUnregister", POST, None),
    # For AMD Inference Server.
    Route("/v2/models", "ModelList", to_json=lambda response: {"models": list(response.models)}),
    Route("/v2/hardware", "HasHardware", POST, hardware_json, read_hardware),
    Route(f"{_LOADED_VERSION}/load", "ModelLoad", POST, None, read_parameters),
    Route(f"{_LOADED_VERSION}/unload", "ModelUnload", POST, None),
    Route(f"{_WORKER}/load", "WorkerLoad", POST, lambda response: response.endpoint.encode(), read_parameters, PLAIN),
    Route(f"{_WORKER}/unload", "WorkerUnload", POST, None),
)


def _pattern(url: str) -> re.Pattern[str]:
    expression = url.replace("[", "(?:").replace("]", ")?").replace("{version}", "(?P<version>[0-9]+)")
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", expression).replace("{}", "[^/]+"))


_REST_V1 = re.compile(r"/v1/models/[^/]+(/|:(predict|classify|regress|explain)$)")
"""The last three are not served."""
_PATTERNS = tuple((_pattern(route.url), route) for route in ROUTES)


def find_destination(target: bytes) -> tuple[Route, Mapping[str, str]] | None:
    """Return a URL's route, and the values of its fields, percent-decoded; "" for omitted fields. Returns None if no
    route has the URL. The route may not allow the request's verb."""
    path = path_of(target)
    for pattern, route in _PATTERNS:
        found = pattern.fullmatch(path)
        if found is not None and not (route is MODEL_V1 and _REST_V1.match(path)):
            return route, {name: unquote(value or "") for name, value in found.groupdict().items()}
    return None


def is_openai(target: bytes) -> bool:
    """Return whether a URL is one of OpenAI's API, or of reranking, whose errors have its form."""
    path = path_of(target)
    return (path.startswith("/v1/") and not is_rest_v1(target)) or path == RERANK_2.url


def is_rest_v1(target: bytes) -> bool:
    """Return whether a URL is one of TensorFlow Serving's API, and not of OpenAI's too: of a version, or a model with
    what to do with it."""
    return _REST_V1.match(path_of(target)) is not None


def parse_message(target: bytes, body: Buffer) -> bytes:
    """Return the serialised message of a management call's body. Raises ServeError if the body is faulty."""
    destination = find_destination(target)
    assert destination is not None
    route, fields = destination
    message: bytes = route.request(fields, body).SerializeToString()
    return message
