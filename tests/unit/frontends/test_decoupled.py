"""Requests with any number of responses, on a model that the test answers by hand."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from support.observation import no_observer
from support.shared_memory import GUARD
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.core.datatypes import DataType
from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import ServeError, StatusCode, not_found
from rocserve.core.exchange import Responder
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest
from rocserve.core.responses import InferResponse
from rocserve.core.serving import ServedModel, ServingTable, ServingTableHolder
from rocserve.core.tensors import Tensor
from rocserve.frontends.grpc.inference import InferCall, InferenceHandlers, InferenceStream
from rocserve.frontends.grpc.transport import StreamRoute, UnaryRoute
from rocserve.plane.loop import PlaneLoop
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.services.client_memory.attachment import ClientMemory
from rocserve.services.client_memory.regions import ClientRegions
from rocserve.services.inference import InferenceService

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


class OnPlane:
    """A responder that is called on the data plane's thread; each call waits until it has run."""

    def __init__(self, responder: Responder, plane: PlaneLoop) -> None:
        self._responder = responder
        self._plane = plane

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            done = threading.Event()
            self._plane.call_soon(partial(getattr(self._responder, name), *arguments))
            self._plane.call_soon(done.set)
            assert done.wait(PATIENCE_SECONDS)

        return call


class HandModel:
    """A version whose requests the test answers."""

    def __init__(self, decoupled: bool, plane: PlaneLoop) -> None:
        self._decoupled = decoupled
        self._plane = plane
        self.asked: queue.Queue[tuple[InferRequest, Responder]] = queue.Queue()

    def infer(self, request: InferRequest, responder: Responder) -> None:
        if self._decoupled:
            try:
                responder.expect_many()
            except ServeError as error:
                responder.send(error)
                return
        self.asked.put((request, responder))

    def next(self) -> Any:
        return OnPlane(self.asked.get(timeout=PATIENCE_SECONDS)[1], self._plane)


class Watcher:
    """Waits for the client to leave, and holds the request, as a queue does."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def __call__(self) -> None:
        self._responder.send(not_found("it left"))


class Stream:
    """A client's stream."""

    def __init__(self, method: Any) -> None:
        self._requests: queue.Queue[bytes | None] = queue.Queue()
        self.call = method(iter(self._requests.get, None))
        self._closed = False

    def ask(self, model: str, request_id: str, marked: bool = False) -> None:
        request = pb.ModelInferRequest(model_name=model, id=request_id)
        if marked:
            request.parameters["triton_enable_empty_final_response"].bool_param = True
        self._requests.put(request.SerializeToString())

    def receive(self) -> pb.ModelStreamInferResponse:
        return pb.ModelStreamInferResponse.FromString(next(self.call))

    def told(self) -> tuple[str, int | None, bool | None]:
        """The next answer: the request's id, its value, and whether it is the last if that is given."""
        response = self.receive().infer_response
        value = int(np.frombuffer(response.raw_output_contents[0], np.int32)[0]) if response.outputs else None
        parameter = response.parameters.get("triton_final_response")
        return response.id, value, None if parameter is None else parameter.bool_param

    def close_sending(self) -> None:
        self._requests.put(None)


@pytest.fixture
def models(plane: PlaneLoop) -> dict[str, HandModel]:
    return {"many": HandModel(True, plane), "one": HandModel(False, plane)}


@pytest.fixture
def served(serve: Any, plane: PlaneLoop, models: dict[str, HandModel]) -> Any:
    tables = ServingTableHolder()
    tables.table = ServingTable({name: ServedModel(name, {1: model}, model) for name, model in models.items()})  # type: ignore[dict-item, arg-type]
    memory = ClientMemory(tables, ClientRegions(GUARD), 0, plane.work_off)
    service = InferenceService(Dispatcher(tables, plane.work_off), memory, no_observer(tables), PrivatePaths(), plane)
    handlers = InferenceHandlers(service, RequestMemory())
    routes = {
        INFER: UnaryRoute(handlers.model_infer, InferCall),
        STREAM: StreamRoute(lambda call: InferenceStream(call, handlers)),
    }
    return serve(routes, handlers.memory)


@pytest.fixture
def stream(served: Any) -> Any:
    stream = Stream(served.stream(STREAM))
    yield stream
    stream.close_sending()
    stream.call.cancel()


def response(request_id: str, value: int) -> InferResponse:
    data = np.array([value], np.int32).tobytes()
    return InferResponse.of("many", "1", request_id, [Tensor("OUT", DataType.INT32, (1,), data)])


def test_responses_come_as_they_are_made(stream: Stream, models: dict[str, HandModel]) -> None:
    for request_id in ("a", "b"):
        stream.ask("many", request_id)
    first, second = models["many"].next(), models["many"].next()
    second.send(response("b", 1), False)
    assert stream.told() == ("b", 1, False)
    first.send(response("a", 2), False)
    assert stream.told() == ("a", 2, False)
    second.send(response("b", 3))
    assert stream.told() == ("b", 3, True)
    first.send(None)
    stream.close_sending()
    with pytest.raises(StopIteration):
        stream.receive()
    assert stream.call.code() is grpc.StatusCode.OK


