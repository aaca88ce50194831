"""Answers predict, and says in which states a model's versions are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rocserve.core.errors import ServeError, StatusCode, unavailable, unimplemented
from rocserve.core.model_config import ModelConfig
from rocserve.core.parameters import NO_PARAMETERS
from rocserve.core.printable import listed
from rocserve.core.request_memory import Holding
from rocserve.core.requests import InferRequest, InputHead
from rocserve.core.responses import InferResponse
from rocserve.core.steps import Steps
from rocserve.core.tensors import Tensor
from rocserve.frontends.http.divided_call import MOST_IN_FLIGHT, divide, read_body, send_json
from rocserve.frontends.http.inference import HttpParts, request_timeout, with_forwarded_headers
from rocserve.frontends.http.json_text import json_bytes
from rocserve.frontends.http.openai.errors import openai_error
from rocserve.frontends.http.openai.models import TextModels
from rocserve.frontends.http.request import JSON, Request, Response, error_response
from rocserve.frontends.http.rest_v1.answers import columns_answer, output_arrays, rows_answer
from rocserve.frontends.http.rest_v1.bodies import PredictBody, read_predict
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.services.inference import NOT_FOR_DECOUPLED

_STATES = {
    "UNKNOWN": "START",
    "READY": "AVAILABLE",
    "LOADING": "LOADING",
    "CHECKING": "LOADING",
    "UNLOADING": "UNLOADING",
}
"""State in the index -> TensorFlow Serving's; all others are END."""


@dataclass(eq=False)
class RestV1Service:
    """Answers in the form of TensorFlow Serving's REST API. On the event loop."""

    _parts: HttpParts
    _models: TextModels
    _most_in_flight: int = MOST_IN_FLIGHT
    """Infer requests of one call at once."""

    async def predict(self, request: Request, name: str, version: str) -> Response | None:
        """Returns None if the answer has been sent."""
        parts, holding = self._parts, Holding()
        try:
            try:
                timeout = request_timeout(request.head.headers, parts.settings.request_timeout_seconds)
                config = await parts.config(name, version)
                if config.decoupled:
                    raise unimplemented(NOT_FOR_DECOUPLED["HTTP"])
                read = partial(read_predict, tuple(config.inputs), config.max_batch_size)
                body = await read_body(parts, request, holding, read)
            except ServeError as error:
                parts.inference.refuse(error, str)
                raise
            answers: list[InferResponse] = []
            requests = (self._infer_request(request, config, version, tensors) for tensors in body.requests)
            await divide(parts, request, timeout, self._most_in_flight, requests, answers.append)
            nbytes = sum(len(data) for answer in answers for data in answer.data)
            return await send_json(parts, request, nbytes, _written(config, body, answers))
        except ServeError as error:
            return error_response(error)
        finally:
            parts.memory.requests.release(holding)

    async def show_model(self, name: str) -> Response:
        """Answer in all the forms that this URL has: OpenAI's entry of a model, KServe's readiness, and TensorFlow
        Serving's states. Raises ServeError if there is no such model."""
        rows = await self._rows(name)
        fault: ServeError | None = None
        try:
            entry = self._models.entry((await self._models.find(name)).config.name)
        except ServeError as error:
            if not rows:
                raise
            fault, entry = error, self._models.entry(name)
        shown = name if rows else str(entry["id"])
        states = _states(rows or await self._rows(shown))
        is_ready = any(state["state"] == _STATES["READY"] for state in states)
        members = {"name": shown, "ready": is_ready, "model_version_status": states}
        if is_ready:
            return Response(200, json_bytes({**entry, **members}), JSON)
        if fault is None or fault.code is not StatusCode.UNAVAILABLE:
            fault = unavailable(f"model '{shown}' is not ready; POST /v2/repository/index says why")
        return openai_error(fault, members)

    async def show_version(self, name: str, version: str) -> Response:
        rows = await self._rows(name)
        found = [row for row in rows if row.version == str(int(version))]
        if not found:
            having = listed([row.version for row in rows])
            text = f"model '{name}' has no version {version}; it has {having}" if rows else f"no model '{name}'"
            return error_response(ServeError(StatusCode.NOT_FOUND, text))
        return Response(200, json_bytes({"model_version_status": _states(found)}), JSON)

    def _infer_request(
        self, request: Request, config: ModelConfig, version: str, tensors: Sequence[Tensor]
    ) -> InferRequest:
        inputs = [InputHead(one.name, one.datatype.value, one.shape, NO_PARAMETERS) for one in tensors]
        head = self._parts.reader.head(config.name, version, inputs)
        head = with_forwarded_headers(head, self._parts.forwarding, request)
        return InferRequest(head, "", [one.data for one in tensors])

    async def _rows(self, name: str) -> Sequence[pb.RepositoryIndexResponse.ModelIndex]:
        """Return the model's rows in the index."""
        return [row for row in await self._parts.index() if row.name == name]


def _written(config: ModelConfig, body: PredictBody, answers: Sequence[InferResponse]) -> Steps[list[bytes]]:
    scalars = [entry.name for entry in config.outputs if entry.reshape == () and entry.dims == (1,)]
    outputs = yield from output_arrays(answers, body.are_single, scalars)
    if body.instances is None:
        return (yield from columns_answer(outputs))
    return (yield from rows_answer(outputs, body.instances))


def _states(rows: Sequence[pb.RepositoryIndexResponse.ModelIndex]) -> list[dict[str, Any]]:
    """Return the states of versions. Reasons are left out: the index, which has them, may be restricted."""
    states = []
    for row in rows:
        if not row.version:
            continue  # The model's folder has not been read yet, or cannot be.
        state = _STATES.get(row.state, "END")
        # The index's reason for a version that was unloaded on purpose.
        failed = state == "END" and row.reason not in ("", "unloaded")
        status = {"error_code": "OK", "error_message": ""}
        if failed:
            status = {"error_code": "UNAVAILABLE", "error_message": "POST /v2/repository/index says why"}
        states.append({"version": row.version, "state": state, "status": status})
    return states
