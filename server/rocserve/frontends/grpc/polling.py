"""Polls gRPC's completion queue for the data plane's loop, or lets a thread wait for its events; and finds the sockets
of gRPC's port, which the core does not expose.

If GRPC_EXPERIMENTS has -event_engine_listener, gRPC's core reads and writes its sockets on the thread that polls the
queue, and waits in an epoll itself. The server's epoll is the one that watches the listening socket; the loop sleeps on
it. The core's own threads (handshakes of connections, readers that had too much to read, timers) put events into the
queue without waking the epoll; only a poll finds these events.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rocserve.frontends.grpc.open_calls import Event
from rocserve.frontends.listen_address import begin_no_handshakes
from rocserve.frontends.shared_ports import listens, sockets_of

_NO_EVENT = SimpleNamespace(tag=None)


class QueuePolling:
    """Polls the queue, for a source of the loop. `next` returns the next event, whose tag is None if there is none. It
    raises what the queue raises; that event is lost."""

    def __init__(self, queue: Any, descriptor: int) -> None:
        """`descriptor`: gRPC's epoll. Must be made before the first connection."""
        self.wake_descriptor: int | None = descriptor
        # Called about four times per request, so there is no wrapper function.
        self.next: Callable[[], Event] = partial(queue.poll, 0.0)
        self._watched_file = os.open(f"/proc/self/fdinfo/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        self._count()
        self._unconnected = self._watched

    @property
    def longest_sleep_seconds(self) -> float:
        if self._watched == self._unconnected:
            # The number may have changed since the last count.
            self._count()
        # Not longer, because events of the core's own threads do not wake the loop; without a connection no client
        # waits.
        return 1.0 if self._watched == self._unconnected else 0.05

    @property
    def idle_polls(self) -> int:
        """Return how many idle polls prove that the queue is empty. Each poll of the server tries two ready sockets."""
        # Seconds. A poll costs less than the count.
        if time.monotonic() - self._counted_at > 0.1:
            self._count()
        # Ready sockets that gRPC's core fetches from its epoll in one call (MAX_EPOLL_EVENTS). It handles one per poll,
        # so there is no event only if as many polls have found none.
        most_ready = 100
        return min(self._watched, most_ready) // 2 + 1

    def _count(self) -> None:
        self._counted_at = time.monotonic()
        # More than _MAX_EPOLL_EVENTS connections take.
        self._watched = os.pread(self._watched_file, 16 << 10, 0).count(b"tfd:")

    def has_mail(self) -> bool:
        # The polls have found the mail; the descriptor shows what comes later.
        return False

    def stop(self) -> None:
        os.close(self._watched_file)


class WaitingThread:
    """Waits in the queue, and hands the events to the loop.

    Its thread is needed if gRPC's core serves its sockets on its own threads, as it does by default, because waiting
    for events blocks in C.
    """

    wake_descriptor: int | None = None
    longest_sleep_seconds = math.inf
    idle_polls = 1

    def __init__(self, queue: Any, wake: Callable[[], None]) -> None:
        self._queue = queue
        self._wake = wake
        self._events: deque[Event | Exception] = deque()
        self._stopping = False
        threading.Thread(target=self._run, name="grpc-events", daemon=True).start()

    def next(self) -> Event:
        if not self._events:
            return _NO_EVENT
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
                # Every half second, it checks whether it must stop.
                event = self._queue.poll(time.time() + 0.5)
            except Exception as error:
                event = error
            else:
                if event.tag is None:
                    continue
            self._events.append(event)
            self._wake()
            # The event keeps its call alive; drop it before waiting for the next one.
            del event


def find_epoll(place: int | str, address: str | None = None) -> int | None:
    """Return the epoll in which gRPC's core waits for connections to the port or path; None if it waits on threads.
    `address`: where to connect, if not to the address that the socket was bound to."""
    # It must be there before grpc is imported.
    if "-event_engine_listener" not in os.environ.get("GRPC_EXPERIMENTS", "").split(","):
        return None
    for entry in Path("/proc/self/fd").iterdir():
        # Other threads open and close descriptors meanwhile.
        with contextlib.suppress(OSError):
            if "eventpoll" not in str(entry.readlink()):
                continue
            lines = Path("/proc/self/fdinfo", entry.name).read_text().splitlines()
            watched = [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
            for descriptor, found in sockets_of(place):
                if descriptor in watched and listens(found):
                    epoll = int(entry.name)
                    return epoll if _wakes(epoll, found.family, address or found.getsockname()) else None
    return None


def _wakes(epoll: int, family: socket.AddressFamily, address: Any) -> bool:
    """Return whether a connection to the address makes the epoll readable until the queue is polled."""
    # select() refuses descriptors above 1023.
    poll = select.poll()
    poll.register(epoll, select.POLLIN)
    # Tried again for a second, because another process that shares the port may get the connection.
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        # A connection to the wildcard address reaches this machine.
        with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
            client.connect_ex(address)
            # Milliseconds. A connection on loopback appears sooner.
            if poll.poll(5):
                # The core's own threads would have accepted it by then.
                time.sleep(0.01)
                return bool(poll.poll(0))
    return False


def refuse_handshakes(place: int | str) -> None:
    """Ignore new handshakes; those that have begun are completed. Must be called before `stop_listening`."""
    for _, found in sockets_of(place):
        if listens(found):
            begin_no_handshakes(found)


def stop_listening(place: int | str) -> bool:
    """Refuse new connections from now on; existing ones continue. gRPC's core ends its port and its calls together:
    unless the port is closed first, a call on its way is answered CANCELLED. Returns False, without closing the port,
    if a connection waits for the core and would be reset."""
    for descriptor, found in sockets_of(place):
        if listens(found):
            waiting = select.poll()
            waiting.register(found, select.POLLIN)
            if waiting.poll(0):
                return False
            # The core keeps the descriptor, which never becomes ready again.
            with socket.socket() as silent:
                os.dup2(silent.fileno(), descriptor, inheritable=False)
    return True
