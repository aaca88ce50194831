from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from rocserve_client import (
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    InferResult,
    Internal,
    RocserveError,
    StatusCode,
    Unavailable,
)
from rocserve_client.async_stream import AsyncStream
from rocserve_client.stream import Stream


def numbered(number: int) -> dict[str, Any]:
    return {"A": np.array([number], np.int32)}


class AsyncioStream:
    """A stream of the asyncio client with the methods of the blocking one."""

    def __init__(self, runner: asyncio.Runner, stream: AsyncStream) -> None:
        self._run = runner.run
        self._stream = stream

    def send(self, *arguments: Any, **named: Any) -> None:
        self._run(self._stream.send(*arguments, **named))

    def receive(self) -> InferResult:
        return self._run(self._stream.receive())

    def close_sending(self) -> None:
        self._run(self._stream.close_sending())

    def close(self) -> None:
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        self._run(self._stream.__aexit__())

    def __iter__(self) -> Iterator[InferResult]:
        return self

    def __next__(self) -> InferResult:
        try:
            return self._run(anext(self._stream))
        except StopAsyncIteration:
            raise StopIteration from None


@contextmanager
def blocking_stream(address: str, **options: Any) -> Iterator[Stream]:
    with Client(address) as client:
        with client.stream(**options) as stream:
            yield stream
        assert client.server_live()


@contextmanager
def asyncio_stream(address: str, **options: Any) -> Iterator[AsyncioStream]:
    async def opened() -> tuple[AsyncClient, AsyncStream]:
        client = AsyncClient(address)
        return client, await client.stream(**options).__aenter__()

    with asyncio.Runner() as runner:
        client, stream = runner.run(opened())
        yield AsyncioStream(runner, stream)
        runner.run(stream.__aexit__())
        assert runner.run(client.server_live())
        runner.run(client.close())


