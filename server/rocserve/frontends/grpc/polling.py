"""How the data plane's loop hears of gRPC's events: it polls the completion queue, or a thread waits in that; and the
sockets of gRPC's port, which its core keeps to itself.

With GRPC_EXPERIMENTS=-event_engine_listener gRPC's core reads and writes its sockets on the thread that polls the
queue, and what it waits for itself is an epoll. That of the server is the one that watches the listening socket. The
loop sleeps on it. What the core has its own threads do (the handshake of a connection, a reader that had too much at
once, timers) ends in the queue without a sign: only a poll shows it.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rocserve.frontends.grpc.server_calls import Event
from rocserve.frontends.listen_address import begin_no_handshakes

_POLLS_ITSELF = "-event_engine_listener"
"""In GRPC_EXPERIMENTS before grpc is imported."""
_MOST_AT_ONCE = 100
"""Ready sockets that gRPC's core fetches from its epoll at once (MAX_EPOLL_EVENTS). It handles one a look, so that only
after as many looks without an event there is none."""
_COUNTING_SECONDS = 0.1
"""How old the number of connections may be."""
_COUNTED_BYTES = 16 << 10
"""Of the kernel's list of what an epoll watches: more than so many connections take."""
_LONGEST_SLEEP_SECONDS = 0.05
"""Until something is seen that the core's own threads have put into the queue."""
_LONGEST_IDLE_SLEEP_SECONDS = 1.0
"""The same without a connection, where none of it is anybody's."""
_PATIENCE_SECONDS = 0.5
"""After which the thread that waits looks whether it is still wanted."""
_CHECK_SECONDS = 1.0
"""How long the check tries. Processes that share the port get one another's connections, as chance will have it."""
_SHOWN_SECONDS = 0.005
"""What a connection on loopback takes to show, and more."""
_UNTOUCHED_SECONDS = 0.01
"""For which it has to show: threads of gRPC's own would have taken it by then."""


_NOTHING = SimpleNamespace(tag=None)
"""In an event's place."""


class QueuePolling:
    """Polls the queue. `next` takes the next event, whose tag is None when there is none, and raises whatever the queue
    does: that event is lost. All else is what the loop asks of a source."""

    def __init__(self, queue: Any, descriptor: int) -> None:
        """`descriptor`: of gRPC's epoll. No connection has been taken yet."""
        self.wake_descriptor: int | None = descriptor
        # Without a function between: it is called some four times a request.
        self.next: Callable[[], Event] = partial(queue.poll, 0.0)
        self._watched_file = os.open(f"/proc/self/fdinfo/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        self._count()
        self._unconnected = self._watched

    @property
    def longest_sleep_seconds(self) -> float:
        if self._watched == self._unconnected:
            # It may have changed since.
            self._count()
        return _LONGEST_IDLE_SLEEP_SECONDS if self._watched == self._unconnected else _LONGEST_SLEEP_SECONDS

    @property
    def looks(self) -> int:
        """As many as the core may have fetched connections that were ready, and one. Each poll of the server's looks
        twice."""
        if time.monotonic() - self._counted_at > _COUNTING_SECONDS:
            self._count()
        return min(self._watched, _MOST_AT_ONCE) // 2 + 1

    def _count(self) -> None:
        self._counted_at = time.monotonic()
        self._watched = os.pread(self._watched_file, _COUNTED_BYTES, 0).count(b"tfd:")

    def has_mail(self) -> bool:
        # The polls have shown it, and the descriptor does from then on.
        return False

    def stop(self) -> None:
        os.close(self._watched_file)


class WaitingThread:
    """Waits in the queue, and hands the events over to the loop.

    A thread of its own where gRPC's core works its sockets on threads of its own, as it does unless it is told
    otherwise: waiting for their events blocks in C.
    """

    wake_descriptor: int | None = None
    longest_sleep_seconds = math.inf
    looks = 1

    def __init__(self, queue: Any, wake: Callable[[], None]) -> None:
        """`wake`: the loop."""
        self._queue = queue
        self._wake = wake
        self._events: deque[Event | Exception] = deque()
        self._stopping = False
        threading.Thread(target=self._run, name="grpc-events", daemon=True).start()

    def next(self) -> Event:
        if not self._events:
            return _NOTHING
        event = self._events.popleft()
        if isinstance(event, Exception):
            raise event
        return event

    def has_mail(self) -> bool:
        return bool(self._events)

    def stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        while not self._stopping:
            try:
                event = self._queue.poll(time.time() + _PATIENCE_SECONDS)
            except Exception as error:
                event = error
            else:
                if event.tag is None:
                    continue
            self._events.append(event)
            self._wake()
            # An event keeps its call alive; it must not while the thread waits for the next.
            del event


def find_epoll(port: int) -> int | None:
    """The epoll with which gRPC's core waits for connections to the port when the queue is polled; None = it does so on
    threads of its own."""
    if _POLLS_ITSELF not in os.environ.get("GRPC_EXPERIMENTS", "").split(","):
        return None
    for entry in Path("/proc/self/fd").iterdir():
        # Descriptors come and go meanwhile.
        with contextlib.suppress(OSError):
            if "eventpoll" not in str(entry.readlink()):
                continue
            lines = Path("/proc/self/fdinfo", entry.name).read_text().splitlines()
            watched = [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
            for descriptor, found in _sockets(port):
                if descriptor in watched and _listens(found):
                    epoll = int(entry.name)
                    return epoll if _tells(epoll, found.family, found.getsockname()) else None
    return None


def _tells(epoll: int, family: socket.AddressFamily, address: Any) -> bool:
    """Whether a connection to the address makes the epoll readable until somebody polls the queue."""
    end = time.monotonic() + _CHECK_SECONDS
    while time.monotonic() < end:
        # The address that listens for all others connects to this machine.
        with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
            client.connect_ex(address)
            if select.select([epoll], [], [], _SHOWN_SECONDS)[0]:
                time.sleep(_UNTOUCHED_SECONDS)
                return bool(select.select([epoll], [], [], 0)[0])
    return False


def refuse_handshakes(port: int) -> None:
    """Only those connections come that are made already, or nearly so; before `stop_listening`."""
    for _, found in _sockets(port):
        if _listens(found):
            begin_no_handshakes(found)


def stop_listening(port: int) -> bool:
    """New connections are refused from now on, the others go on. gRPC's core ends its port and its calls together: a
    call that is on its way then is answered CANCELLED, unless the port is closed first. False: a connection waits for
    the core, and would be reset; the port is not closed."""
    for descriptor, found in _sockets(port):
        if _listens(found):
            waiting = select.poll()
            waiting.register(found, select.POLLIN)
            if waiting.poll(0):
                return False
            # The core keeps the descriptor, of which nothing will ever come.
            with socket.socket() as silent:
                os.dup2(silent.fileno(), descriptor, inheritable=False)
    return True


def has_connections(port: int) -> bool:
    """Whether a client is connected to the port."""
    return not all(_listens(found) for _, found in _sockets(port))


def _listens(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets(port: int) -> Iterator[tuple[int, socket.socket]]:
    for entry in Path("/proc/self/fd").iterdir():
        # Descriptors come and go meanwhile.
        with contextlib.suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] == port:
                    yield int(entry.name), found
