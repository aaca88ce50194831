"""Steps of explicit model control."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from support.parity.exchange import Asked, Call, HttpCall, Outcome
from support.parity.inference import fill_parameters
from support.waiting import PATIENCE_SECONDS


def load(model: str, repository: str = "", **parameters: Any) -> Call:
    request = pb.RepositoryModelLoadRequest(repository_name=repository, model_name=model)
    fill_parameters(request.parameters, parameters)
    return Call("RepositoryModelLoad", request)


def load_with(model: str, parameters: dict[str, Any]) -> Call:
    """As `load`, for parameters whose names are not identifiers."""
    return load(model, **parameters)


def unload(model: str, repository: str = "", **parameters: Any) -> Call:
    request = pb.RepositoryModelUnloadRequest(repository_name=repository, model_name=model)
    fill_parameters(request.parameters, parameters)
    return Call("RepositoryModelUnload", request)


@dataclass(frozen=True, slots=True)
class HttpIndex:
    """The rows of the repository index over HTTP about some models; other tests may have added models."""

    models: Sequence[str]

    def digest(self) -> str:
        return self._call.digest()

    def ask(self, server: Asked) -> Outcome:
        outcome = self._call.ask(server)
        rows = [row for row in outcome.answer["body"] if row["name"] in self.models]
        return replace(outcome, answer={**outcome.answer, "body": rows})

    @property
    def _call(self) -> HttpCall:
        return HttpCall("POST", "/v2/repository/index", b'{"ready": false}')


@dataclass(frozen=True, slots=True)
class Index:
    """The rows of the repository index about some models, once none of them is loading or unloading, or after
    `PATIENCE_SECONDS`; other tests may have added models."""

    models: Sequence[str]
    ready: bool = False

    def digest(self) -> str:
        return self._call.digest()

    def ask(self, server: Asked) -> Outcome:
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            outcome = self._call.ask(server)
            rows = [row for row in (outcome.answer or {}).get("models", []) if row["name"] in self.models]
            if time.monotonic() > end or not any(
                row.get("state") in ("LOADING", "CHECKING", "UNLOADING") for row in rows
            ):
                return replace(outcome, answer=rows)
            time.sleep(0.05)

    @property
    def _call(self) -> Call:
        return Call("RepositoryIndex", pb.RepositoryIndexRequest(ready=self.ready))
