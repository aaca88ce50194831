"""Front end processes in tests: their clients, over gRPC or HTTP, and their connections."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import psutil

from support.waiting import wait_until

CLIENTS = 12
PAUSE_SECONDS = 0.05
"""A client's pause after each answer: without one, twelve clients take the processors that the next front end needs."""
MOST_REQUESTS = 40
"""Of one client at the same time, on the server that tests/e2e shares."""
KILLS = int(os.environ.get("KILLS", "2"))
"""Front ends that one run kills, one after another, under load."""


class Asking(Protocol):
    """A client that sends one request after another in its own thread until its event is set."""

    answers: int
    thread: threading.Thread


AskingClient = TypeVar("AskingClient", bound=Asking)


@contextmanager
def asking_clients(make: Callable[[int, threading.Event], AskingClient]) -> Iterator[list[AskingClient]]:
    """Start clients and wait until each has received an answer. `make` takes a client's number and the event that stops
    it."""
    stop = threading.Event()
    made = [make(number, stop) for number in range(CLIENTS)]
    try:
        wait_until(lambda: all(client.answers for client in made), "an answer for each client")
        yield made
    finally:
        stop.set()
        for client in made:
            client.thread.join(30)


def wait_for_more(asking: Sequence[Asking]) -> None:
    counts = [client.answers for client in asking]
    wait_until(
        lambda: all(client.answers > count for client, count in zip(asking, counts, strict=True)),
        "further answers for each client",
    )


def check_others_go_on(asking: Sequence[Asking], still: psutil.Process, other: psutil.Process) -> None:
    """Check that the clients of the front end `other` are served while `still` is stopped; let `still` continue."""
    # Each client has one connection; further connections of earlier clients may be left.
    served = len(asking) - clients_of(still)
    assert 0 < served <= clients_of(other)
    still.send_signal(signal.SIGSTOP)
    try:
        for _ in range(3):
            counts = [client.answers for client in asking]

            def go_on(counts: Sequence[int] = counts) -> bool:
                return sum(client.answers > count for client, count in zip(asking, counts, strict=True)) >= served

            wait_until(go_on, f"further answers for {served} clients")
    finally:
        still.send_signal(signal.SIGCONT)


def clients_of(front_end: psutil.Process, port: int = 0) -> int:
    """The number of its connections, or of those to this port."""
    connections = front_end.net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED and port in (0, one.laddr.port) for one in connections)


def listens(process: psutil.Process, port: int) -> bool:
    try:
        connections = process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return False
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections)
