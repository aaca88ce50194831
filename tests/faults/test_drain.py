"""A server that is ending goes on serving while its clients leave, and finishes their requests."""

from __future__ import annotations

import http.client
import queue
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import grpc
import pytest
from support.load import ConstantLoad
from support.models import add_constant, drop
from support.sequences import drop_accumulator, request_input
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.protocol import health_pb2 as health

WATCH = "/grpc.health.v1.Health/Watch"
SERVING, NOT_SERVING = health.HealthCheckResponse.SERVING, health.HealthCheckResponse.NOT_SERVING


def watch(channel: grpc.Channel, service: str) -> Iterator[health.HealthCheckResponse]:
    request, response = health.HealthCheckRequest, health.HealthCheckResponse
    return channel.unary_stream(WATCH, request.SerializeToString, response.FromString)(request(service=service))


@pytest.mark.parametrize("front_ends", [0, 2])
def test_a_draining_server_is_not_ready_and_serves(
    serve: Callable[..., RocserveProcess], repository: Path, front_ends: int
):
    drop(repository, "m", add_constant(1.0))
    server = serve(repository, "--drain-seconds=600", f"--front-ends={front_ends}")
    client, before = server.client(), connect(server)
    with grpc.insecure_channel(server.address) as channel:
        told = [watch(channel, service) for service in ("", "m")]
        assert [next(one).status for one in told] == [SERVING, SERVING]
        assert ready(before) == (200, None)
        with ConstantLoad(server.address, "m", {1.0}, threads=2) as load:
            assert server.process is not None
            server.process.send_signal(signal.SIGTERM)
            assert [next(one).status for one in told] == [NOT_SERVING, NOT_SERVING]
            load.wait_until_answered_by(1.0, times=20)
        assert load.failures == load.wrong == []
        # Each front end learns it by itself.
        wait_until(lambda: not client.is_server_ready(), "the end's beginning for this client")
        assert not client.is_model_ready("m")
        assert client.is_server_live()
        # New clients are served as well; over HTTP one request a connection.
        wait_until(lambda: ready(before) == (400, "close"), "an answer that ends its connection")
        wait_until(lambda: ready(connect(server)) == (400, "close"), "the same for a new client")
        # A second signal ends the server immediately.
        assert server.terminate() == 1
        for one in told:
            with pytest.raises(grpc.RpcError):
                next(one)


def connect(server: RocserveProcess) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.http_address, timeout=PATIENCE_SECONDS)


def ready(connection: http.client.HTTPConnection) -> tuple[int, str | None]:
    connection.request("GET", "/v2/health/ready")
    answer = connection.getresponse()
    answer.read()
    return answer.status, answer.headers["Connection"]


def test_sequences_are_finished_on_streams_and_without(serve: Callable[..., RocserveProcess], repository: Path):
    drop_accumulator(repository, "sums", "direct { } max_sequence_idle_microseconds: 60000000")
    server = serve(repository, "--exit-timeout-secs=600")
    streaming, client = server.client(), server.client()
    sums: queue.SimpleQueue[int] = queue.SimpleQueue()
    streaming.start_stream(lambda result, error: sums.put(-1 if error else int(result.as_numpy("SUM")[0, 0])))

    def ask_both(value: int, **where: bool) -> tuple[int, int]:
        streaming.async_stream_infer("sums", [request_input(value)], sequence_id=8, **where)
        return int(
            client.infer("sums", [request_input(value)], sequence_id=7, **where).as_numpy("SUM")[0, 0]
        ), sums.get(timeout=PATIENCE_SECONDS)

    assert ask_both(1, sequence_start=True) == (1, 1)
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not client.is_server_ready(), "the end's beginning")
    assert ask_both(2) == (3, 3)
    assert ask_both(3, sequence_end=True) == (6, 6)
    assert server.process.wait(PATIENCE_SECONDS) == 0


def test_connections_end_for_their_age_without_a_loss(serve: Callable[..., RocserveProcess], repository: Path):
    drop(repository, "m", add_constant(1.0))
    server = serve(repository, "--max-connection-age-secs=0.2")
    with ConstantLoad(server.address, "m", {1.0}, threads=2) as load:
        peers = connections(server)
        wait_until(lambda: not peers & connections(server), "new connections")
        # On a busy machine a connection may be old before its first answer.
        wait_until(lambda: answers_of_one_connection(server) > 1, "a connection with several answers that ends")
        load.wait_until_answered_by(1.0)
    assert load.failures == load.wrong == []


def answers_of_one_connection(server: RocserveProcess) -> int:
    """The answers until one says that it is the last."""
    connection = connect(server)
    return next(number for number in count(1) if ready(connection) == (200, "close"))


def connections(server: RocserveProcess) -> set[int]:
    """The ports of gRPC's clients."""
    return {
        one.raddr.port
        for one in server.server_process().net_connections("tcp")
        if one.laddr.port == server.port and one.status == "ESTABLISHED"
    }
