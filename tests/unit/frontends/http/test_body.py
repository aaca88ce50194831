"""Bounds of HTTP bodies, whatever their client announces; and content encodings: accepted, chosen, decoded."""

from __future__ import annotations

import asyncio
import gzip
import threading
import zlib
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.waiting import PATIENCE_SECONDS, until

from rocserve.core.errors import ServeError
from rocserve.core.request_memory import Holding, Pool, RequestMemory
from rocserve.core.tensors import Buffer
from rocserve.frontends.http import body as body_module
from rocserve.frontends.http import request as request_module
from rocserve.frontends.http.body import (
    BodyReader,
    accepted_stream,
    compressed,
    decompressed,
    request_encoding,
    response_encoding,
)
from rocserve.frontends.http.listener import HttpListener
from rocserve.frontends.http.request import HttpError, Request, Response

from .conftest import LOG, Connect, Listen

NOT_COMPRESSED = "the request's body is not valid gzip or deflate data:"
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"Content-Length: 10\r\n\r\n0123456789", b"0123456789"),
        (b"Content-Length: 11\r\n\r\n0123456789a", b"request JSON size of 11 bytes exceeds"),
        (b"Transfer-Encoding: chunked\r\n\r\na\r\n0123456789\r\n0\r\n\r\n", b"0123456789"),
        (b"Transfer-Encoding: chunked\r\n\r\nb\r\n0123456789a\r\n0\r\n\r\n", b"request JSON size of 11 bytes exceeds"),
    ],
)
@pytest.mark.parametrize("pause", [0.0, 0.05], ids=["at once", "later"])
async def test_no_more_is_taken_than_may_be(
    sent: bytes, told: bytes, pause: float, listen: Listen, connect: Connect
) -> None:
    bodies = BodyReader(10, RequestMemory())

    async def answer(request: Request) -> Response:
        try:
            return Response(200, bytes(await bodies.read(request, Holding())), "text/plain")
        except ServeError as error:
            return Response(200, error.text.encode(), "text/plain")

    port = await listen(HttpListener(lambda request: request.run(answer(request)), LOG))
    head, end, body = sent.partition(b"\r\n\r\n")
    reader, writer = await connect(port, HEAD + (head + end if pause else sent))
    if pause:
        await asyncio.sleep(pause)
        writer.write(body)
    answered = await asyncio.wait_for(reader.readuntil(told), PATIENCE_SECONDS)
    assert answered.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("has_length", [True, False], ids=["promised", "chunked"])
@pytest.mark.parametrize("has_memory", [True, False])
async def test_a_large_body_stays_where_it_is_while_it_grows(
    has_length: bool, has_memory: bool, monkeypatch: pytest.MonkeyPatch, listen: Listen, connect: Connect
) -> None:
    monkeypatch.setattr(request_module, "_LARGEST_GROWING", 1 << 20)
    monkeypatch.setattr(request_module, "_BYTES_BEFORE_ROOM", 1 << 20)
    if not has_memory:
        monkeypatch.setattr(request_module, "np", SimpleNamespace(empty=no_memory, uint8=np.uint8))
    bodies = BodyReader(1 << 24, RequestMemory())
    sent = Random(1).randbytes(4 << 20)
    places: set[int] = set()
    arrived: list[bytes] = []

    async def answer(request: Request) -> Response:
        def note(nbytes: int) -> None:
            if nbytes > 2 << 20:
                places.add(np.frombuffer(request.data, np.uint8).ctypes.data)

        monkeypatch.setattr(Pool, "admit", lambda pool, holder, nbytes: note(len(request.data)))
        arrived.append(bytes(await bodies.read(request, Holding())))
        return Response(200, b"end", "text/plain")

    port = await listen(HttpListener(lambda request: request.run(answer(request)), LOG))
    form = b"Content-Length: %d\r\n\r\n%b" if has_length else b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
    reader, _ = await connect(port, HEAD + form % (len(sent), sent))
    await asyncio.wait_for(reader.readuntil(b"end"), PATIENCE_SECONDS)
    assert arrived == [sent]
    assert len(places) == 1 or not has_memory


