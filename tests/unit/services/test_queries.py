"""Reading methods: each answer shows one moment, whatever is served in the next."""

from __future__ import annotations

from typing import cast

from rocserve.core.model_config import ModelConfig
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.serving import ServedModel, ServedVersion, ServingTable, ServingTableHolder
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.repository.model_repository import ModelRepository
from rocserve.services.queries import QueryService
from rocserve.services.readiness import Readiness


class LeavingTables(ServingTableHolder):
    """Serves the model only until its table is read for the first time."""

    def __init__(self, version: ServedVersion) -> None:
        self._tables = [ServingTable({"m": ServedModel("m", {1: version}, version)}), ServingTable()]

    @property
    def table(self) -> ServingTable:  # type: ignore[override]
        return self._tables.pop(0)


class Version:
    name = "m"
    version = 1
    config = ModelConfig("m", platform="p")
    properties = {"engine": "e"}  # noqa: RUF012


def query_service(tables: ServingTableHolder, allows_client_shm: bool = False) -> QueryService:
    readiness = Readiness(tables, lambda: True, True)
    return QueryService(tables, cast(ModelRepository, None), "id", readiness, PrivatePaths(), allows_client_shm)


def test_the_metadata_of_a_model_that_goes_meanwhile() -> None:
    tables = LeavingTables(cast(ServedVersion, Version()))
    service = query_service(tables)
    answer = service.model_metadata(pb.ModelMetadataRequest(name="m"))
    assert (answer.name, list(answer.versions), answer.platform) == ("m", ["1"], "p")


def test_the_extensions_are_those_that_are_on() -> None:
    def extensions(allows_client_shm: bool) -> list[str]:
        service = query_service(ServingTableHolder(), allows_client_shm)
        return list(service.server_metadata(pb.ServerMetadataRequest()).extensions)

    shared = ["system_shared_memory", "cuda_shared_memory"]
    assert [name for name in extensions(True) if name not in extensions(False)] == shared
    assert [name for name in extensions(True) if name not in shared] == extensions(False)
