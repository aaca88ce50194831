"""HTTP requests on their way to the scheduler, and responses on their way to the client; and what calls keep after
their clients have left."""

from __future__ import annotations

import asyncio
import gzip
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from support.hand_loop import HandLoop
from support.waiting import until

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, internal
from rocserve.core.model_config import InputConfig
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest
from rocserve.core.responses import InferResponse
from rocserve.core.tensors import Tensor, encode_bytes_elements
from rocserve.frontends.http import generate
from rocserve.frontends.http.answer_bodies import JSON_ONLY, AnswerLayouts, layout_of
from rocserve.frontends.http.body import HEADER_LENGTH, LARGE_JSON, BodyReader, LargeBodies
from rocserve.frontends.http.generate import AnswerStream
from rocserve.frontends.http.infer_bodies import InferRequestReader
from rocserve.frontends.http.infer_stream import infer_stream
from rocserve.frontends.http.inference import HttpParts, HttpResponder, InferCall, InferHead
from rocserve.frontends.http.json_text import SLICE
from rocserve.frontends.http.listener import HttpListener
from rocserve.frontends.http.request import Head, Request, Response
from rocserve.frontends.http.service import HttpService
from rocserve.plane.guest_loop import GuestLoop
from rocserve.plane.loop import PlaneLoop
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.services.access import Access
from rocserve.services.methods import Method
from rocserve.settings import HttpSettings

from .conftest import LOG, Connect, Listen


def response(data: bytearray) -> InferResponse:
    return InferResponse.of("m", "1", "", [Tensor("X", DataType.UINT8, (len(data),), memoryview(data))])


class Service:
    """A stand-in for the inference service."""

    def __init__(self, answer: Callable[[HttpResponder], None]) -> None:
        self.plane = HandLoop()
        self.paths = PrivatePaths()
        self._answer = answer

    def infer(self, request: InferRequest, responder: HttpResponder) -> None:
        self._answer(responder)


def parts(answer: Callable[[HttpResponder], None] = lambda responder: None) -> Any:
    """`answer` is called with each request that is scheduled."""
    memory = RequestMemory()
    bodies, reader, layouts = BodyReader(1 << 20, memory), InferRequestReader(), AnswerLayouts()
    return SimpleNamespace(
        inference=Service(answer), memory=memory, bodies=bodies, reader=reader, layouts=layouts, forwarding=None
    )


class Call(InferCall):
    """A request with one input of three bytes, and the answers that its client receives."""

    def __init__(self, answer: Callable[[HttpResponder], None] = lambda responder: None) -> None:
        self.answers: list[Response] = []
        request: Any = SimpleNamespace(is_complete=True, data=b"abc", began_at=0.0, respond=self.answers.append)
        headers = {HEADER_LENGTH.lower(): "0"}
        inputs = [InputConfig("X", DataType.UINT8, (3,))]
        config: Any = SimpleNamespace(name="m", decoupled=False, max_batch_size=0, inputs=inputs)
        self.memory = (given := parts(answer)).memory
        self.plane: HandLoop = given.inference.plane
        head = InferHead(given, headers, "m", "", infer_stream)
        head.read(HttpSettings())
        super().__init__(head, request, config)


def stream() -> AnswerStream:
    request: Any = SimpleNamespace()
    return AnswerStream(request, parts(), None)


def test_a_request_that_cannot_be_scheduled_has_no_other_answer() -> None:
    def fail(responder: HttpResponder) -> None:
        raise KeyError("what")

    call = Call(fail)
    with pytest.raises(KeyError):
        call.begin()
    assert call.memory.used_bytes == 0
    call.send(response(bytearray(b"a")))
    assert call.answers == []


def test_a_request_takes_memory_until_it_is_answered() -> None:
    call = Call()
    call.begin()
    assert call.memory.used_bytes == 3
    call.send(response(bytearray(b"a")))
    assert call.memory.used_bytes == 0
    assert [(answer.status, answer.content_type) for answer in call.answers] == [(200, "application/octet-stream")]


