from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rocserve_client import (
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    Internal,
    RocserveError,
    StatusCode,
    Unavailable,
)


def numbered(number: int) -> dict[str, Any]:
    return {"A": np.array([number], np.int32)}


def test_answers_come_in_order(loopback: Any) -> None:
    with Client(loopback.address) as client, client.stream(headers={"key": "k"}) as stream:
        for number in range(5):
            stream.send("echo", numbered(number), request_id=str(number))
        stream.close_sending()
        results = list(stream)
    assert [int(result["A"][0]) for result in results] == list(range(5))
    assert [result.request_id for result in results] == ["0", "1", "2", "3", "4"]
    assert loopback.metadata[0]["key"] == "k"


def test_a_failed_request_does_not_end_the_stream(loopback: Any) -> None:
    with Client(loopback.address) as client, client.stream() as stream:
        for number, model in enumerate(("echo", "fails", "echo")):
            stream.send(model, numbered(number), request_id=f"r{number}")
        assert stream.receive()["A"].tolist() == [0]
        with pytest.raises(RocserveError, match="asked to fail") as caught:
            stream.receive()
        assert (caught.value.status, caught.value.request_id) == (StatusCode.UNKNOWN, "r1")
        assert next(stream)["A"].tolist() == [2]
        stream.send("echo", numbered(3))
        assert stream.receive()["A"].tolist() == [3]
        stream.close_sending()
        with pytest.raises(EOFError):
            stream.receive()


async def test_an_answer_that_is_no_message_is_the_servers_fault(loopback: Any) -> None:
    loopback.garbage = b"<html></html>"
    text = "the server's answer is no ModelStreamInferResponse"
    with Client(loopback.address) as client, client.stream() as stream:
        stream.send("echo", numbered(0))
        with pytest.raises(Internal, match=text):
            stream.receive()
    async with AsyncClient(loopback.address) as client, client.stream() as stream:
        await stream.send("echo", numbered(0))
        with pytest.raises(Internal, match=text):
            await stream.receive()


def test_a_request_may_have_any_number_of_answers(loopback: Any) -> None:
    with Client(loopback.address) as client, client.stream() as stream:
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


async def test_the_last_answer_is_marked_when_asked_for(loopback: Any) -> None:
    with Client(loopback.address) as client, client.stream() as stream:
        stream.send("times.2", numbered(0), mark_last=True)
        answers = [stream.receive() for _ in range(3)]
    async with AsyncClient(loopback.address) as client, client.stream() as stream:
        await stream.send("times.0", numbered(0), mark_last=True)
        answers.append(await stream.receive())
    assert [(answer.is_last, list(answer.outputs)) for answer in answers] == [
        (False, ["N"]),
        (False, ["N"]),
        (True, []),
        (True, []),
    ]


def test_a_broken_stream_raises_its_status(loopback: Any) -> None:
    with Client(loopback.address) as client, client.stream() as stream:
        stream.send("breaks", numbered(0))
        for _ in range(2):
            with pytest.raises(Unavailable, match="the stream is broken"):
                stream.receive()


async def test_nothing_is_sent_on_a_stream_that_was_closed(loopback: Any) -> None:
    text = "the stream is closed for further requests"
    with Client(loopback.address) as client, client.stream() as stream:
        stream.send("echo", numbered(0))
        stream.close_sending()
        with pytest.raises(Cancelled, match=text):
            stream.send("echo", numbered(1))
        assert [int(result["A"][0]) for result in stream] == [0]
        stream.close()
        with pytest.raises(Cancelled, match=text):
            stream.send("echo", numbered(2))
    async with AsyncClient(loopback.address) as client, client.stream() as stream:
        await stream.send("echo", numbered(0))
        await stream.close_sending()
        with pytest.raises(Cancelled, match=text):
            await stream.send("echo", numbered(1))
        assert [int(result["A"][0]) async for result in stream] == [0]


def test_a_stream_has_a_timeout(loopback: Any) -> None:
    with Client(loopback.address) as client, client.stream(timeout=0.2) as stream, pytest.raises(DeadlineExceeded):
        stream.receive()


async def test_a_stream_has_a_timeout_that_never_passes(loopback: Any) -> None:
    endless = float("inf")
    with Client(loopback.address) as client, client.stream(timeout=endless) as stream:
        stream.send("echo", numbered(1))
        assert stream.receive()["A"].tolist() == [1]
    async with AsyncClient(loopback.address) as client, client.stream(timeout=endless) as stream:
        await stream.send("echo", numbered(2))
        assert (await stream.receive())["A"].tolist() == [2]


def test_leaving_a_stream_ends_it(loopback: Any) -> None:
    with Client(loopback.address) as client:
        with client.stream() as stream:
            stream.send("echo", numbered(0))
        with pytest.raises(RocserveError) as caught:
            while True:
                stream.receive()
        assert caught.value.status is StatusCode.CANCELLED
        assert client.server_live()


async def test_asyncio_answers_come_in_order(loopback: Any) -> None:
    async with AsyncClient(loopback.address) as client, client.stream(headers={"key": "k"}) as stream:
        for number in range(5):
            await stream.send("echo", numbered(number), request_id=str(number))
        await stream.close_sending()
        results = [result async for result in stream]
    assert [int(result["A"][0]) for result in results] == list(range(5))
    assert loopback.metadata[0]["key"] == "k"


async def test_asyncio_a_failed_request_does_not_end_the_stream(loopback: Any) -> None:
    async with AsyncClient(loopback.address) as client, client.stream() as stream:
        for number, model in enumerate(("echo", "fails", "echo")):
            await stream.send(model, numbered(number), request_id=f"r{number}")
        seen: list[int] = []
        with pytest.raises(RocserveError, match="asked to fail") as caught:
            async for result in stream:
                seen.append(int(result["A"][0]))
        assert caught.value.request_id == "r1"
        await stream.close_sending()
        async for result in stream:
            seen.append(int(result["A"][0]))
        assert seen == [0, 2]
        with pytest.raises(EOFError):
            await stream.receive()


async def test_asyncio_a_broken_stream_raises_its_status(loopback: Any) -> None:
    async with AsyncClient(loopback.address) as client, client.stream() as stream:
        await stream.send("breaks", numbered(0))
        for _ in range(2):
            with pytest.raises(Unavailable, match="the stream is broken"):
                await stream.receive()
        with pytest.raises(Unavailable, match="the stream is broken"):
            await stream.send("echo", numbered(0))


async def test_asyncio_a_stream_has_a_timeout(loopback: Any) -> None:
    async with AsyncClient(loopback.address) as client, client.stream(timeout=0.2) as stream:
        with pytest.raises(DeadlineExceeded):
            await stream.receive()


async def test_asyncio_leaving_a_stream_ends_it(loopback: Any) -> None:
    async with AsyncClient(loopback.address) as client:
        async with client.stream() as stream:
            await stream.send("echo", numbered(0))
        assert await client.server_live()
        with pytest.raises(RocserveError) as caught:
            while True:
                await stream.receive()
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


async def test_asyncio_nothing_is_sent_on_a_stream_that_has_ended(loopback: Any) -> None:
    async with AsyncClient(loopback.address) as client, client.stream() as stream:
        await stream.close_sending()
        assert [result async for result in stream] == []
        with pytest.raises(Cancelled, match="the stream is closed for further requests"):
            await stream.send("echo", numbered(1))


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
