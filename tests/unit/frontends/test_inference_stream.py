"""Errors within a stream: the request's own, and those that are answers of its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from rocserve.core.errors import ServeError, internal
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest
from rocserve.core.serving import Responder
from rocserve.frontends.grpc.inference import InferenceHandlers, InferenceStream


class Call:
    deadline = None
    metadata = ()
    peer = "ipv4:127.0.0.1:5"

    def __init__(self) -> None:
        self.sent: list[pb.ModelStreamInferResponse] = []

    def send(self, message: bytes) -> None:
        self.sent.append(pb.ModelStreamInferResponse.FromString(message))

    def request_next(self) -> None: ...


class Service:
    paths = PrivatePaths(())
    plane: Any = None

    def __init__(self, infer: Callable[[Responder], None]) -> None:
        self._infer = infer

    def infer(self, request: InferRequest, responder: Responder) -> None:
        self._infer(responder)

    def refuse(self, error: ServeError, id_of: Callable[[], str]) -> None: ...


def fail(responder: Responder) -> None:
    responder.send(internal("no"))


@pytest.mark.parametrize("is_answer", [False, True])
def test_an_error_names_the_model_where_it_is_its_answer(is_answer: bool) -> None:
    call, memory = Call(), RequestMemory()
    accepted: list[Responder] = []
    handlers = InferenceHandlers(Service(accepted.append if is_answer else fail), memory)  # type: ignore[arg-type]
    stream = InferenceStream(call, handlers)  # type: ignore[arg-type]
    request = pb.ModelInferRequest(model_name="m", id="7")
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    stream.on_message(request.SerializeToString())
    for responder in accepted:
        fail(responder)
    (answer,) = call.sent
    assert (answer.error_message, answer.infer_response.id) == ("no", "7")
    assert answer.infer_response.model_name == ("m" if is_answer else "")
    assert ("triton_final_response" in answer.infer_response.parameters) is is_answer
    assert memory.used_bytes == 0
