"""Clients that begin calls and do not go on: nobody else notices, and they are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest
from support.http2 import Http2Connection, prefixed
from support.models import add_sub, drop
from support.server import RocserveProcess

from rocserve.core.errors import StatusCode
from rocserve.protocol import grpc_service_pb2 as pb

SERVICE = "/inference.GRPCInferenceService/"
INFER = SERVICE + "ModelInfer"
MESSAGE_SECONDS = 3.0


def inference() -> bytes:
    request = pb.ModelInferRequest(model_name="add_sub", raw_input_contents=[bytes(64), bytes(64)])
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
    return request.SerializeToString()


@pytest.fixture(scope="module", params=["reactor", "aio"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    folder = tmp_path_factory.mktemp("unfinished")
    (folder / "repository").mkdir()
    drop(folder / "repository", "add_sub", add_sub())
    flags = (f"--grpc-transport={request.param}", f"--grpc-message-timeout-secs={MESSAGE_SECONDS}")
    with RocserveProcess([folder / "repository"], *flags, log=folder / "server.log") as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="module")
def infer(server: RocserveProcess) -> Iterator[grpc.UnaryUnaryMultiCallable]:
    """An honest client with a connection of its own."""
    with grpc.insecure_channel(server.address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        yield channel.unary_unary(INFER)


@pytest.mark.parametrize("method", [INFER, SERVICE + "ServerLive", SERVICE + "ModelStreamInfer"])
def test_calls_without_a_message_keep_nobody_waiting(
    server: RocserveProcess, infer: grpc.UnaryUnaryMultiCallable, method: str
) -> None:
    with Http2Connection(server.port) as connection:
        for _ in range(200):
            connection.begin(method)
        assert infer(inference(), timeout=2)


def test_half_messages_of_many_connections_keep_nobody_waiting(
    server: RocserveProcess, infer: grpc.UnaryUnaryMultiCallable
) -> None:
    half = prefixed(inference())[:100]
    with ExitStack() as open_connections:
        for _ in range(110):
            open_connections.enter_context(Http2Connection(server.port)).begin(INFER, half)
        assert infer(inference(), timeout=2)


def test_a_message_that_does_not_come_whole_in_time_is_given_up(server: RocserveProcess) -> None:
    with Http2Connection(server.port) as connection:
        started = time.monotonic()
        nothing, half = connection.begin(INFER), connection.begin(INFER, prefixed(inference())[:100])
        stream = connection.begin(SERVICE + "ModelStreamInfer")
        answers = connection.wait(nothing, half)
        assert time.monotonic() - started >= MESSAGE_SECONDS
        assert {answer.status for answer in answers} == {StatusCode.DEADLINE_EXCEEDED}
        assert "has not come whole within 3 s (--grpc-message-timeout-secs)" in answers[0].text
        # Streams may be opened long before their first message.
        connection.send(stream, prefixed(inference()), ends=True)
        [answer] = connection.wait(stream)
        assert (answer.status, len(answer.data) > 64) == (StatusCode.OK, True)


def test_a_call_without_a_message_is_an_invalid_argument(server: RocserveProcess) -> None:
    with Http2Connection(server.port) as connection:
        [answer] = connection.wait(connection.begin(INFER, ends=True))
    assert (answer.status, answer.text) == (StatusCode.INVALID_ARGUMENT, "expected one request message, got none")


def test_slow_uploads_of_many_clients_end_well_beside_fast_ones(
    server: RocserveProcess, infer: grpc.UnaryUnaryMultiCallable
) -> None:
    """64 clients send their message over a second."""
    message = prefixed(inference())
    step = len(message) // 10
    pieces = [message[at : at + step] for at in range(0, len(message), step)]
    is_over = threading.Event()

    def keep_asking() -> int:
        count = 0
        while not is_over.is_set():
            assert infer(inference(), timeout=5)
            count += 1
        return count

    with ExitStack() as opened, ThreadPoolExecutor(1) as pool:
        fast = pool.submit(keep_asking)
        try:
            uploads = [opened.enter_context(Http2Connection(server.port)) for _ in range(64)]
            streams = [upload.begin(INFER) for upload in uploads]
            for piece in pieces:
                for upload, stream in zip(uploads, streams, strict=True):
                    upload.send(stream, piece, ends=piece is pieces[-1])
                time.sleep(0.1)
            answers = [upload.wait(stream)[0] for upload, stream in zip(uploads, streams, strict=True)]
        finally:
            is_over.set()
    assert {answer.status for answer in answers} == {StatusCode.OK}
    assert fast.result() > 50


def test_the_server_ends_at_once_though_calls_are_unfinished(server: RocserveProcess) -> None:
    """The last test of this server."""
    with Http2Connection(server.port) as connection:
        connection.begin(INFER, prefixed(inference())[:100])
        connection.receive(0.5)
        started = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - started < 15
