"""The repository index of a real server."""

from __future__ import annotations

from collections.abc import Sequence

from tritonclient.grpc.service_pb2 import RepositoryIndexResponse

from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS


def rows_of(server: RocserveProcess) -> Sequence[RepositoryIndexResponse.ModelIndex]:
    with server.client() as client:
        return client.get_model_repository_index(client_timeout=PATIENCE_SECONDS).models


def models_of(server: RocserveProcess) -> dict[str, tuple[str, str]]:
    """Name -> (state, reason) of the highest version."""
    return {row.name: (row.state, row.reason) for row in rows_of(server)}


def index_of(server: RocserveProcess, model: str) -> dict[str, tuple[str, str]]:
    """Version -> (state, reason)."""
    return {row.version: (row.state, row.reason) for row in rows_of(server) if row.name == model}


def reason_of(server: RocserveProcess, model: str) -> str:
    return " ".join(reason for _, reason in index_of(server, model).values())
