"""Clients that open endless connections: others are served, and the server keeps the descriptors that it needs."""

from __future__ import annotations

import http.client
import resource
import shutil
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest
from support.certificates import Authority, make_authority
from support.http2 import PREFACE, SETTINGS, frame
from support.metrics import FLAGS as METRICS
from support.metrics import port_of
from support.models import add_sub, drop
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until

MOST_FILES = 256
"""Open files that the servers of these tests may have. A quarter is reserved for the server itself."""
POLL = ("--repository-poll-secs=1", "--repository-settle-secs=0.2")
LIVE = "/inference.GRPCInferenceService/ServerLive"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter, with that limit."""
    script = tmp_path_factory.mktemp("python") / "python"
    script.write_text(f'#!/bin/sh\nulimit -n {MOST_FILES}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture(scope="module", autouse=True)
def files_of_clients() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is missing")
    return make_authority(tmp_path_factory.mktemp("certificates") / "ours")


@pytest.fixture(scope="module")
def secure_server(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority, python: str
) -> Iterator[RocserveProcess]:
    folder = tmp_path_factory.mktemp("secure")
    (folder / "repository").mkdir()
    flags = (
        *("--grpc-use-ssl", "--http-use-ssl", "--metrics-use-ssl", *METRICS),
        f"--grpc-server-cert={authority.certificate}",
        f"--grpc-server-key={authority.key}",
    )
    with RocserveProcess([folder / "repository"], *flags, log=folder / "log", python=python) as server:
        wait_until(lambda: "0 models served" in server.log_text, "the start")
        yield server


def open_files(server: RocserveProcess) -> int:
    assert server.process is not None
    return server.server_process().num_fds()


def get(port: int, path: str, tls: ssl.SSLContext | None = None) -> int:
    if tls is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    else:
        connection = http.client.HTTPSConnection("localhost", port, timeout=PATIENCE_SECONDS, context=tls)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def half_hello() -> bytes:
    """Half a client's TLS handshake."""
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read(100)


@pytest.mark.parametrize(("of", "text"), [("HTTP", "half"), ("metrics", "nothing")])
def test_handshakes_that_never_end_take_no_descriptors_that_are_kept(
    secure_server: RocserveProcess, authority: Authority, of: str, text: str
) -> None:
    server, tls = secure_server, ssl.create_default_context(cafile=str(authority.root))
    port, path = (server.http_port, "/v2/health/live") if of == "HTTP" else (port_of(server), "/metrics")
    first_words = half_hello() if text == "half" else b""
    credentials = grpc.ssl_channel_credentials(Path(authority.root).read_bytes())
    hostile: list[socket.socket] = []
    most = 0
    try:
        for _ in range(4):
            for _ in range(100):
                hostile.append(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS))
                with suppress(ConnectionError):  # The server may have closed it already.
                    hostile[-1].sendall(first_words)
            assert get(port, path, tls) == 200
            assert get(server.http_port, "/v2/health/live", tls) == 200
            options = (("grpc.use_local_subchannel_pool", 1),)
            with grpc.secure_channel(f"localhost:{server.port}", credentials, options) as channel:
                assert channel.unary_unary(LIVE)(b"", timeout=PATIENCE_SECONDS)
            most = max(most, open_files(server))
    finally:
        for connection in hostile:
            connection.close()
    print(f"at most {most} of {MOST_FILES} files open")
    assert most <= MOST_FILES * 7 // 8
    assert "cannot accept connections" not in server.log_text


def is_answered(server: RocserveProcess) -> bool:
    """Whether gRPC answers on a new connection."""
    with grpc.insecure_channel(server.address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        try:
            channel.unary_unary(LIVE)(b"", timeout=5)
        except grpc.RpcError:
            return False
    return True


def test_connections_of_grpc_leave_descriptors_for_http_and_models(tmp_path: Path, python: str) -> None:
    """And for other clients, after the connections have been idle."""
    repository = tmp_path / "repository"
    repository.mkdir()
    flags = (*POLL, "--grpc-max-connection-idle=6000")
    with RocserveProcess([repository], *flags, log=tmp_path / "log", python=python) as server, ExitStack() as opened:
        server.wait_until_ready()
        for _ in range(2 * MOST_FILES):
            hostile = opened.enter_context(
                socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS)
            )
            with suppress(ConnectionError):  # The server may have closed it already.
                hostile.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
        for _ in range(5):
            assert get(server.http_port, "/v2/health/live") == 200
        drop(repository, "add_sub", add_sub())
        wait_until(lambda: "successfully loaded 'add_sub'" in server.log_text, "the model")
        assert get(server.http_port, "/v2/models/add_sub/ready") == 200
        assert open_files(server) <= MOST_FILES * 3 // 4
        wait_until(lambda: is_answered(server), "an answer to another client of gRPC")


def test_connections_with_tls_take_no_more_than_the_memory_for_requests(tmp_path: Path, authority: Authority) -> None:
    """1,000 handshakes, which would take 300 MiB."""
    flags = (
        *("--http-use-ssl", f"--max-request-memory={32 << 20}"),
        *(f"--grpc-server-cert={authority.certificate}", f"--grpc-server-key={authority.key}"),
    )
    tls = ssl.create_default_context(cafile=str(authority.root))
    (tmp_path / "repository").mkdir()
    with RocserveProcess([tmp_path / "repository"], *flags, log=tmp_path / "log") as server, ExitStack() as opened:
        server.wait_until_ready()
        before = server.resident_bytes()
        for _ in range(1000):
            opened.enter_context(socket.create_connection(("127.0.0.1", server.http_port), timeout=PATIENCE_SECONDS))
        assert get(server.http_port, "/v2/health/live", tls) == 200
        grown = server.resident_bytes() - before
    print(f"grown by {grown / 2**20:.0f} MiB")
    assert grown < 96 << 20
