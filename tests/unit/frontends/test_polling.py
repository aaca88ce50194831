"""How the loop hears of gRPC's events: the descriptor that is found, what proves it, and the thread that stands in."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import grpc
import pytest

from rocserve.frontends.grpc.polling import QueuePolling, WaitingThread, find_epoll
from rocserve.frontends.grpc.transport import UnaryCall, UnaryRoute

UNARY = "/test.Service/Unary"

SERVER = """
import logging, sys, time
from rocserve.frontends.grpc import polling
from rocserve.frontends.grpc.server import GrpcServer
from rocserve.frontends.grpc.transport import UnaryRoute
from rocserve.settings import GrpcSettings
from rocserve.plane.loop import PlaneLoop

if sys.argv[1] == "deaf":
    polling._tells = lambda *arguments: False
log = logging.getLogger()
plane = PlaneLoop(log)
plane.start()
routes = {"/test.Service/Unary": UnaryRoute(lambda call: call.reply(call.message))}
transport = GrpcServer(GrpcSettings(address="127.0.0.1", port=0), routes, log, plane)
port = transport.start()
print(port, type(transport._polling).__name__, flush=True)
for line in sys.stdin:
    began = time.process_time()
    time.sleep(1)
    print(time.process_time() - began, transport._polling.longest_sleep_seconds, flush=True)
transport.stop(1)
plane.stop()
print("ended", flush=True)
"""


def idle_second(process: subprocess.Popen[str]) -> float:
    """How long its loop may sleep behind a second in which it does nothing."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    used, longest_sleep = map(float, process.stdout.readline().split())
    assert used < 0.1
    return longest_sleep


def echo(call: UnaryCall) -> None:
    call.reply(call.message)


@pytest.mark.parametrize(
    ("experiments", "kind", "expected"),
    [
        ("-event_engine_listener", "hears", QueuePolling),
        ("-event_engine_listener", "deaf", WaitingThread),
        ("event_engine_listener", "hears", WaitingThread),
    ],
)
def test_events_come_either_way_and_idle_costs_nothing(experiments: str, kind: str, expected: type) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "GRPC_EXPERIMENTS": experiments},
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        port, name = process.stdout.readline().split()
        assert name == expected.__name__
        with grpc.insecure_channel(f"127.0.0.1:{port}", (("grpc.enable_http_proxy", 0),)) as channel:
            unary = channel.unary_unary(UNARY)
            for number in range(200):
                assert unary(b"%d" % number, timeout=10) == b"%d" % number
            large = bytes(4_000_000)
            assert unary(large, timeout=30) == large
            # An idle server, with a connection, for a second.
            connected = idle_second(process)
        unconnected = idle_second(process)
        if expected is QueuePolling:
            assert connected < unconnected
        process.stdin.close()
        assert process.stdout.readline() == "ended\n"
        assert process.wait(10) == 0


def test_without_the_experiment_no_epoll_is_taken(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve({UNARY: UnaryRoute(echo)})
    for experiments in ("", "event_engine_listener", "-event_engine_client"):
        monkeypatch.setenv("GRPC_EXPERIMENTS", experiments)
        assert find_epoll(served.port) is None
