"""Types of the parameters of load and unload requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from rocserve.core.errors import ServeError
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.repository.model_repository import ModelRepository
from rocserve.services.control import RepositoryControlService


class NotingRepository:
    """Keeps what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def load(self, name: str, parameters: Mapping[str, bool | int | str | bytes]) -> None:
        self.calls.append(("load", name, dict(parameters)))

    async def unload(self, name: str, unload_dependents: bool) -> None:
        self.calls.append(("unload", name, unload_dependents))


@pytest.fixture
def repository() -> NotingRepository:
    return NotingRepository()


@pytest.fixture
def service(repository: NotingRepository) -> RepositoryControlService:
    return RepositoryControlService(cast(ModelRepository, repository))


async def test_parameters_of_a_load(service: RepositoryControlService, repository: NotingRepository) -> None:
    request = pb.RepositoryModelLoadRequest(model_name="m")
    request.parameters["config"].string_param = "{}"
    request.parameters["file:1/x"].bytes_param = b"x"
    await service.load(request)
    assert repository.calls == [("load", "m", {"config": "{}", "file:1/x": b"x"})]


async def test_a_parameter_without_a_value(service: RepositoryControlService) -> None:
    request = pb.RepositoryModelLoadRequest(model_name="m")
    request.parameters["config"].SetInParent()
    with pytest.raises(ServeError, match="invalid value type for load parameter 'config', expected string_param"):
        await service.load(request)


@pytest.mark.parametrize("value", [True, False])
async def test_unload_dependents(service: RepositoryControlService, repository: NotingRepository, value: bool) -> None:
    request = pb.RepositoryModelUnloadRequest(model_name="m")
    request.parameters["unload_dependents"].bool_param = value
    await service.unload(request)
    await service.unload(pb.RepositoryModelUnloadRequest(model_name="m"))
    assert repository.calls == [("unload", "m", value), ("unload", "m", False)]


async def test_unload_dependents_is_a_truth_value(service: RepositoryControlService) -> None:
    request = pb.RepositoryModelUnloadRequest(model_name="m")
    request.parameters["unload_dependents"].string_param = "true"
    with pytest.raises(ServeError, match="invalid value type for 'unload_dependents' parameter, expected bool_param"):
        await service.unload(request)
