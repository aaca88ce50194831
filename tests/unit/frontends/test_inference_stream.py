"""Errors within a stream: the request's own, and those that are answers of its model."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tritonclient.grpc import service_pb2 as pb

from rocserve.core.errors import ServeError, internal
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest
from rocserve.core.serving import Responder
from rocserve.frontends.grpc.codec import InferCodec
from rocserve.frontends.grpc.inference import InferenceStream


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

    def __init__(self, infer: Callable[[Responder], None]) -> None:
        self._infer = infer

    def infer(self, request: InferRequest, responder: Responder) -> None:
        self._infer(responder)

    def refuse(self, error: ServeError, id_of: Callable[[], str]) -> None: ...


def fail(responder: Responder) -> None:
    responder.fail(internal("no"))


def fail_on_another_thread(responder: Responder) -> None:
    """A worker that is quicker than the thread that asks it."""
    thread = threading.Thread(target=fail, args=(responder,))
    thread.start()
    thread.join()


@pytest.mark.parametrize(("infer", "model"), [(fail, ""), (fail_on_another_thread, "m")])
def test_an_error_names_the_model_where_it_is_its_answer(infer: Callable[[Responder], None], model: str) -> None:
    call, memory = Call(), RequestMemory()
    stream = InferenceStream(call, Service(infer), InferCodec(), memory, lambda stream: None, None)  # type: ignore[arg-type]
    request = pb.ModelInferRequest(model_name="m", id="7")
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    stream.on_message(request.SerializeToString())
    (answer,) = call.sent
    assert (answer.error_message, answer.infer_response.id) == ("no", "7")
    assert answer.infer_response.model_name == model
    assert ("triton_final_response" in answer.infer_response.parameters) is bool(model)
    assert memory.used_bytes == 0