@pytest.fixture(params=[blocking_stream, asyncio_stream], ids=["blocking", "asyncio"])
def stream_of(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_answers_come_in_order(loopback: Any, stream_of: Any) -> None:
    with stream_of(loopback.address, headers={"key": "k"}) as stream:
        for number in range(5):
            stream.send("echo", numbered(number), request_id=str(number))
        stream.close_sending()
        results = list(stream)
    assert [int(result["A"][0]) for result in results] == list(range(5))
    assert [result.request_id for result in results] == ["0", "1", "2", "3", "4"]
    assert loopback.metadata[0]["key"] == "k"


def test_a_failed_request_does_not_end_the_stream(loopback: Any, stream_of: Any) -> None:
    with stream_of(loopback.address) as stream:
        for number, model in enumerate(("echo", "fails", "echo")):
            stream.send(model, numbered(number), request_id=f"r{number}")
        assert stream.receive()["A"].tolist() == [0]
        with pytest.raises(RocserveError, match="asked to fail") as caught:
            next(stream)
        assert (caught.value.status, caught.value.request_id) == (StatusCode.UNKNOWN, "r1")
        assert next(stream)["A"].tolist() == [2]
        stream.send("echo", numbered(3))
        assert stream.receive()["A"].tolist() == [3]
        stream.close_sending()
        with pytest.raises(EOFError):
            stream.receive()


def test_an_answer_that_is_no_message_is_the_servers_fault(loopback: Any, stream_of: Any) -> None:
    loopback.garbage = b"<html></html>"
    with stream_of(loopback.address) as stream:
        stream.send("echo", numbered(0))
        with pytest.raises(Internal, match="expected a ModelStreamInferResponse from the server"):
            stream.receive()
        loopback.garbage = b""


def test_a_request_may_have_any_number_of_answers(loopback: Any, stream_of: Any) -> None:
    with stream_of(loopback.address) as stream:
        stream.send("times.3", numbered(0), request_id="three")
        stream.send("times.0", numbered(0), request_id="none")
        stream.send("times.1", numbered(0), request_id="one")
        stream.close_sending()
        results = list(stream)
    assert [(result.request_id, int(result["N"][0])) for result in results] == [
        ("three", 0),
        ("three", 1),
        ("three", 2),
        ("one", 0),
    ]
    assert not any(result.is_last for result in results)


@pytest.mark.parametrize("count", [0, 2])
def test_the_last_answer_is_marked_when_asked_for(loopback: Any, stream_of: Any, count: int) -> None:
    with stream_of(loopback.address) as stream:
        stream.send(f"times.{count}", numbered(0), mark_last=True)
        answers = [stream.receive() for _ in range(count + 1)]
    assert [(answer.is_last, list(answer.outputs)) for answer in answers] == [*[(False, ["N"])] * count, (True, [])]


def test_a_broken_stream_raises_its_status(loopback: Any, stream_of: Any) -> None:
    with stream_of(loopback.address) as stream:
        stream.send("breaks", numbered(0))
        for _ in range(2):
            with pytest.raises(Unavailable, match="the stream is broken"):
                stream.receive()
        if isinstance(stream, AsyncioStream):
            with pytest.raises(Unavailable, match="the stream is broken"):
                stream.send("echo", numbered(0))


def test_nothing_is_sent_on_a_stream_that_was_closed(loopback: Any, stream_of: Any) -> None:
    text = "the stream is closed for further requests"
    with stream_of(loopback.address) as stream:
        stream.send("echo", numbered(0))
        stream.close_sending()
        with pytest.raises(Cancelled, match=text):
            stream.send("echo", numbered(1))
        assert [int(result["A"][0]) for result in stream] == [0]
        # It has ended.
        with pytest.raises(Cancelled, match=text):
            stream.send("echo", numbered(1))
        stream.close()
        with pytest.raises(Cancelled, match=text):
            stream.send("echo", numbered(2))


def test_a_stream_has_a_timeout(loopback: Any, stream_of: Any) -> None:
    with stream_of(loopback.address, timeout=0.2) as stream, pytest.raises(DeadlineExceeded):
        stream.receive()


def test_a_stream_has_a_timeout_that_never_passes(loopback: Any, stream_of: Any) -> None:
    with stream_of(loopback.address, timeout=float("inf")) as stream:
        stream.send("echo", numbered(1))
        assert stream.receive()["A"].tolist() == [1]


def test_leaving_a_stream_ends_it(loopback: Any, stream_of: Any) -> None:
    with stream_of(loopback.address) as stream:
        stream.send("echo", numbered(0))
        stream.__exit__(None, None, None)
        with pytest.raises(RocserveError) as caught:
            while True:
                stream.receive()
        assert caught.value.status is StatusCode.CANCELLED


async def test_what_is_asked_of_a_closed_client_is_cancelled(loopback: Any) -> None:
    text = "the client or the stream was closed"
    client = Client(loopback.address)
    assert client.server_live()
    client.close()
    with pytest.raises(Cancelled, match=text):
        client.server_live()
    with pytest.raises(Cancelled, match=text):
        client.stream()
    asking = AsyncClient(loopback.address)
    assert await asking.server_live()
    await asking.close()
    with pytest.raises(Cancelled, match=text):
        await asking.server_live()
    with pytest.raises(Cancelled, match=text):
        asking.stream()


async def test_asyncio_a_close_is_no_cancellation_of_the_task(loopback: Any) -> None:
    client = AsyncClient(loopback.address)
    stream = client.stream()
    receiving = asyncio.ensure_future(stream.receive())
    inferring = asyncio.ensure_future(client.infer("slow", numbered(0)))
    await asyncio.sleep(0.1)
    await client.close()
    for waiting in (receiving, inferring):
        with pytest.raises(Cancelled):
            await waiting


async def test_asyncio_a_cancelled_task_ends_its_call(loopback: Any) -> None:
    async with AsyncClient(loopback.address) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.infer("slow", numbered(0)), 0.2)
        inferring = asyncio.ensure_future(client.infer("slow", numbered(0)))
        await asyncio.sleep(0.1)
        inferring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await inferring
        assert await client.server_live()