def test_an_open_request_holds_up_no_answer_behind_it(stream: Stream, models: dict[str, HandModel]) -> None:
    stream.ask("many", "open")
    stream.ask("one", "x")
    stream.ask("one", "y")
    open_request = models["many"].next()
    x, y = models["one"].next(), models["one"].next()
    y.send(response("y", 2))
    x.send(response("x", 1))
    # Those of the other model keep their order.
    assert [stream.told()[0] for _ in range(2)] == ["x", "y"]
    open_request.send(response("open", 3))
    assert stream.told() == ("open", 3, True)


def test_the_stream_ends_behind_its_open_requests(stream: Stream, models: dict[str, HandModel]) -> None:
    stream.ask("many", "a")
    responder = models["many"].next()
    stream.close_sending()
    for value in range(3):
        responder.send(response("a", value), False)
    responder.send(None)
    assert [stream.told()[1] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(StopIteration):
        stream.receive()


def test_an_error_may_stand_between_responses(stream: Stream, models: dict[str, HandModel]) -> None:
    stream.ask("many", "a")
    responder = models["many"].next()
    responder.send(not_found("a gap"), False)
    responder.send(response("a", 1))
    error = stream.receive()
    assert (error.error_message, error.infer_response.id, error.infer_response.model_name) == ("a gap", "a", "many")
    assert error.infer_response.parameters["triton_final_response"].bool_param is False
    assert stream.told() == ("a", 1, True)


def test_a_response_that_cannot_be_encoded_becomes_an_error(
    served: Any, stream: Stream, models: dict[str, HandModel]
) -> None:
    def send(model: str, final: bool = True) -> None:
        parameters: dict[str, int] = {"n": 1 << 64}
        models[model].next().send(InferResponse.of(model, "1", "a", [], parameters), final)

    reason = "parameter 'n' is 18446744073709551616, which does not fit into 64 bits"
    future = served.unary(INFER).future(
        pb.ModelInferRequest(model_name="one").SerializeToString(), timeout=PATIENCE_SECONDS
    )
    send("one")
    assert (future.code(), future.details()) == (grpc.StatusCode.INTERNAL, reason)
    for model in ("one", "many"):
        stream.ask(model, "a")
        send(model)
        error = stream.receive()
        assert (error.error_message, error.infer_response.id) == (reason, "a")
    stream.close_sending()
    with pytest.raises(StopIteration):
        stream.receive()


def test_an_answer_that_cannot_be_typed_is_an_error(served: Any, models: dict[str, HandModel]) -> None:
    future = served.unary(INFER).future(
        pb.ModelInferRequest(model_name="one").SerializeToString(), timeout=PATIENCE_SECONDS
    )
    output = Tensor("OUT", DataType.BF16, (1,), b"\0\0")
    models["one"].next().send(replace(InferResponse.of("one", "1", "a", [output]), is_typed=True))
    assert future.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "BF16, which has no typed contents" in future.details()


def test_each_open_request_of_a_client_that_leaves_is_cancelled(stream: Stream, models: dict[str, HandModel]) -> None:
    gone, responders = [], []
    for number in range(3):
        stream.ask("many", str(number))
        responders.append(responder := models["many"].next())
        responder.watch_cancellation(lambda number=number: gone.append(number))
        responder.send(response(str(number), number), False)
        assert stream.told()[1] == number
    responder.send(None)
    stream.call.cancel()
    wait_until(lambda: sorted(gone) == [0, 1])
    late = threading.Event()
    responders[0].watch_cancellation(late.set)
    assert late.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize("name", ["many", "one"])
def test_nothing_of_an_answered_request_is_left_for_the_garbage_collector(
    stream: Stream, models: dict[str, HandModel], name: str
) -> None:
    gc.disable()
    try:
        stream.ask(name, "a")
        responder = models[name].next()
        watcher = Watcher(responder)
        responder.watch_cancellation(watcher)
        responder.send(response("a", 1))
        kept = weakref.ref(watcher)
        del responder, watcher
        assert stream.told()[1] == 1
        wait_until(lambda: kept() is None)
    finally:
        gc.enable()


def test_responses_after_the_client_left_are_dropped(stream: Stream, models: dict[str, HandModel]) -> None:
    stream.ask("many", "a")
    responder = models["many"].next()
    left = threading.Event()
    responder.watch_cancellation(left.set)
    stream.call.cancel()
    assert left.wait(PATIENCE_SECONDS)
    responder.send(response("a", 1), False)
    responder.send(ServeError(StatusCode.INTERNAL, "late"), False)
    responder.send(None)
