"""Connections: limits, the end, ports that cannot be had."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import resource

import pytest
from aiohttp import web

from rocserve.frontends.http.listener import ConnectionLimits, HttpListener, binding_refusal

LOG = logging.getLogger("test")
REQUEST = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"


class Gate:
    """A handler whose answers wait until it is opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def answer(self, request: web.BaseRequest) -> web.Response:
        if request.rel_url.raw_path == "/wait":
            try:
                await self.open.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return web.Response(body=b"answer")


async def ask(port: int, path: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST % path)
    return reader, writer


async def test_the_end_waits_for_open_requests() -> None:
    gate = Gate()
    listener = HttpListener(gate.answer, LOG)
    port = await listener.start("127.0.0.1", 0)
    reader, writer = await ask(port, b"wait")
    idle_reader, idle_writer = await ask(port, b"at-once")
    assert (await idle_reader.readuntil(b"answer")).startswith(b"HTTP/1.1 200 OK\r\n")
    ending = asyncio.ensure_future(listener.stop(20.0))
    await asyncio.sleep(0.1)
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", port)
    # A connection that was open is still answered.
    idle_writer.write(REQUEST % b"again")
    assert b"Connection: close\r\n" in await idle_reader.readuntil(b"answer")
    gate.open.set()
    head = await reader.readuntil(b"answer")
    assert b"Server: rocserve\r\n" in head
    await ending
    assert await idle_reader.read() == b""
    for open_writer in (writer, idle_writer):
        open_writer.close()
    await listener.stop(0)


async def test_the_end_waits_no_longer_than_it_may() -> None:
    gate = Gate()
    listener = HttpListener(gate.answer, LOG)
    port = await listener.start("127.0.0.1", 0)
    reader, writer = await ask(port, b"wait")
    await asyncio.sleep(0.1)
    await listener.stop(0.05)
    assert gate.cancelled.is_set()
    assert await reader.read() == b""
    writer.close()


async def test_a_client_that_goes_away_cancels_its_request() -> None:
    gate = Gate()
    listener = HttpListener(gate.answer, LOG)
    port = await listener.start("127.0.0.1", 0)
    _, writer = await ask(port, b"wait")
    await asyncio.sleep(0.1)
    writer.close()
    async with asyncio.timeout(10):
        await gate.cancelled.wait()
    await listener.stop(0)


async def test_a_client_that_is_gone_when_its_answer_begins_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    refused = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        response = web.StreamResponse()
        try:
            await response.prepare(request)
        except ConnectionError:
            refused.set()
            raise
        return response

    listener = HttpListener(answer, LOG)
    reader, writer = await ask(await listener.start("127.0.0.1", 0), b"")
    assert await reader.read() == b""
    assert refused.is_set()
    writer.close()
    await listener.stop(1.0)
    assert caplog.messages == []


async def test_one_connection_too_many() -> None:
    listener = HttpListener(Gate().answer, LOG, ConnectionLimits(most=1))
    port = await listener.start("127.0.0.1", 0)
    reader, writer = await ask(port, b"x")
    await reader.readuntil(b"answer")
    other, other_writer = await asyncio.open_connection("127.0.0.1", port)
    with pytest.raises(ConnectionError):
        assert await other.read() == b""
        raise ConnectionResetError
    other_writer.close()
    writer.close()
    await listener.stop(0)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (
            errno.EADDRINUSE,
            "cannot serve HTTP at 1.2.3.4:80: Address already in use; name another with --http-port, or switch HTTP off"
            " with --allow-http=false",
        ),
        (
            errno.EADDRNOTAVAIL,
            "cannot serve HTTP at 1.2.3.4:80: Cannot assign requested address; name an address of this machine with"
            " --http-address",
        ),
    ],
)
def test_ports_that_cannot_be_had(number: int, text: str) -> None:
    with pytest.raises(OSError, match=re.escape(text)) as caught:
        raise binding_refusal("HTTP", "1.2.3.4", 80, OSError(number, "?"), "http")
    assert caught.value.errno == number


async def test_the_last_descriptors_are_kept_for_the_server(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open("/dev/null", os.O_RDONLY)
    os.close(probe)
    # A quarter is kept: of the next eight descriptors some are above that.
    resource.setrlimit(resource.RLIMIT_NOFILE, ((probe + 8) * 4 // 3, hard))
    try:
        listener = HttpListener(Gate().answer, LOG)
        port = await listener.start("127.0.0.1", 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    writers, answers = [], []
    for _ in range(8):
        reader, writer = await ask(port, b"at-once")
        writers.append(writer)
        try:
            answers.append(await reader.read(15))
        except ConnectionResetError:
            answers.append(b"")
    assert answers[0] == b"HTTP/1.1 200 OK"
    assert answers[-1] == b""
    assert [text.partition(":")[0] for text in caplog.messages] == ["connections are closed at once"]
    # What leaves makes room.
    for writer in writers:
        writer.close()
    await asyncio.sleep(0.1)
    reader, writer = await ask(port, b"at-once")
    assert await reader.read(15) == b"HTTP/1.1 200 OK"
    writer.close()
    await listener.stop()
