"""Connections: limits, the server's end, ports that are taken."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import time
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.certificates import make_authority
from support.waiting import PATIENCE_SECONDS, until
from support.workers import open_descriptors

from rocserve.core.tensors import Buffer
from rocserve.frontends.http.connection import ConnectionLimits
from rocserve.frontends.http.listener import HttpListener
from rocserve.frontends.http.request import Head, Request, Response
from rocserve.frontends.listen_address import ListenAddress
from rocserve.frontends.tls import CertificateFiles, RenewedContext
from rocserve.services.access import ip_address_of

from .conftest import LOG, Connect, Listen

ANSWER = Response(200, b"answer", "text/plain")
REQUEST = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"


class Gate:
    """A handler whose answers wait until the gate is opened."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        """A request waits."""
        self.open = asyncio.Event()
        self.cancelled = asyncio.Event()

    def answer(self, request: Request) -> None:
        if request.head.path == "/wait":
            request.run(self._wait())
            self.begun.set()
        else:
            request.respond(ANSWER)

    async def _wait(self) -> Response:
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return ANSWER


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_all_addresses_are_those_of_both_families() -> None:
    remotes: list[str] = []

    def answer(request: Request) -> None:
        remotes.append(request.remote)
        request.respond(ANSWER)

    listener = HttpListener(answer, LOG)
    port = await listener.start(ListenAddress("HTTP", "http", "::", 0))
    for address in ("127.0.0.1", "::1"):
        reader, writer = await asyncio.open_connection(address, port)
        writer.write(REQUEST % b"x")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()
    second = HttpListener(answer, LOG)
    with pytest.raises(OSError, match=rf"cannot serve HTTP at :::{port}: Address already in use; name another with"):
        await second.start(ListenAddress("HTTP", "http", "::", port))
    await listener.stop()
    assert [ip_address_of(remote) for remote in remotes] == [ip_address("127.0.0.1"), ip_address("::1")]


async def test_the_end_waits_for_open_requests(listen: Listen, connect: Connect) -> None:
    gate = Gate()
    listener = HttpListener(gate.answer, LOG)
    port = await listen(listener)
    reader, _ = await connect(port, REQUEST % b"wait")
    idle_reader, idle_writer = await connect(port, REQUEST % b"at-once")
    assert (await idle_reader.readuntil(b"answer")).startswith(b"HTTP/1.1 200 OK\r\n")
    ending = asyncio.ensure_future(listener.stop(PATIENCE_SECONDS))
    await asyncio.sleep(0.1)
    with pytest.raises(ConnectionError):
        await connect(port)
    # An open connection is still answered.
    idle_writer.write(REQUEST % b"again")
    assert b"Connection: close\r\n" in await idle_reader.readuntil(b"answer")
    gate.open.set()
    head = await reader.readuntil(b"answer")
    assert b"Server: rocserve\r\n" in head
    await ending
    assert await idle_reader.read() == b""


async def test_the_end_waits_no_longer_than_it_may(listen: Listen, connect: Connect) -> None:
    gate = Gate()
    listener = HttpListener(gate.answer, LOG)
    port = await listen(listener)
    reader, _ = await connect(port, REQUEST % b"wait")
    await gate.begun.wait()
    await listener.stop(0.05)
    await gate.cancelled.wait()
    assert await reader.read() == b""


async def test_a_client_that_is_gone_when_its_answer_begins_is_no_error(
    caplog: pytest.LogCaptureFixture, listen: Listen, connect: Connect
) -> None:
    refused = asyncio.Event()

    async def answer(request: Request) -> None:
        request._wire.close()
        try:
            request.begin_stream(200, "text/plain")
        except ConnectionError:
            refused.set()
            raise

    listener = HttpListener(lambda request: request.run(answer(request)), LOG)
    reader, _ = await connect(await listen(listener), REQUEST % b"")
    assert await reader.read() == b""
    assert refused.is_set()
    await listener.stop(1.0)
    assert caplog.messages == []


class FastClient:
    """The wire of a client that immediately reads all that is written."""

    def __init__(self) -> None:
        self.ends_at = float("inf")
        self.written = b""
        self.in_turn: list[int] = [0]
        """Bytes that were written in each turn of the loop."""

    def check_open(self) -> None: ...

    def write(self, data: Buffer) -> None:
        self.written += data
        self.in_turn[-1] += len(data)

    async def drain(self) -> None: ...

    async def count_turns(self) -> None:
        while True:
            self.in_turn.append(0)
            await asyncio.sleep(0)


@pytest.mark.parametrize("sizes", [[5 << 20], [100_000] * 50, [1, 3 << 20, 0, 100]])
@pytest.mark.parametrize("is_event", [False, True], ids=["answer", "event"])
async def test_others_have_their_turn_while_a_fast_client_reads(sizes: list[int], is_event: bool) -> None:
    client: Any = FastClient()
    counting = asyncio.create_task(client.count_turns())
    request = Request(
        client, HttpListener(lambda request: None, LOG).serving, lambda request: None, Head(keeps_alive=True)
    )
    parts = [bytes([number]) * size for number, size in enumerate(sizes)]
    body = b"".join(parts)
    if is_event:
        request.begin_stream(200, "text/plain")
        await request.send(*parts)
        body = b"%x\r\n%b\r\n" % (len(body), body)
    else:
        await request.respond_in_parts(parts, "text/plain")
    counting.cancel()
    assert client.written.partition(b"\r\n\r\n")[2] == body
    assert max(client.in_turn) < 300 << 10


async def is_closed(reader: asyncio.StreamReader, seconds: float = PATIENCE_SECONDS) -> bool:
    """Wait until the server closes the connection, whatever it sends before; return whether it did in time."""
    try:
        async with asyncio.timeout(seconds):
            while await reader.read(1 << 20):
                pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


async def test_one_connection_too_many_closes_the_one_that_has_waited_longest_for_its_client(
    listen: Listen, connect: Connect
) -> None:
    gate = Gate()
    listener = HttpListener(gate.answer, LOG, ConnectionLimits(most=3))
    port = await listen(listener)
    busy, _ = await connect(port, REQUEST % b"wait")
    await gate.begun.wait()
    idle, _ = await connect(port, REQUEST % b"x")
    await idle.readuntil(b"answer")
    half, _ = await connect(port, b"GET /x HT")
    await until(lambda: len(listener.connections) == 3)
    for oldest in (idle, half):
        reader, _ = await connect(port, REQUEST % b"x")
        assert await is_closed(oldest)
        await reader.readuntil(b"answer")
    # Now two have received an answer, and a running request is not given up for them.
    gate.open.set()
    await busy.readuntil(b"answer")


async def test_where_all_have_requests_in_hand_the_oldest_half_body_is_closed(listen: Listen, connect: Connect) -> None:
    begun: list[Request] = []

    async def answer(request: Request) -> Response:
        begun.append(request)
        while not request.is_complete:
            await request.wait_for_more()
        return Response(200, b"answer to %b" % request.data, "text/plain")

    async def until_half_there(count: int) -> None:
        await until(lambda: len(begun) == count and begun[-1].data == b"hal")

    port = await listen(HttpListener(lambda request: request.run(answer(request)), LOG, ConnectionLimits(most=3)))
    halves = []
    for count in range(1, 4):
        halves.append(await connect(port, b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\nhal"))
        await until_half_there(count)
    for oldest, _ in halves[:2]:
        reader, writer = await connect(port, b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nnew")
        await reader.readuntil(b"answer to new")
        assert await is_closed(oldest)
        # So that this connection, which waits for a request, is not closed for the next one.
        writer.write(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\nhal")
        await until_half_there(len(begun) + 1)
    reader, writer = halves[2]
    writer.write(b"ves")
    await reader.readuntil(b"answer to halves")


async def test_where_all_have_requests_in_hand_the_new_connection_is_closed(listen: Listen, connect: Connect) -> None:
    gate = Gate()
    port = await listen(HttpListener(gate.answer, LOG, ConnectionLimits(most=1)))
    busy, _ = await connect(port, REQUEST % b"wait")
    await gate.begun.wait()
    other, _ = await connect(port)
    assert await is_closed(other)
    gate.open.set()
    await busy.readuntil(b"answer")


@pytest.mark.long
@pytest.mark.parametrize("first", [b"", b"GET /x HTTP/1.1\r\nHost", REQUEST % b"x" + b"GET /x"], ids=repr)
async def test_a_head_that_does_not_come_ends_the_connection(first: bytes, listen: Listen, connect: Connect) -> None:
    port = await listen(HttpListener(Gate().answer, LOG, ConnectionLimits(head_seconds=0.3)))
    reader, writer = await connect(port, first)
    for _ in range(4):
        # Bytes that trickle in keep no connection open.
        await asyncio.sleep(0.2)
        writer.write(b"x" if first else b"")
    assert await is_closed(reader)


@pytest.fixture
def tls(tmp_path: Path) -> RenewedContext:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is missing")
    ours = make_authority(tmp_path / "ours")
    return RenewedContext(CertificateFiles(ours.certificate, ours.key, None), "HTTP", LOG)


async def test_a_handshake_that_does_not_come_ends_the_connection(
    tls: RenewedContext, listen: Listen, connect: Connect
) -> None:
    port = await listen(HttpListener(Gate().answer, LOG, ConnectionLimits(head_seconds=0.3), tls))
    reader, _ = await connect(port)
    assert await is_closed(reader)


async def ask_with_tls(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(REQUEST % b"at-once")
    await reader.readuntil(b"answer")
    return reader, writer


async def test_a_handshake_counts_as_a_connection_and_goes_before_those_that_had_a_request(
    tls: RenewedContext, listen: Listen, connect: Connect
) -> None:
    """Of 8 connections two are idle after a request; another begins its handshake, and then one more connects."""
    port = await listen(HttpListener(Gate().answer, LOG, ConnectionLimits(head_seconds=600.0, most=8), tls))
    idle = [await ask_with_tls(port) for _ in range(2)]
    silent = [reader for reader, _ in [await connect(port) for _ in range(20)]]
    assert all(await asyncio.gather(*map(is_closed, silent[:14])))
    assert not any(await asyncio.gather(*(is_closed(reader, 1.0) for reader in silent[14:])))
    third_reader, third_writer = await ask_with_tls(port)
    for reader, writer in (*idle, (third_reader, third_writer)):
        writer.write(REQUEST % b"at-once")
        assert await reader.readuntil(b"answer")


async def test_the_end_closes_handshakes(tls: RenewedContext, listen: Listen, connect: Connect) -> None:
    listener = HttpListener(Gate().answer, LOG, None, tls)
    port = await listen(listener)
    silent = [await connect(port) for _ in range(3)]
    await asyncio.sleep(0.1)
    await listener.stop(0)
    assert await asyncio.gather(*(is_closed(reader) for reader, _ in silent)) == [True] * 3


async def test_connections_without_a_request_stay_for_a_while(listen: Listen, connect: Connect) -> None:
    """The time begins with the end of the last answer."""
    listener = HttpListener(Gate().answer, LOG, ConnectionLimits(head_seconds=100.0, idle_seconds=1000.0))
    reader, writer = await connect(await listen(listener), REQUEST % b"x")
    ends = []
    for _ in range(2):
        await reader.readuntil(b"answer")
        (connection,) = listener.connections
        ends.append(connection.since)
        assert not connection.is_overdue(connection.since + 999)
        assert connection.is_overdue(connection.since + 1001)
        writer.write(REQUEST % b"x")
    assert ends[0] < ends[1]


@pytest.mark.long
async def test_connections_without_a_request_are_closed_in_the_end(listen: Listen, connect: Connect) -> None:
    port = await listen(HttpListener(Gate().answer, LOG, ConnectionLimits(idle_seconds=0.3)))
    reader, _ = await connect(port, REQUEST % b"x")
    assert await is_closed(reader)


async def test_the_time_for_a_head_begins_with_its_first_byte(listen: Listen, connect: Connect) -> None:
    listener = HttpListener(Gate().answer, LOG, ConnectionLimits(head_seconds=100.0, idle_seconds=1000.0))
    reader, writer = await connect(await listen(listener), REQUEST % b"x")
    await reader.readuntil(b"answer")
    (connection,) = listener.connections
    idle_since = connection.since
    writer.write(b"GET /x HT")
    await until(lambda: connection.since > idle_since)
    assert not connection.is_overdue(connection.since + 99)
    assert connection.is_overdue(connection.since + 101)
    writer.write(b"TP/1.1\r\n\r\n")
    await reader.readuntil(b"answer")


@pytest.mark.long
@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_that_is_not_read_is_given_up(streams: bool, listen: Listen) -> None:
    ended: list[str] = []

    async def answer(request: Request) -> Response:
        if not streams:
            ended.append("made")
            return Response(200, bytes(1 << 20), "text/plain")
        request.begin_stream(200, "text/plain")
        try:
            while True:
                await request.send(bytes(1 << 20))
        except (asyncio.CancelledError, ConnectionError):
            ended.append("given up")
            raise

    limits = ConnectionLimits(write_seconds=0.5)
    listener = HttpListener(lambda request: request.run(answer(request)), LOG, limits)
    port = await listen(listener)
    # The small limit makes the client's data stay in the socket.
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
    writer.write(REQUEST % b"x" * 64)
    await until(lambda: ended and not listener.connections, "the end of the connection")
    assert await is_closed(reader)
    # Pipelined requests are not parsed while earlier answers are unread.
    assert 1 <= len(ended) < 20


async def test_an_address_of_another_machine() -> None:
    with pytest.raises(
        OSError, match=r"cannot serve HTTP at 192.0.2.1:0: .*; name an address of this machine with --h"
    ):
        await HttpListener(Gate().answer, LOG).start(ListenAddress("HTTP", "http", "192.0.2.1", 0))


async def test_connections_that_cannot_be_accepted_are_one_line(
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    listen: Listen,
    connect: Connect,
) -> None:
    monkeypatch.setattr("rocserve.frontends.http.listener._ACCEPT_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr("rocserve.frontends.http.listener._SECONDS_BETWEEN_WARNINGS", 3600.0)
    listener = HttpListener(Gate().answer, LOG)
    port = await listen(listener)
    clients = [socket.socket() for _ in range(5)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open("/dev/null", os.O_RDONLY)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
    try:
        for client in clients:
            client.connect(("127.0.0.1", port))
        await until(lambda: caplog.messages)
        await asyncio.sleep(0.2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caplog.messages == [
        "cannot accept connections: Too many open files; raise the hard limit of open files (ulimit -Hn,"
        " LimitNOFILE), or connect fewer clients"
    ]
    # Errors that gRPC's core writes about other servers of this process do not count.
    written = capfd.readouterr().err
    assert "Traceback" not in written
    assert "out of system resource" not in written
    reader, _ = await connect(port, REQUEST % b"at-once")
    assert await reader.read(15) == b"HTTP/1.1 200 OK"


def fill_descriptors() -> list[int]:
    """Fill the gaps between descriptors that other tests have left, so that new descriptors are numbered in order."""
    last = max(number for number, _ in open_descriptors())
    fillers = [os.open("/dev/null", os.O_RDONLY)]
    while fillers[-1] < last:
        fillers.append(os.open("/dev/null", os.O_RDONLY))
    return fillers


async def test_the_last_descriptors_are_kept_for_the_server(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, listen: Listen, connect: Connect
) -> None:
    monkeypatch.setattr("rocserve.frontends.http.listener._SECONDS_BETWEEN_WARNINGS", 3600.0)
    fillers = fill_descriptors()
    probe = fillers.pop()
    os.close(probe)
    port = await listen(HttpListener(Gate().answer, LOG, ConnectionLimits(most_descriptors=probe + 8)))
    connections, answers = [], []
    for _ in range(8):
        reader, writer = await connect(port, REQUEST % b"at-once")
        connections.append((reader, writer))
        answers.append(await reader.read(15))
    # The newest connection is served, and the oldest, which is idle, is closed.
    assert answers == [b"HTTP/1.1 200 OK"] * 8
    reader, _ = connections[0]
    assert await is_closed(reader)
    assert [text.partition(":")[0] for text in caplog.messages] == ["closing connections that wait for their clients"]
    # A closed connection makes room.
    for _, writer in connections:
        writer.close()
    await asyncio.sleep(0.1)
    reader, writer = await connect(port, REQUEST % b"at-once")
    assert await reader.read(15) == b"HTTP/1.1 200 OK"
    for filler in fillers:
        os.close(filler)


CLIENTS = """
import socket, sys, time
kept = []
for _ in range(300):
    kept.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
    time.sleep(float(sys.argv[2]))
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("at_once", [True, False])
async def test_connections_that_say_nothing_never_take_the_descriptors_that_are_kept(
    at_once: bool, listen: Listen, connect: Connect
) -> None:
    process = psutil.Process()
    most = process.num_fds() + 60
    port = await listen(HttpListener(Gate().answer, LOG, ConnectionLimits(most_descriptors=most)))
    words = [sys.executable, "-c", CLIENTS, str(port), "0" if at_once else "0.002"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as clients:  # noqa: ASYNC220
        assert clients.stdin is not None and clients.stdout is not None
        connected = asyncio.ensure_future(asyncio.to_thread(clients.stdout.readline))
        if at_once:
            # The server accepts none meanwhile: they arrive in one round of the loop.
            time.sleep(1.0)  # noqa: ASYNC251
        counts = []
        begun = time.monotonic()
        # Until all have connected and the last ones are closed again.
        while not connected.done() or time.monotonic() < begun + 1.0 or counts[-1] > most + 5:
            assert time.monotonic() < begun + PATIENCE_SECONDS, (
                f"{counts[-1]} descriptors are open, at most {most + 5} may be"
            )
            counts.append(process.num_fds())
            await asyncio.sleep(0)
        clients.stdin.close()
    assert max(counts) < most + 48, "far more are taken before any is closed"
    reader, _ = await connect(port, REQUEST % b"at-once")
    assert await reader.read(15) == b"HTTP/1.1 200 OK"
