"""Which URL asks for what."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from urllib.parse import unquote

from rocserve.core.tensors import Buffer
from rocserve.frontends.http import amd, management
from rocserve.frontends.http.management import ManagementRoute, Place
from rocserve.frontends.http.protocol import path_of

_MODEL = re.compile(r"/v2/models/([^/]+)(?:/versions/([0-9]+))?(?:/(.+))?")
_REPOSITORY = re.compile(r"/v2/repository(?:/([^/]+))?/(index|models/([^/]+)/(load|unload))")
_WORKER = re.compile(r"/v2/workers/([^/]+)/(load|unload)")
_LOADED_VERSION = re.compile(r"/v2/repository/models/([^/]+)/versions/([0-9]+)/(load|unload)")
_SHARED_MEMORY = re.compile(r"/v2/(system|cuda)sharedmemory(?:/region/([^/]+))?/(status|register|unregister)")

_FIXED = {
    "/v2": management.SERVER_METADATA,
    "/v2/health/live": management.LIVE,
    "/v2/health/ready": management.READY,
    "/v2/models/stats": management.MODEL_STATISTICS,
    "/v2/models": amd.MODELS,
    "/v2/hardware": amd.HARDWARE,
}
_OF_A_MODEL = {
    None: management.MODEL_METADATA,
    "ready": management.MODEL_READY,
    "config": management.MODEL_CONFIG,
    "stats": management.MODEL_STATISTICS,
}
NOWHERE = Place()


class InferenceUrl(enum.Enum):
    """The ways to ask a model."""

    INFER = "infer"
    GENERATE = "generate"
    GENERATE_STREAM = "generate_stream"


_INFERENCES = {entry.value: entry for entry in InferenceUrl}


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a request goes."""

    to: InferenceUrl | ManagementRoute
    place: Place


def find_destination(verb: str, target: bytes) -> Destination | None:
    """None: there is nothing under this path. The verb may still be one that is not allowed there.

    Args:
        target: as it was sent.
    """
    path = path_of(target)
    fixed = _FIXED.get(path)
    if fixed is not None:
        return Destination(fixed, NOWHERE)
    if path.startswith("/v2/models/"):
        return _of_a_model(verb, path)
    if path == "/v2/logging":
        return Destination(management.LOGGING["POST" if verb == "POST" else "GET"], NOWHERE)
    if path == "/v2/trace/setting":
        return Destination(_trace(verb), NOWHERE)
    if found := _SHARED_MEMORY.fullmatch(path):
        region = unquote(found[2] or "")
        return Destination(management.SHARED_MEMORY[found[1], found[3]], Place(region=region))
    if found := _WORKER.fullmatch(path):
        return Destination(amd.WORKERS[found[2]], Place(model=unquote(found[1])))
    if found := _LOADED_VERSION.fullmatch(path):
        return Destination(amd.VERSIONS[found[3]], Place(model=unquote(found[1]), version=found[2]))
    if found := _REPOSITORY.fullmatch(path):
        return _of_a_repository(found)
    return None


def _of_a_model(verb: str, path: str) -> Destination | None:
    found = _MODEL.fullmatch(path)
    if found is None:
        return None
    place = Place(model=unquote(found[1]), version=found[2] or "")
    what = found[3]
    if what in _INFERENCES:
        return Destination(_INFERENCES[what], place)
    if what == "trace/setting":
        return None if place.version else Destination(_trace(verb), place)
    route = _OF_A_MODEL.get(what)
    return None if route is None else Destination(route, place)


def _of_a_repository(found: re.Match[str]) -> Destination:
    repository = unquote(found[1] or "")
    if found[2] == "index":
        return Destination(management.INDEX, Place(repository=repository))
    route = management.LOAD if found[4] == "load" else management.UNLOAD
    return Destination(route, Place(model=unquote(found[3]), repository=repository))


def _trace(verb: str) -> ManagementRoute:
    return management.TRACE["POST" if verb == "POST" else "GET"]


def parse_message(verb: str, target: bytes, body: Buffer) -> bytes:
    """The message, serialised, that a body means at the URL of a management call.

    Raises:
        ServeError: it means none.
    """
    destination = find_destination(verb, target)
    assert destination is not None and isinstance(destination.to, ManagementRoute)
    message: bytes = destination.to.request(destination.place, body).SerializeToString()
    return message
