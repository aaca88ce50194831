"""How the loop receives gRPC's events: the descriptor that it finds, the proof that it is the right one, and the thread
that replaces it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.frontends.grpc.polling import QueuePolling, WaitingThread, find_epoll
from rocserve.frontends.grpc.transport import UnaryCall, UnaryRoute
from rocserve.frontends.grpc.unfinished import received_bytes

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

HELD_SERVER = """
import logging, threading
from rocserve.frontends.grpc.server import GrpcServer
from rocserve.frontends.grpc.transport import UnaryRoute
from rocserve.settings import GrpcSettings
from rocserve.plane.loop import PlaneLoop

log = logging.getLogger()
plane = PlaneLoop(log)
plane.start()
turns = []
turn = 0

def handle(call):
    turns.append(turn)
    plane.at_end_of_turn(end_turn)
    call.reply(call.message)

def end_turn():
    global turn
    turn += 1

routes = {"/test.Service/Unary": UnaryRoute(handle)}
transport = GrpcServer(GrpcSettings(address="127.0.0.1", port=0), routes, log, plane)
print(transport.start(), type(transport._polling).__name__, flush=True)
input()
gate = threading.Event()
turns.clear()
plane.call_soon(gate.wait)
print("held", flush=True)
input()
gate.set()
input()
print(len(turns), len(set(turns)), flush=True)
transport.stop(1)
plane.stop()
"""
CONNECTIONS = 12
"""Each of their calls is three events, fewer than a turn takes."""
MESSAGE_BYTES = 1000
"""More than all that connections carry beside messages in the meantime."""
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


def test_calls_that_have_come_on_connections_of_their_own_are_taken_in_one_turn() -> None:
    with served_by(HELD_SERVER, QueuePolling) as (process, port):
        assert process.stdout is not None

        def tell() -> None:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

        options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
        with ExitStack() as opened:
            channels = [
                opened.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options)) for _ in range(CONNECTIONS)
            ]
            calls = [channel.unary_unary(UNARY) for channel in channels]
            for call in calls:
                assert call(b"", timeout=PATIENCE_SECONDS) == b""
            tell()
            assert process.stdout.readline() == "held\n"
            before = received_bytes(int(port))
            messages = [bytes([number]) * MESSAGE_BYTES for number in range(CONNECTIONS)]
            answers = [call.future(each, timeout=PATIENCE_SECONDS) for call, each in zip(calls, messages, strict=True)]

            def have_come() -> bool:
                """Whether all are in the kernel's buffers."""
                now = received_bytes(int(port))
                return all(sum(now[peer].values()) - sum(before[peer].values()) >= MESSAGE_BYTES for peer in before)

            wait_until(have_come, "the messages in the server's buffers")
            tell()
            assert [answer.result() for answer in answers] == messages
            tell()
            taken, turns = map(int, process.stdout.readline().split())
        assert taken == CONNECTIONS
        assert turns <= CONNECTIONS // 3
        assert process.wait(PATIENCE_SECONDS) == 0


def test_without_the_experiment_no_epoll_is_taken(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve({UNARY: UnaryRoute(echo)})
    for experiments in ("", "event_engine_listener", "-event_engine_client"):
        monkeypatch.setenv("GRPC_EXPERIMENTS", experiments)
        assert find_epoll(served.port) is None