def test_an_error_tells_whether_the_request_was_scheduled() -> None:
    refused = Call(lambda responder: responder.send(internal("no")))
    refused.begin()
    failed = Call()
    failed.begin()
    failed.send(internal("no"))
    assert [refused.is_refused, failed.is_refused] == [True, False]
    # KServe's client shows no text of another content type.
    assert {call.answers[0].content_type for call in (refused, failed)} == {"application/json"}


def test_there_is_room_for_one_response_only() -> None:
    call = Call()
    with pytest.raises(ServeError, match="doesn't support models with decoupled transaction policy"):
        call.expect_many()
    call.send(None)
    assert b"expected a single response, got 0" in call.answers[0].body


def test_a_client_that_has_gone() -> None:
    call = Call()
    call.begin()
    told: list[str] = []
    call.watch_cancellation(lambda: told.append("early"))
    call.leave()
    assert not told, "the caller may be in the middle of an answer"
    call.plane.turn()
    call.watch_cancellation(lambda: told.append("late"))
    call.cancel()
    call.plane.turn()
    assert told == ["early", "late"]
    assert call.memory.used_bytes == 3, "the model has it still"
    # Later responses have no receiver.
    call.send(response(bytearray(b"a")))
    assert call.answers == []
    assert call.memory.used_bytes == 0


@pytest.mark.parametrize("make", [Call, stream])
@pytest.mark.parametrize("fails", [False, True])
async def test_what_waits_for_the_client_to_leave_is_let_go_with_the_answer(make: Any, fails: bool) -> None:
    answer = make()

    def leave() -> None: ...

    answer.watch_cancellation(leave)
    gone = weakref.ref(leave)
    del leave
    if fails:
        answer.send(internal("no"))
    else:
        answer.send(response(bytearray(b"a")))
    assert gone() is None
    answer.cancel()


async def test_a_stream_of_answers() -> None:
    answers = stream()
    answers.expect_many()

    memory = bytearray(b"a")
    answers.send(replace(response(memory), slot=memory), final=False)
    memory[:] = b"x"
    answers.send(internal("no"), final=False)
    answers.send(None)
    answers.send(None)
    outcomes = [await answers.next() for _ in range(3)]
    assert isinstance(outcomes[0], InferResponse)
    assert outcomes[0].outputs[0].data == b"a", "it is on separate memory"
    assert isinstance(outcomes[1], ServeError)
    assert outcomes[2] is None


async def test_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "BACKLOG_LIMIT_BYTES", 10)
    request: Any = SimpleNamespace()
    given = parts()
    answers = AnswerStream(request, given, None)
    cancelled: list[bool] = []
    answers.watch_cancellation(lambda: cancelled.append(True))
    for _ in range(5):
        answers.send(response(bytearray(4)), final=False)
    await asyncio.sleep(0)
    outcome = await answers.next()
    assert isinstance(outcome, ServeError)
    assert outcome.code is StatusCode.RESOURCE_EXHAUSTED
    assert await answers.next() is None
    given.inference.plane.turn()
    assert cancelled == [True]


LOAD = b"POST /v2/repository/models/m/load HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"


async def test_a_load_goes_on_without_its_client_and_counts_as_long(listen: Listen, connect: Connect) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def load(request: Any) -> pb.RepositoryModelLoadResponse:
        begun.set()
        await may_end.wait()
        return pb.RepositoryModelLoadResponse()

    memory = RequestMemory()
    methods = {"RepositoryModelLoad": Method(pb.RepositoryModelLoadRequest, load, is_slow=True)}
    inference: Any = SimpleNamespace()
    access = Access({}, None, ())
    parts = HttpParts(inference, methods, lambda name, version: None, memory, LargeBodies(), HttpSettings())
    service = HttpService(parts, access, LOG)
    left = asyncio.Event()

    def handle(request: Request) -> None:
        service.handle(request)
        request.on_gone = left.set

    port = await listen(HttpListener(handle, LOG))
    body = json.dumps({"parameters": {"config": "x" * 10_000}}).encode()
    _, writer = await connect(port, LOAD % (len(body), body))
    await begun.wait()
    writer.close()
    await left.wait()
    assert memory.requests.own_bytes == len(body)
    may_end.set()
    await until(lambda: memory.requests.own_bytes == 0)


