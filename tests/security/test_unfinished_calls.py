"""Clients that begin calls and do not finish them: other clients are not affected, and these get an error."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from support.http2 import Answer, Http2Connection, prefixed
from support.models import add_sub, drop
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.core.errors import StatusCode
from rocserve.protocol import grpc_service_pb2 as pb

SERVICE = "/inference.GRPCInferenceService/"
INFER = SERVICE + "ModelInfer"
LISTENERS = ("-event_engine_listener", "event_engine_listener")
MESSAGE_SECONDS = 5.0


def inference() -> bytes:
    request = pb.ModelInferRequest(model_name="add_sub", raw_input_contents=[bytes(64), bytes(64)])
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
    return request.SerializeToString()


@pytest.fixture(scope="module", params=LISTENERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    folder = tmp_path_factory.mktemp("unfinished")
    (folder / "repository").mkdir()
    drop(folder / "repository", "add_sub", add_sub())
    flags = (f"--grpc-message-timeout-secs={MESSAGE_SECONDS}", "--exit-timeout-secs=600")
    environment = {"GRPC_EXPERIMENTS": request.param}
    with RocserveProcess(
        [folder / "repository"], *flags, log=folder / "server.log", environment=environment
    ) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="module")
def infer(server: RocserveProcess) -> Iterator[grpc.UnaryUnaryMultiCallable]:
    """An honest client with a separate connection."""
    with grpc.insecure_channel(server.address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        yield channel.unary_unary(INFER)


def is_over(connection: Http2Connection, stream: int) -> bool:
    while connection.receive():
        pass
    return connection.answers[stream].status is not None


@pytest.mark.parametrize("method", [INFER, SERVICE + "ServerLive", SERVICE + "ModelStreamInfer"])
def test_calls_without_a_message_keep_nobody_waiting(
    server: RocserveProcess, infer: grpc.UnaryUnaryMultiCallable, method: str
) -> None:
    def did_not_wait_for_them() -> bool:
        with Http2Connection(server.port) as connection:
            for _ in range(200):
                last = connection.begin(method)
            assert infer(inference(), timeout=PATIENCE_SECONDS)
            return not is_over(connection, last)

    # On a busy machine their time may be over before the answer comes.
    wait_until(did_not_wait_for_them, "an answer before the end of the others")


def test_half_messages_of_many_connections_keep_nobody_waiting(
    server: RocserveProcess, infer: grpc.UnaryUnaryMultiCallable
) -> None:
    half = prefixed(inference())[:100]

    def did_not_wait_for_them() -> bool:
        with ExitStack() as open_connections:
            for _ in range(110):
                connection = open_connections.enter_context(Http2Connection(server.port))
                last = connection.begin(INFER, half)
            assert infer(inference(), timeout=PATIENCE_SECONDS)
            return not is_over(connection, last)

    wait_until(did_not_wait_for_them, "an answer before the end of the others")


def test_a_message_that_does_not_come_whole_in_time_is_given_up(server: RocserveProcess) -> None:
    with Http2Connection(server.port) as connection:
        started = time.monotonic()
        nothing, half = connection.begin(INFER), connection.begin(INFER, prefixed(inference())[:100])
        stream = connection.begin(SERVICE + "ModelStreamInfer")
        answers = connection.wait(nothing, half)
        assert time.monotonic() - started >= MESSAGE_SECONDS
        assert {answer.status for answer in answers} == {StatusCode.DEADLINE_EXCEEDED}
        assert "request message not fully received within 5 s" in answers[0].text
        # Streams may be opened long before their first message.
        connection.send(stream, prefixed(inference()), ends=True)
        [answer] = connection.wait(stream)
        assert (answer.status, len(answer.data) > 64) == (StatusCode.OK, True)


def test_a_call_without_a_message_is_an_invalid_argument(server: RocserveProcess) -> None:
    with Http2Connection(server.port) as connection:
        [answer] = connection.wait(connection.begin(INFER, ends=True))
    assert (answer.status, answer.text) == (StatusCode.INVALID_ARGUMENT, "expected one request message, got none")


@pytest.mark.parametrize("listener", LISTENERS)
def test_slow_uploads_of_many_clients_end_well_beside_fast_ones(
    repository: Path, tmp_path: Path, listener: str
) -> None:
    """64 clients send their message over a second, and may take a minute."""
    drop(repository, "add_sub", add_sub())
    environment = {"GRPC_EXPERIMENTS": listener}
    with RocserveProcess([repository], log=tmp_path / "server.log", environment=environment) as server:
        server.wait_until_ready()
        with grpc.insecure_channel(server.address) as channel:
            check_slow_uploads(server, channel.unary_unary(INFER))


def check_slow_uploads(server: RocserveProcess, infer: grpc.UnaryUnaryMultiCallable) -> None:
    message = prefixed(inference())
    step = len(message) // 10
    pieces = [message[at : at + step] for at in range(0, len(message), step)]
    with ExitStack() as opened:
        uploads = [opened.enter_context(Http2Connection(server.port)) for _ in range(64)]
        streams = [upload.begin(INFER) for upload in uploads]
        for number, piece in enumerate(pieces, start=1):
            for upload, stream in zip(uploads, streams, strict=True):
                upload.send(stream, piece, ends=number == len(pieces))
            for _ in range(5):
                assert infer(inference(), timeout=PATIENCE_SECONDS)
            time.sleep(0.1)
        answers = [upload.wait(stream)[0] for upload, stream in zip(uploads, streams, strict=True)]
    assert {answer.status for answer in answers} == {StatusCode.OK}


MESSAGE = 4 << 20
MOST_WAITING = 8


@pytest.fixture(scope="module")
def small_server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """A server of which clients may hold half of the memory for requests by messages that they do not finish."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "repository").mkdir()
    drop(folder / "repository", "large", add_sub(1 << 18))
    drop(folder / "repository", "add_sub", add_sub())
    flags = (
        "--front-ends=0",
        f"--max-request-memory={2 * MOST_WAITING * MESSAGE}",
        f"--grpc-max-message-bytes={MESSAGE}",
        f"--grpc-max-waiting-calls={MOST_WAITING}",
        "--grpc-message-timeout-secs=0",
    )
    return start(folder / "repository", *flags)


