"""AMD Inference Server's own URLs. Parameters are the members of the body itself."""

from __future__ import annotations

from typing import Any

from rocserve.core.errors import invalid_argument
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.errors import PLAIN, HttpError
from rocserve.frontends.http.json_text import MISSING, checked_text, find, members, parse_json, text, unsigned
from rocserve.frontends.http.management import GET, POST, ManagementRoute, Place, by_url, nothing
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol.parameters import write_parameters


def _model_load(place: Place, body: Buffer) -> pb.ModelLoadRequest:
    message = pb.ModelLoadRequest(name=place.model, version=place.version)
    write_parameters(_parameters(body), message.parameters)
    return message


def _worker_load(place: Place, body: Buffer) -> pb.WorkerLoadRequest:
    message = pb.WorkerLoadRequest(name=place.model)
    write_parameters(_parameters(body), message.parameters)
    return message


def _has_hardware(place: Place, body: Buffer) -> pb.HasHardwareRequest:
    value = parse_json(body)
    name, count = find(value, "name"), find(value, "num")
    return pb.HasHardwareRequest(
        name="" if name is MISSING else text(name), num=1 if count is MISSING else min(unsigned(count), 0xFFFF_FFFF)
    )


def _parameters(body: Buffer) -> dict[str, bool | int | float | str]:
    """Raises: ServeError."""
    given = members(parse_json(body)) if body else {}
    for name, value in given.items():
        if not isinstance(value, bool | int | float | str):
            raise invalid_argument(f"parameter '{name}' must be a boolean, a number or a text, got {value!r}")
        for told in (name, value):
            if isinstance(told, str):
                checked_text(told)
    return dict(given)


def _models(response: pb.ModelListResponse) -> Any:
    return {"models": list(response.models)}


def _endpoint(response: pb.WorkerLoadResponse) -> bytes:
    return response.endpoint.encode()


def _found(response: pb.HasHardwareResponse) -> None:
    if not response.found:
        raise HttpError(404, "there is not so much of that hardware")


MODELS = by_url("ModelList", GET, _models)
HARDWARE = ManagementRoute("HasHardware", POST, _has_hardware, _found)
WORKERS = {
    "load": ManagementRoute("WorkerLoad", POST, _worker_load, _endpoint, PLAIN),
    "unload": by_url("WorkerUnload", POST, nothing, name="model"),
}
VERSIONS = {
    "load": ManagementRoute("ModelLoad", POST, _model_load, nothing),
    "unload": by_url("ModelUnload", POST, nothing, name="model", version="version"),
}
