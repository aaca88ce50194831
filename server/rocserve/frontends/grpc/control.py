"""RepositoryModelLoad and RepositoryModelUnload; they take as long as a load does, so they run on the event loop."""

from __future__ import annotations

from rocserve.core.errors import unimplemented
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.repository.model_repository import ModelRepository


class ControlHandlers:
    """Coroutines that take the request's message and give the answer's; a ServeError becomes the call's status."""

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository

    async def load(self, message: bytes) -> bytes:
        request = pb.RepositoryModelLoadRequest.FromString(message)
        _refuse_repository_name(request.repository_name)
        parameters = {name: _value(parameter) for name, parameter in request.parameters.items()}
        await self._repository.load(request.model_name, parameters)
        return pb.RepositoryModelLoadResponse().SerializeToString()

    async def unload(self, message: bytes) -> bytes:
        request = pb.RepositoryModelUnloadRequest.FromString(message)
        _refuse_repository_name(request.repository_name)
        unload_dependents = request.parameters["unload_dependents"].bool_param
        await self._repository.unload(request.model_name, unload_dependents)
        return pb.RepositoryModelUnloadResponse().SerializeToString()


def _value(parameter: pb.ModelRepositoryParameter) -> bool | int | str | bytes:
    choice = parameter.WhichOneof("parameter_choice")
    value: bool | int | str | bytes = getattr(parameter, choice) if choice else ""
    return value


def _refuse_repository_name(name: str) -> None:
    if name:
        raise unimplemented("'repository_name' specification is not supported")