def private_bytes(server: RocserveProcess) -> int:
    memory = server.server_process().memory_info()
    return int(memory.rss - memory.shared)


def large_request() -> bytes:
    request = pb.ModelInferRequest(model_name="large", raw_input_contents=[bytes(1 << 20)] * 2)
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 1 << 18])
    return request.SerializeToString()


@pytest.mark.long
def test_clients_hold_no_more_than_so_many_messages(small_server: RocserveProcess) -> None:
    """24 calls and streams on two connections send all of a message but its last byte, and nothing more."""
    almost = struct.pack("!BI", 0, MESSAGE) + bytes(MESSAGE - 1)
    with ExitStack() as opened, grpc.insecure_channel(small_server.address) as channel:
        infer = channel.unary_unary(INFER)
        assert infer(large_request(), timeout=PATIENCE_SECONDS)
        before = private_bytes(small_server)
        greedy = [opened.enter_context(Http2Connection(small_server.port)) for _ in range(2)]
        sent = []
        for method in (INFER, SERVICE + "ModelStreamInfer") * 6:
            sent += [(connection, connection.begin(method, almost)) for connection in greedy]
            # Other clients are served.
            assert infer(large_request(), timeout=PATIENCE_SECONDS)

        def refused() -> list[Answer]:
            for connection in greedy:
                connection.receive(0.2)
            answers = [connection.answers[stream] for connection, stream in sent]
            return [answer for answer in answers if answer.status is not None]

        wait_until(lambda: len(refused()) >= len(sent) - MOST_WAITING, "the refusals")
        assert {answer.status for answer in refused()} == {StatusCode.RESOURCE_EXHAUSTED}
        assert f"more than {MOST_WAITING} calls wait" in refused()[0].text
        most = MOST_WAITING * MESSAGE
        # What the refused calls had sent goes back to the system when the server has been quiet for a while.
        wait_until(lambda: private_bytes(small_server) - before <= 1.25 * most + (16 << 20), "memory of the others")
        assert private_bytes(small_server) - before >= most / 2, "these calls hold what they have sent"
        assert len(refused()) == len(sent) - MOST_WAITING
        assert infer(large_request(), timeout=PATIENCE_SECONDS)


def test_a_message_that_is_too_large_is_refused_before_it_comes(small_server: RocserveProcess) -> None:
    with Http2Connection(small_server.port) as connection:
        [answer] = connection.wait(connection.begin(INFER, struct.pack("!BI", 0, MESSAGE + 1)))
    assert answer.status == StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in answer.text


def test_slow_uploads_within_the_bound_end_well(small_server: RocserveProcess) -> None:
    """7 calls of 2 MiB piece by piece, some on one connection, next to an idle stream."""
    message = prefixed(large_request())
    step = len(message) // 10 + 1
    with ExitStack() as opened:
        connections = [opened.enter_context(Http2Connection(small_server.port)) for _ in range(4)]
        connections[0].begin(SERVICE + "ModelStreamInfer")
        uploads = [(connection, connection.begin(INFER)) for connection in (*connections, *connections[1:])]
        for at in range(0, len(message), step):
            for connection, stream in uploads:
                connection.send(stream, message[at : at + step], ends=at + step >= len(message))
        answers = [connection.wait(stream)[0] for connection, stream in uploads]
        assert {(answer.status, answer.text) for answer in answers} == {(StatusCode.OK, "")}


def test_the_server_ends_at_once_though_calls_are_unfinished(server: RocserveProcess) -> None:
    """The last test of this server."""
    with Http2Connection(server.port) as connection:
        connection.begin(INFER, prefixed(inference())[:100])
        connection.receive(0.5)
        assert server.terminate() == 0
