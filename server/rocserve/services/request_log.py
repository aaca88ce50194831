"""What the log says of single requests, where it is verbose."""

from __future__ import annotations

import logging
import time

from rocserve.core.errors import ServeError
from rocserve.core.forwarding import ForwardingResponder
from rocserve.core.request_prefix import request_prefix
from rocserve.core.requests import InferRequest, InferResponse
from rocserve.core.serving import Responder


class LoggedResponder(ForwardingResponder):
    """Says in the log what became of a request; never what its tensors hold."""

    __slots__ = ("_head", "_id", "_log", "_sent", "_started_ns")

    def __init__(self, responder: Responder, request: InferRequest, started_ns: int, log: logging.Logger) -> None:
        super().__init__(responder)
        self._id, self._head = request.id, request.head
        self._started_ns = started_ns
        self._log = log
        self._sent = 0
        inputs = ", ".join(f"{entry.name} {entry.datatype} {list(entry.shape)}" for entry in request.head.inputs)
        self._say("inference of model '%s'%s begins: %s", self._model, self._asked_version, inputs)

    def send(self, response: InferResponse, final: bool = True) -> None:
        self._sent += 1
        if final:
            self._say(
                "inference of model '%s' version %s ends: OK after %.3f ms",
                response.head.model_name,
                response.head.model_version,
                self._milliseconds,
            )
        self._responder.send(response, final)

    def end(self) -> None:
        self._say(
            "inference of model '%s' ends: OK, %d responses in %.3f ms", self._model, self._sent, self._milliseconds
        )
        self._responder.end()

    def fail(self, error: ServeError, final: bool = True) -> None:
        self._say(
            "inference of model '%s'%s %s: %s after %.3f ms: %s",
            self._model,
            self._asked_version,
            "ends" if final else "goes on",
            error.code.name,
            self._milliseconds,
            error.text.removeprefix(self._prefix),
        )
        self._responder.fail(error, final)

    def _say(self, text: str, *values: object) -> None:
        self._log.debug(f"%s{text}", self._prefix, *values, stacklevel=2)

    @property
    def _prefix(self) -> str:
        """Triton's, which many errors' texts begin with already."""
        return request_prefix([self._id])

    @property
    def _model(self) -> str:
        return self._head.model_name

    @property
    def _asked_version(self) -> str:
        version = self._head.model_version
        return f" version {version}" if version else ""

    @property
    def _milliseconds(self) -> float:
        return (time.monotonic_ns() - self._started_ns) / 1e6
