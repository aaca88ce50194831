"""Loading and unloading by request; it takes as long as a load does, so it runs on the event loop."""

from __future__ import annotations

from rocserve.core.errors import invalid_argument, unimplemented
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.repository.content import wrong_type
from rocserve.repository.model_repository import ModelRepository


class RepositoryControlService:
    """Each method takes a request and gives its answer. All calls are made on the loop.

    Raises:
        ServeError: with Triton's codes and words.
    """

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository

    async def load(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        _refuse_repository_name(request.repository_name)
        parameters = {name: _value(name, parameter) for name, parameter in request.parameters.items()}
        await self._repository.load(request.model_name, parameters)
        return pb.RepositoryModelLoadResponse()

    async def unload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        _refuse_repository_name(request.repository_name)
        await self._repository.unload(request.model_name, _unloads_dependents(request))
        return pb.RepositoryModelUnloadResponse()


def _value(name: str, parameter: pb.ModelRepositoryParameter) -> bool | int | str | bytes:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        raise wrong_type(name, "string_param")
    value: bool | int | str | bytes = getattr(parameter, choice)
    return value


def _unloads_dependents(request: pb.RepositoryModelUnloadRequest) -> bool:
    if "unload_dependents" not in request.parameters:
        return False
    parameter = request.parameters["unload_dependents"]
    if parameter.WhichOneof("parameter_choice") != "bool_param":
        raise invalid_argument("invalid value type for 'unload_dependents' parameter, expected bool_param.")
    return parameter.bool_param


def _refuse_repository_name(name: str) -> None:
    if name:
        raise unimplemented("'repository_name' specification is not supported")
