"""Which URL asks for what: one table, for inference and for the methods of gRPC."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import unquote

from rocserve.core.tensors import Buffer
from rocserve.frontends.http import management
from rocserve.frontends.http.errors import JSON, PLAIN
from rocserve.frontends.http.management import health_json, no_json
from rocserve.frontends.http.request import path_of
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol.json_form import plain_values

GET = frozenset({"GET"})
GET_OR_HEAD = frozenset({"GET", "HEAD"})
POST = frozenset({"POST"})
GET_OR_POST = frozenset({"GET", "POST"})


@dataclass(frozen=True, slots=True)
class Route:
    """A method of gRPC under its URL."""

    url: str
    """In brackets: what may be left out; in braces: a field of the method's request, `{}` of none."""
    method: str
    verbs: frozenset[str] = GET
    to_json: Callable[[Any], Any] = plain_values
    """From the method's response to a value for JSON, or to bytes that are sent as they are; None = no body.

    Raises:
        HttpError: the response is an HTTP status.
    """
    read: Callable[[Any, Buffer], None] | None = None
    """Completes the method's request by a POST's body; None = the URL says all. Raises: ServeError."""
    content_type: str = JSON
    """Of errors too."""

    def request(self, fields: Mapping[str, str], body: Buffer | None) -> Any:
        """The method's request; `body`: of a POST. Raises: ServeError."""
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
_m = management

INFER = Route(f"{_MODEL}/infer", "ModelInfer", POST)
GENERATE = Route(f"{_MODEL}/generate", "ModelInfer", POST)
GENERATE_STREAM = Route(f"{_MODEL}/generate_stream", "ModelInfer", POST)
ROUTES = (
    INFER,
    GENERATE,
    GENERATE_STREAM,
    Route("/v2", "ServerMetadata"),
    Route("/v2/health/live", "ServerLive", GET_OR_HEAD, health_json, content_type=PLAIN),
    Route("/v2/health/ready", "ServerReady", GET_OR_HEAD, health_json, content_type=PLAIN),
    Route("/v2/models/stats", "ModelStatistics"),
    Route(_MODEL, "ModelMetadata", to_json=_m.metadata_json),
    Route(f"{_MODEL}/ready", "ModelReady", GET_OR_HEAD, health_json, content_type=PLAIN),
    Route(f"{_MODEL}/config", "ModelConfig", to_json=lambda response: plain_values(response.config)),
    Route(f"{_MODEL}/stats", "ModelStatistics"),
    Route("/v2/repository[/{}]/index", "RepositoryIndex", POST, _m.index_json, _m.read_index),
    Route(f"{_REPOSITORY}/load", "RepositoryModelLoad", POST, no_json, _m.read_load),
    Route(f"{_REPOSITORY}/unload", "RepositoryModelUnload", POST, no_json, _m.read_unload),
    Route("/v2/logging", "LogSettings", GET_OR_POST, _m.log_settings_json, _m.read_log_settings),
    Route("/v2/trace/setting", "TraceSetting", GET_OR_POST, _m.trace_settings_json, _m.read_trace_settings),
    Route(
        "/v2/models/{model_name}/trace/setting",
        "TraceSetting",
        GET_OR_POST,
        _m.trace_settings_json,
        _m.read_trace_settings,
    ),
    Route(f"{_SYSTEM_REGION}/status", "SystemSharedMemoryStatus", to_json=_m.regions_json),
    Route(f"{_SYSTEM_REGION}/register", "SystemSharedMemoryRegister", POST, no_json, _m.read_system_region),
    Route(f"{_SYSTEM_REGION}/unregister", "SystemSharedMemoryUnregister", POST, no_json),
    Route(f"{_CUDA_REGION}/status", "CudaSharedMemoryStatus", to_json=_m.regions_json),
    Route(f"{_CUDA_REGION}/register", "CudaSharedMemoryRegister", POST, no_json, _m.read_cuda_region),
    Route(f"{_CUDA_REGION}/unregister", "CudaSharedMemoryUnregister", POST, no_json),
    # Of AMD Inference Server
    Route("/v2/models", "ModelList", to_json=lambda response: {"models": list(response.models)}),
    Route("/v2/hardware", "HasHardware", POST, _m.hardware_json, _m.read_hardware),
    Route(f"{_LOADED_VERSION}/load", "ModelLoad", POST, no_json, _m.read_parameters),
    Route(f"{_LOADED_VERSION}/unload", "ModelUnload", POST, no_json),
    Route(
        f"{_WORKER}/load", "WorkerLoad", POST, lambda response: response.endpoint.encode(), _m.read_parameters, PLAIN
    ),
    Route(f"{_WORKER}/unload", "WorkerUnload", POST, no_json),
)


def _pattern(url: str) -> re.Pattern[str]:
    expression = url.replace("[", "(?:").replace("]", ")?").replace("{version}", "(?P<version>[0-9]+)")
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", expression).replace("{}", "[^/]+"))


_PATTERNS = tuple((_pattern(route.url), route) for route in ROUTES)


class Destination(NamedTuple):
    """Where a request goes."""

    route: Route
    fields: Mapping[str, str]
    """What its URL says of them, not percent-encoded; empty what it leaves out."""


def find_destination(target: bytes) -> Destination | None:
    """None: there is nothing under this URL, as it was sent. The verb may still be one that is not allowed there."""
    path = path_of(target)
    for pattern, route in _PATTERNS:
        if found := pattern.fullmatch(path):
            return Destination(route, {name: unquote(value or "") for name, value in found.groupdict().items()})
    return None


def parse_message(target: bytes, body: Buffer) -> bytes:
    """The message, serialised, that a body means at the URL of a management call.

    Raises:
        ServeError: it means none.
    """
    destination = find_destination(target)
    assert destination is not None
    message: bytes = destination.route.request(destination.fields, body).SerializeToString()
    return message
