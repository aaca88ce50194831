"""Steps of explicit model control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from support.parity.exchange import Asked, Call, Outcome


def load(model: str, repository: str = "", **parameters: Any) -> Call:
    request = pb.RepositoryModelLoadRequest(repository_name=repository, model_name=model)
    _fill(request.parameters, parameters)
    return Call("RepositoryModelLoad", request)


def load_with(model: str, parameters: dict[str, Any]) -> Call:
    """As `load`, for parameters whose names are no identifiers."""
    return load(model, **parameters)


def unload(model: str, repository: str = "", **parameters: Any) -> Call:
    request = pb.RepositoryModelUnloadRequest(repository_name=repository, model_name=model)
    _fill(request.parameters, parameters)
    return Call("RepositoryModelUnload", request)


@dataclass(frozen=True, slots=True)
class Index:
    """The rows of the repository index about some models; other tests may have put more there."""

    models: Sequence[str]
    ready: bool = False

    def digest(self) -> str:
        return self._call.digest()

    def ask(self, server: Asked) -> Outcome:
        outcome = self._call.ask(server)
        rows = (outcome.answer or {}).get("models", [])
        return replace(outcome, answer=[row for row in rows if row["name"] in self.models])

    @property
    def _call(self) -> Call:
        return Call("RepositoryIndex", pb.RepositoryIndexRequest(ready=self.ready))


def _fill(target: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        parameter = target[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            parameter.int64_param = value
        elif isinstance(value, bytes):
            parameter.bytes_param = value
        elif isinstance(value, str):
            parameter.string_param = value
