"""Both ends of a front end's link, on two loops of this process, between clients and a service of the test."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.exchange import Exchange, Responder
from rocserve.core.memo import Memo
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.requests import InferRequest, InputHead, RequestedOutput, RequestHead
from rocserve.core.responses import LARGE_RESPONSE, Answer, InferResponse
from rocserve.core.tensors import Tensor
from rocserve.frontends.grpc.service import ServerRoutes
from rocserve.frontends.grpc.transport import StreamCall, StreamRoute, UnaryCall, UnaryRoute, full_name
from rocserve.frontends.processes.front_end import RemoteInference
from rocserve.frontends.processes.server_end import FrontLink
from rocserve.plane.heap import Heap, HeapReader, SharedHeap, Slot
from rocserve.plane.loop import PlaneLoop
from rocserve.services.inference import RequestOrigin

LOG = logging.getLogger("rocserve.test.front_link")
TOGETHER = 3
"""Requests of a batch."""


class Client:
    """Waits for answers in the front end."""

    protocol = "GRPC"

    def __init__(self, takes_one: bool) -> None:
        self.takes_one = takes_one
        self.responses: list[InferResponse] = []
        self.errors: list[ServeError] = []
        self.many = False
        self.ended = threading.Event()
        self.on_leave: Callable[[], None] | None = None
        self.held_bytes = 0

    def origin(self) -> RequestOrigin:
        return RequestOrigin("GRPC", (1, 2), {"a": "b"}, "10.0.0.1")

    def expect_many(self) -> None:
        self.many = True

    def send(self, answer: Answer, final: bool = True) -> None:
        if isinstance(answer, ServeError):
            self.errors.append(answer)
        elif answer is not None:
            answer.data = [bytes(data) for data in answer.data]
            self.responses.append(answer)
        if final:
            self.ended.set()

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        self.on_leave = callback


class Service:
    """Answers as the request's model name says."""

    def __init__(self) -> None:
        self.requests: list[InferRequest] = []
        self.left = threading.Event()
        self.refusals: list[tuple[ServeError, str]] = []
        self.origins: list[RequestOrigin] = []
        self.failure: ServeError = invalid_argument("no \N{SNOWMAN}")
        self.heap: SharedHeap | None = None
        self.outputs = Heap("outputs", 1 << 24)
        self.reader = HeapReader(self.outputs.open_for_reading())
        self.returned: list[int] = []
        self.went_together: bool | None = None

    def heap_for(self, head: RequestHead) -> SharedHeap | None:
        return self.heap

    def refuse(self, error: ServeError, find_id: Callable[[], str]) -> None:
        self.refusals.append((error, find_id()))

    def infer(self, request: InferRequest, responder: Responder) -> None:
        self.origins.append(responder.origin())  # type: ignore[attr-defined]
        name = request.head.model_name
        if name == "fail":
            responder.send(self.failure)
        elif name == "many":
            responder.expect_many()
            for count in range(3):
                responder.send(self._echo(request), final=False)
                assert count < 3
            responder.send(None)
        elif name == "large":
            response = self._echo(request)
            response.is_large = True
            responder.send(response)
        elif name == "grow":
            grown = Tensor("O", DataType.INT32, (LARGE_RESPONSE // 4,), bytes(LARGE_RESPONSE))
            response = InferResponse.of(name, "1", request.id, [grown], dict(request.head.parameters))
            response.is_large = True
            responder.send(response)
        elif name == "placed":
            responder.send(self._placed(request))
        elif name == "together":
            self.requests.append(request)
            request.exchange = Exchange(responder)
            if len(self.requests) == TOGETHER:
                self._answer_together()
        elif name == "break":
            raise ValueError("a fault of the server's own")
        elif name == "never":
            request.exchange = Exchange(responder)
            responder.watch_cancellation(self.left.set)
            self.requests.append(request)
        else:
            responder.send(self._echo(request))

    def _answer_together(self) -> None:
        """An echo of one batch, as a worker leaves it."""
        first = self._echo(self.requests[0])
        sizes = [len(data) for data in first.data]
        nbytes = sum(sizes)
        offset = self.outputs.allocate(TOGETHER * nbytes)[0]
        places: list[int] = []
        for index, request in enumerate(self.requests):
            begins = [*itertools.accumulate(sizes[:-1], initial=index * nbytes)]
            places += [request.exchange.client.token, *begins]  # type: ignore[attr-defined]
            for begin, data in zip(begins, request.data, strict=True):
                self.outputs.view(offset + begin, len(data))[:] = data
        link = self.requests[0].exchange.client.link  # type: ignore[attr-defined]
        slot = Slot(self.returned.append, offset, self.reader)
        self.went_together = link.answer_together(first.head, slot, TOGETHER * nbytes, places)
        self.requests.clear()

    def _placed(self, request: InferRequest) -> InferResponse:
        """The echo as a worker leaves it."""
        response = self._echo(request)
        places = [self.outputs.allocate(len(data))[0] for data in response.data]
        for place, data in zip(places, response.data, strict=True):
            self.outputs.view(place, len(data))[:] = data
        response.data = [self.reader.view(place, len(data)) for place, data in zip(places, response.data, strict=True)]
        response.slot = Slot(self.returned.append, places[0], self.reader)
        return response

    def _echo(self, request: InferRequest) -> InferResponse:
        tensors = [
            Tensor(head.name, DataType(head.datatype), head.shape, data)
            for head, data in zip(request.head.inputs, request.data, strict=True)
        ]
        return InferResponse.of(request.head.model_name, "1", request.id, tensors, dict(request.head.parameters))


class Watch:
    """A stream's watch in the server."""

    def __init__(self, call: StreamCall, ends: Ends) -> None:
        self._call = call
        self._watches = ends.watches
        self.asked = b""

    def on_message(self, message: bytes) -> None:
        self.asked = message
        self._watches.append(self)

    def on_cancel(self) -> None:
        self._watches.remove(self)


class Ends:
    def __init__(self, heads: Memo[bytes, RequestHead] | None = None) -> None:
        self.service = Service()
        self.server, self.front = PlaneLoop(LOG), PlaneLoop(LOG)
        servers, fronts = socket.socketpair()
        self.reasons: list[str] = []
        self.server_gone = threading.Event()
        self.calls: list[UnaryCall] = []
        self.checked_calls: list[UnaryCall] = []
        self.watches: list[Watch] = []
        """Open watches."""
        self.listening: list[tuple[int, str]] = []
        self.worked: list[int] = []
        self.to_front: list[tuple[int, int]] = []
        """Kind and number of messages that belong to no exchange."""
        watch = StreamRoute(lambda call: Watch(call, self))
        routes = {"/a/B": UnaryRoute(self.calls.append), full_name("Watch"): watch}
        self.link = FrontLink(
            servers,
            self.server,
            self.service,  # type: ignore[arg-type]
            ServerRoutes(routes, {"/a/B": UnaryRoute(self.checked_calls.append)}),
            Memo() if heads is None else heads,
            lambda number, text: self.listening.append((number, text)),
            self.worked.append,
            self.reasons.append,
            LOG,
        )
        self.remote = RemoteInference(
            fronts, self.front, PrivatePaths(()), LOG, lambda *told: self.to_front.append(told), self.server_gone.set
        )
        self.connection = fronts
        self.front.add_source(self.remote)
        self.link.open()
        self.server.start()
        self.front.start()

    def ask(self, request: InferRequest) -> Client:
        client = Client(not request.in_turn)
        self.front.call_soon(lambda: self.remote.infer(request, client))
        return client

    def close(self) -> None:
        self.front.stop()
        self.server.call_soon(self.link.close)
        self.server.stop()


def request_of(name: str, *arrays: np.ndarray, **fields: object) -> InferRequest:
    inputs = tuple(InputHead(f"I{i}", "INT32", array.shape, {"k": i}) for i, array in enumerate(arrays))
    head = RequestHead(name, "", inputs, (RequestedOutput("O", {"classification": 2}),), {"p": True, "q": 1.5})
    return InferRequest(head, data=[memoryview(array.tobytes()) for array in arrays], **{"id": "r", **fields})  # type: ignore[arg-type]
