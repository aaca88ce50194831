"""How the loop receives gRPC's events: the descriptor that it finds, the proof that it is the right one, and the thread
that replaces it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import grpc
import pytest
from support.waiting import PATIENCE_SECONDS, wait_until

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
    polling._wakes = lambda *arguments: False
log = logging.getLogger()
plane = PlaneLoop(log)
plane.start()
routes = {"/test.Service/Unary": UnaryRoute(lambda call: call.reply(call.message))}
transport = GrpcServer(GrpcSettings(address="127.0.0.1", port=0), routes, log, plane)
polls, poll = 0, transport.poll

def count_polls():
    global polls
    polls += 1
    return poll()

transport.poll = count_polls
port = transport.start()
print(port, type(transport._polling).__name__, flush=True)
for line in sys.stdin:
    began, before = time.monotonic(), polls
    time.sleep(1)
    print((polls - before) / (time.monotonic() - began), transport._polling.longest_sleep_seconds, flush=True)
transport.stop(1)
plane.stop()
print("ended", flush=True)
"""

MOST_IDLE_POLLS = 1000
"""Polls in a second. A loop that does not sleep takes a hundred times as many."""


def idle_second(process: subprocess.Popen[str]) -> float:
    """How long its loop may sleep after a second without work."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    polls, longest_sleep = map(float, process.stdout.readline().split())
    assert polls < MOST_IDLE_POLLS
    return longest_sleep


def echo(call: UnaryCall) -> None:
    call.reply(call.message)


@contextmanager
def served_by(
    script: str, polling: type, experiments: str = "-event_engine_listener", *arguments: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that runs the script, and its port; `polling`: how it must wait for gRPC's events."""
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "GRPC_EXPERIMENTS": experiments},
    ) as process:
        assert process.stdout is not None
        port, name = process.stdout.readline().split()
        assert name == polling.__name__
        yield process, port


@pytest.mark.parametrize(
    ("experiments", "kind", "expected"),
    [
        ("-event_engine_listener", "hears", QueuePolling),
        ("-event_engine_listener", "deaf", WaitingThread),
        ("event_engine_listener", "hears", WaitingThread),
    ],
)
def test_events_come_either_way_and_idle_costs_nothing(experiments: str, kind: str, expected: type) -> None:
    with served_by(SERVER, expected, experiments, kind) as (process, port):
        assert process.stdin is not None and process.stdout is not None
        with grpc.insecure_channel(f"127.0.0.1:{port}", (("grpc.enable_http_proxy", 0),)) as channel:
            unary = channel.unary_unary(UNARY)
            for number in range(200):
                assert unary(b"%d" % number, timeout=PATIENCE_SECONDS) == b"%d" % number
            large = bytes(4_000_000)
            assert unary(large, timeout=PATIENCE_SECONDS) == large
            # An idle server, with a connection, for a second.
            connected = idle_second(process)
        idle_second(process)
        if expected is QueuePolling:
            wait_until(lambda: idle_second(process) > connected, "longer sleeps without a connection")
        process.stdin.close()
        assert process.stdout.readline() == "ended\n"
        assert process.wait(PATIENCE_SECONDS) == 0


def test_a_turn_takes_all_events_that_have_come(serve: Any) -> None:
    served = serve({})
    handled: list[object] = []
    event, nothing = SimpleNamespace(tag=handled.append), SimpleNamespace(tag=None)
    # gRPC returns nothing when it has read a socket, and twice in a row when it has read all.
    events = iter([event, event, nothing, event, nothing, nothing, event])

    def turn() -> None:
        with patch.object(served.transport, "_polling", SimpleNamespace(next=lambda: next(events))):
            assert served.transport.poll()

    served.do(turn)
    assert handled == [event] * 3


def test_without_the_experiment_no_epoll_is_taken(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve({UNARY: UnaryRoute(echo)})
    for experiments in ("", "event_engine_listener", "-event_engine_client"):
        monkeypatch.setenv("GRPC_EXPERIMENTS", experiments)
        assert find_epoll(served.port) is None