async def test_a_large_message_that_is_forwarded_is_not_read_beside_other_requests(
    listen: Listen, connect: Connect
) -> None:
    forwarded: list[bytes] = []

    async def forward(request: bytes) -> pb.RepositoryModelLoadResponse:
        forwarded.append(request)
        return pb.RepositoryModelLoadResponse()

    def read(request: Any) -> None:
        raise AssertionError("a message of which only the bytes are needed")

    method = Method(pb.RepositoryModelLoadRequest, read, is_slow=True, answer_serialised=forward)
    inference: Any = SimpleNamespace()
    large = LargeBodies()
    methods = {"RepositoryModelLoad": method}
    parts = HttpParts(inference, methods, lambda name, version: None, RequestMemory(), large, HttpSettings())
    service = HttpService(parts, Access({}, None, ()), LOG)
    port = await listen(HttpListener(service.handle, LOG))
    config = "x" * (LARGE_JSON + 1)
    body = json.dumps({"parameters": {"config": config}}).encode()
    reader, _ = await connect(port, LOAD % (len(body), body))
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
    message = pb.RepositoryModelLoadRequest.FromString(forwarded[0])
    assert (message.model_name, message.parameters["config"].string_param) == ("m", config)


class Sink:
    """A client's wire: the bytes sent to it, and the turns that others had by then."""

    def __init__(self, turns_so_far: Callable[[], int]) -> None:
        self.ends_at = float("inf")
        self.turns: list[int] = []
        self.written: list[bytes] = []
        self._turns_so_far = turns_so_far

    def check_open(self) -> None: ...

    def write(self, data: bytes) -> None:
        self.turns.append(self._turns_so_far())
        self.written.append(bytes(data))

    async def drain(self) -> None: ...


@cache
def many_texts() -> InferResponse:
    texts = encode_bytes_elements([b"abc"] * 500_000)
    return InferResponse.of("m", "1", "", [Tensor("X", DataType.BYTES, (500_000,), texts)])


@pytest.mark.parametrize("answers", ["generate", "generate_stream", "infer", "gzip"])
async def test_others_have_their_turn_while_many_texts_are_written_as_json(
    plane: PlaneLoop, guest: GuestLoop, answers: str
) -> None:
    turns = [0]
    client: Any = Sink(lambda: turns[0])
    inference: Any = SimpleNamespace(plane=plane, paths=PrivatePaths())
    head = Head(keeps_alive=True, headers={"accept-encoding": "gzip" if answers == "gzip" else ""})
    request = Request(client, HttpListener(lambda request: None, LOG).serving, lambda request: None, head)
    given: Any = SimpleNamespace(inference=inference, memory=RequestMemory(), layouts=AnswerLayouts())

    async def count_turns() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def answer() -> None:
        if answers.startswith("generate"):
            responder = AnswerStream(request, given, None)
            responder.send(many_texts())
            first = await responder.next()
            send = generate._send_events if answers == "generate_stream" else generate._only_response
            assert await send(request, first, responder, inference) is None
            return
        config: Any = SimpleNamespace(name="m", decoupled=False, max_batch_size=0, inputs=())
        head = InferHead(given, request.head.headers, "m", "", infer_stream)
        head.read(HttpSettings())
        call = InferCall(head, request, config)
        await call._send(many_texts(), layout_of(many_texts(), JSON_ONLY, given.layouts))

    async def work() -> int:
        counting = asyncio.get_running_loop().create_task(count_turns())
        await answer()
        counting.cancel()
        return turns[0]

    await guest.run(work())
    assert client.turns[0] > 500_000 // SLICE // 10, "before the first byte, for all may still be refused"
    body = b"".join(client.written).partition(b"\r\n\r\n")[2]
    plain = gzip.decompress(body) if answers == "gzip" else body
    assert plain.count(b'"abc"') == 500_000