async def test_a_promise_alone_takes_no_memory(
    monkeypatch: pytest.MonkeyPatch, listen: Listen, connect: Connect
) -> None:
    taken: list[int] = []

    def empty(nbytes: int, dtype: type) -> np.ndarray:
        taken.append(nbytes)
        return np.empty(nbytes, dtype)

    monkeypatch.setattr(request_module, "np", SimpleNamespace(empty=empty, uint8=np.uint8))
    requests: list[Request] = []
    port = await listen(HttpListener(requests.append, LOG))
    _, writer = await connect(port, HEAD + b"Content-Length: %d\r\n\r\n" % (1 << 30))
    for byte in (b"a", b"b", b"c"):
        writer.write(byte)
        await writer.drain()
        await asyncio.sleep(0.05)
    await until(lambda: requests and len(requests[0].data) == 3)
    assert requests[0].data == b"abc"
    assert taken == []


def no_memory(*shape: object) -> None:
    raise MemoryError


async def test_a_body_that_comes_byte_by_byte_is_given_up(listen: Listen, connect: Connect) -> None:
    bodies = BodyReader(1 << 20, RequestMemory(), body_seconds=0.5)

    async def answer(request: Request) -> Response:
        try:
            return Response(200, bytes(await bodies.read(request, Holding())), "text/plain")
        except HttpError as error:
            return Response(error.status, error.text.encode(), "text/plain")

    port = await listen(HttpListener(lambda request: request.run(answer(request)), LOG))
    reader, writer = await connect(port, HEAD + b"Content-Length: 100000\r\n\r\n")

    async def trickle() -> None:
        while True:
            writer.write(b"0")
            await asyncio.sleep(0.05)

    trickling = asyncio.create_task(trickle())
    told = await asyncio.wait_for(reader.readuntil(b"64 KiB received"), PATIENCE_SECONDS)
    trickling.cancel()
    assert told.startswith(b"HTTP/1.1 408 ")
    assert b"request body not fully received" in told


async def test_little_that_becomes_much_is_decompressed_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def noted(data: bytes, limit: int) -> bytearray:
        threads.append(threading.get_ident())
        return decompressed(data, limit)

    monkeypatch.setattr(body_module, "decompressed", noted)
    plain = bytes(8 << 20)
    request: Any = SimpleNamespace(is_complete=True, data=gzip.compress(plain))
    reader = BodyReader(len(plain), RequestMemory())
    assert await reader.read_compressed(request, Holding()) == plain
    assert threads != [threading.get_ident()]


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        (None, "identity"),
        ("", "identity"),
        ("gzip", "gzip"),
        (" gzip", "gzip"),
        ("gzip, deflate", "gzip"),
        ("deflate, gzip", "deflate"),
        ("gzip;q=0.5, deflate", "deflate"),
        ("deflate ; q=0.2, gzip; q=0.5", "gzip"),
        ("gzip;q=0", "identity"),
        ("gzip;q=x, deflate;q=0.1", "deflate"),
        ("identity, gzip", "identity"),
        ("br", "identity"),
        ("*", "identity"),
        ("GZIP", "identity"),
    ],
)
def test_the_encoding_of_an_answer(accepted: str | None, chosen: str) -> None:
    assert response_encoding(accepted) == chosen


@pytest.mark.parametrize(
    ("accepted", "stream", "takes_json"),
    [
        ("", "", False),
        ("*/*", "", True),
        ("application/json", "", True),
        ("application/x-ndjson", "application/x-ndjson", False),
        ("text/event-stream, application/x-ndjson, */*", "text/event-stream", True),
        ("text/event-stream;q=0.5, Application/X-NDJSON ; Q = 0.8", "application/x-ndjson", False),
        ("text/event-stream;q=0, application/x-ndjson", "application/x-ndjson", False),
        ("text/event-stream;q=0.0", "", False),
        ("text/event-stream;charset=utf-8;q=0.000, application/json", "", True),
        ("text/event-stream, */*;q=0", "text/event-stream", False),
        ("text/event-stream, application/json;q=0, */*", "text/event-stream", False),
        ("text/event-stream;q=x", "text/event-stream", False),
    ],
)
def test_the_stream_that_a_client_accepts(accepted: str, stream: str, takes_json: bool) -> None:
    assert accepted_stream(accepted) == (stream, takes_json)


def test_the_encoding_of_a_request() -> None:
    assert request_encoding("identity") == "identity"
    assert request_encoding("deflate") == "deflate"
    with pytest.raises(HttpError, match="Unsupported compression type") as caught:
        request_encoding("br")
    assert caught.value.status == 501
    assert caught.value.headers == {"Accept-Encoding": "gzip, deflate"}


def test_both_ways() -> None:
    assert gzip.decompress(zipped([b"a", memoryview(b"b")], "gzip")) == b"ab"
    assert zlib.decompress(zipped([b"a", b"b"], "deflate")) == b"ab"
    for encoding in ("gzip", "deflate"):
        assert decompressed(zipped([b"abc"], encoding), 3) == b"abc"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "nothing to be decompressed"),
        (b"no gzip", "the request's body is not valid gzip or deflate data: Error -3"),
        (gzip.compress(b"abc")[:-1], f"{NOT_COMPRESSED} it is cut off"),
        (gzip.compress(b"abc")[:-8], f"{NOT_COMPRESSED} it is cut off"),
        (zlib.compress(b"abc")[:-1], f"{NOT_COMPRESSED} it is cut off"),
        (gzip.compress(b"abc")[:-8] + bytes(8), f"{NOT_COMPRESSED} Error -3 while decompressing data: incorrect data"),
        (gzip.compress(b"abc") + gzip.compress(b"def"), f"{NOT_COMPRESSED} trailing data after the compressed stream"),
        (zlib.compress(b"abc") + b"d", f"{NOT_COMPRESSED} trailing data after the compressed stream"),
        (gzip.compress(b"abc") + bytes(1 << 20), f"{NOT_COMPRESSED} trailing data after the compressed stream"),
        (
            gzip.compress(bytes(100_000_000)),
            "Decompressed data size exceeds the maximum allowed value of 1000 bytes. Use --http-max-input-size to",
        ),
    ],
    ids=["none", "other", "end", "trailer", "deflate's end", "checksum", "second", "byte", "much behind", "large"],
)
def test_what_cannot_be_decompressed(data: bytes, text: str) -> None:
    with pytest.raises(ServeError) as caught:
        decompressed(data, 1000)
    assert caught.value.text.startswith(text)


def zipped(parts: list[Buffer], encoding: str) -> bytes:
    return b"".join(compressed(parts, encoding))


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    "plain", [bytes(5 << 20), Random(1).randbytes(3 << 20), b"ab" * (1 << 20)], ids=["zeros", "noise", "even"]
)
def test_little_is_compressed_and_decompressed_at_once(
    encoding: str, plain: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    given: list[int] = []

    class Stream:
        """Counts what the calls of zlib take and give, because each copies while it holds up all other threads."""

        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

        def compress(self, data: Buffer) -> bytes:
            taken.append(len(data))
            return self._note(self._stream.compress(data))

        def decompress(self, data: Buffer, most: int) -> bytes:
            taken.append(len(data))
            return self._note(self._stream.decompress(data, most))

        def _note(self, made: bytes) -> bytes:
            given.append(len(made))
            return made

    for name in ("compressobj", "decompressobj"):
        made = getattr(zlib, name)
        monkeypatch.setattr(zlib, name, lambda *given, made=made, **named: Stream(made(*given, **named)))
    packed = zipped([plain], encoding)
    assert decompressed(packed, len(plain)) == plain
    assert max(taken) <= 1 << 20
    assert max(given) <= 1.1 * (1 << 20)
    with pytest.raises(ServeError, match="exceeds the maximum allowed value"):
        decompressed(packed, len(plain) - 1)
