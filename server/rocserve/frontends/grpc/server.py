"""The gRPC transport: grpcio's completion queue, polled by the data plane's loop, or by a thread that waits in it.

grpcio's own Python servers (grpc/_server.py, grpc.aio) are written on this queue and spend most of a small call's time
above it, in thread pools or tasks. All that touches the private module is in this file and in
`server_calls`. The tag of every operation is a function that takes its event; the transport does nothing but call it.

With GRPC_EXPERIMENTS=-event_engine_listener gRPC's core reads and writes its sockets on the thread that polls the
queue, and what it waits for itself is an epoll. That of the server is the one that watches the listening socket. The
loop sleeps on it. What the core has its own threads do (the handshake of a connection, a reader that had too much at
once, timers) ends in the queue without a sign: only a poll shows it.
"""

from __future__ import annotations

import contextlib
import logging
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

import grpc
from grpc._cython import cygrpc

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_memory import RequestMemory
from rocserve.frontends.grpc.server_calls import (
    Event,
    ReceiveMessage,
    ServerCall,
    ServerStreamCall,
    ServerUnaryCall,
    refuse,
)
from rocserve.frontends.grpc.transport import (
    LINGER_SECONDS,
    SERVER_EXITING,
    Routes,
    StreamRoute,
    TransportLimits,
    UnaryRoute,
    binding_error,
    channel_arguments,
    listen_address,
)
from rocserve.frontends.grpc.unfinished import CHECK_SECONDS, UnfinishedBytes, WaitingCalls, received_bytes
from rocserve.frontends.listen_address import (
    CertificateFiles,
    CertificateReloader,
    Certificates,
    begin_no_handshakes,
    certificate_files,
)
from rocserve.observability.failures import RequestFailures
from rocserve.plane.loop import PlaneLoop
from rocserve.settings import GrpcSettings

MOST_EVENTS = 48
"""Of a turn: some 1 ms, after which the workers' answers have their turn."""
_REQUESTED_TOGETHER = 16
"""Calls that the core is asked for at once, in place of those that have come."""
OUTSTANDING_REQUESTS = MOST_EVENTS + _REQUESTED_TOGETHER
"""How many calls the core may hand over before it is asked for others."""

LAST_EVENTS_SECONDS = 0.05
"""How long events are handled after the server has shut down, and how long handshakes may take that have begun."""

AGE_SPREAD = 1.1
"""gRPC's core ends connections between 0.9 and 1.1 times their age."""


class GrpcServer:
    """A gRPC server for a set of routes, on one completion queue.

    A source of the data plane's loop: handlers are called on its thread, and so is all that is done with gRPC's core.
    """

    def __init__(
        self,
        settings: GrpcSettings,
        routes: Routes,
        log: logging.Logger,
        plane: PlaneLoop,
        memory: RequestMemory | None = None,
        limits: TransportLimits | None = None,
    ) -> None:
        """`memory`: what unfinished messages and answers that clients do not read count against; None = the latter
        alone, against one of its own."""
        self.limits = limits = limits or TransportLimits()
        self._settings = settings
        self.plane = plane
        self.memory = memory or RequestMemory()
        self._counts_unfinished = memory is not None
        self.log = log
        self.failures = RequestFailures(log)
        self.live: set[ServerCall] = set()
        """Calls in flight. Removing a call from it is what makes an answer the first and only one."""
        self.sending: dict[ServerUnaryCall | ServerStreamCall, float] = {}
        """Calls with an answer that their clients have not taken yet, and since when (time.monotonic())."""
        self.waiting: WaitingCalls = WaitingCalls(limits.waiting, time.monotonic(), log)
        self._unrequested = 0
        self.closed = False
        """The queue takes no more operations."""
        self._unary = {name.encode(): route for name, route in routes.items() if isinstance(route, UnaryRoute)}
        self._stream = {name.encode(): route for name, route in routes.items() if isinstance(route, StreamRoute)}
        self._server: Any = None
        self._queue: Any = None
        self._polling: QueuePolling | WaitingThread
        self._stopping = False
        self._port = 0
        # While the server shuts down: since when all calls have been answered.
        self._idle_since: float | None = None
        self._ended = threading.Event()
        self._on_ended: Callable[[], None] = self._ended.set

    def start(self) -> int:
        """Bind and serve; the port that was bound. From any thread. Raises: OSError: the address cannot be bound (in
        use, not permitted, unknown), or a certificate cannot be read or used."""
        files = certificate_files(self._settings, self._settings)
        credentials = None if files is None else server_credentials(files, self.log)
        self._queue = cygrpc.CompletionQueue()
        self._server = cygrpc.Server(channel_arguments(self._settings, self.limits), False)
        self._server.register_completion_queue(self._queue)
        where = listen_address(self._settings)
        host = f"[{where.address}]" if ":" in where.address else where.address
        target = f"{host}:{where.port}".encode()
        try:
            port: int = self._server.add_http2_port(target, credentials and credentials._credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            self._server.destroy()
            raise binding_error(where, files)
        if self._counts_unfinished:
            self.waiting.unfinished = UnfinishedBytes(
                self.memory, partial(received_bytes, port), time.monotonic(), self.log
            )
        self._server.start()
        self._port = port
        epoll = find_epoll(port)
        if epoll is not None:
            self._polling = QueuePolling(self._queue, epoll)
        else:
            self.log.info(
                "gRPC works its sockets on threads of its own, which costs time;"
                " GRPC_EXPERIMENTS=-event_engine_listener has the data plane's thread do it"
            )
            self._polling = WaitingThread(self._queue, self.plane.wake)
        self.wake_descriptor: int | None = self._polling.wake_descriptor
        self._unrequested = OUTSTANDING_REQUESTS
        self.plane.call_soon(self._begin)
        return port

    def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, wait for those in flight, cancel the others after the grace time, close.

        Blocks until all is closed: call it from any thread but the loop's (from asyncio, `to_thread`).
        """
        if self._server is None or self._ended.is_set():
            return
        self.plane.call_soon(lambda: self._go_on(self._close()))
        if not self._ended.wait(grace_seconds):
            self.plane.call_soon(self._cancel_all)
            self._ended.wait()

    def stop_soon(self, grace_seconds: float, on_ended: Callable[[], None]) -> None:
        """As `stop`, on the loop's thread and without waiting."""
        self._on_ended = on_ended
        self._go_on(self._close())
        self.plane.call_at(time.monotonic() + grace_seconds, self._cancel_all)

    @property
    def longest_sleep_seconds(self) -> float:
        return self._polling.longest_sleep_seconds

    @property
    def looks(self) -> int:
        return self._polling.looks

    def has_mail(self) -> bool:
        return self._polling.has_mail()

    def poll(self) -> bool:
        # The calls that have come are on their way to their workers already.
        if self._unrequested >= _REQUESTED_TOGETHER:
            self._request_calls()
        next_event = self._polling.next
        busy = missed = False
        for _ in range(MOST_EVENTS):
            try:
                event = next_event()
            except Exception as error:
                # The event is lost; it may have been a call's arrival, so ask for one more.
                self.failures.report("an event of the gRPC completion queue could not be read", error)
                self._unrequested += 1
                continue
            tag = event.tag
            if tag is None:
                # A look that reads a socket has no event; what was read is the next one's.
                if missed:
                    break
                missed = True
                continue
            busy, missed = True, False
            try:
                tag(event)
            except Exception as error:
                self.failures.report("an event of the gRPC completion queue could not be handled", error)
        return busy

    def give_up_unread(self) -> None:
        """Cancel the calls whose clients have not taken an answer within its time."""
        now = time.monotonic()
        for call, since in list(self.sending.items()):
            if since + self.limits.write_seconds(call.held_bytes) < now:
                call.give_up()

    def _begin(self) -> None:
        self.plane.add_source(self)
        self._check()

    def _check(self) -> None:
        if self._ended.is_set():
            return
        self.plane.call_at(time.monotonic() + CHECK_SECONDS, self._check)
        self.give_up_unread()
        self.waiting.check(time.monotonic())
        if not self._stopping:
            return
        # The requests would be refused when they are whole.
        self.waiting.end_unary(ServeError(StatusCode.UNAVAILABLE, SERVER_EXITING))
        if self.live or self.sending:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        elif time.monotonic() - self._idle_since >= LINGER_SECONDS:
            # The core would wait 20 seconds for clients that do not answer its last ping.
            self._server.cancel_all_calls()

    def _go_on(self, steps: Iterator[None]) -> None:
        """Take the next step, and the one after it a little later."""
        if not self._stopping:
            for _ in steps:
                self.plane.call_at(time.monotonic() + LAST_EVENTS_SECONDS, lambda: self._go_on(steps))
                break

    def _close(self) -> Iterator[None]:
        """Who has connected already is served. Connections that end for their age are waited for: the core cancels
        calls on their way when it shuts down."""
        port, self._port = self._port, 0
        if not port:
            return
        refuse_handshakes(port)
        yield
        while not stop_listening(port):
            yield
        age_seconds = self._settings.max_connection_age_ms * AGE_SPREAD / 1000
        deadline = time.monotonic() + age_seconds + LINGER_SECONDS if age_seconds else 0.0
        while time.monotonic() < deadline and has_connections(port):
            yield
        self._shut_down()

    def _shut_down(self) -> None:
        self._stopping = True
        # Ends of cancelled calls may still be on their way when it has, and watchers and streams shall hear of them.
        self._server.shutdown(
            self._queue, lambda event: self.plane.call_at(time.monotonic() + LAST_EVENTS_SECONDS, self._end)
        )

    def _cancel_all(self) -> None:
        # Those of a destroyed server would crash the process.
        if not self._ended.is_set():
            if not self._stopping:
                self._shut_down()
            self._server.cancel_all_calls()

    def _end(self) -> None:
        self.closed = True
        self.live.clear()
        # gRPC's core closes its epoll with the last server.
        self.plane.remove_source(self)
        self._polling.stop()
        self._server.destroy()
        self._ended.set()
        self._on_ended()

    def _request_calls(self) -> None:
        """Ask the core for others in place of those that have come."""
        request_call, queue, on_call = self._server.request_call, self._queue, self._on_call
        try:
            while self._unrequested and not self._stopping:
                self._unrequested -= 1
                request_call(queue, queue, on_call)
        except ValueError:
            # Shutting down has begun meanwhile.
            if not self._stopping:
                raise

    def _on_call(self, event: Event) -> None:
        if not event.success:
            return
        self._unrequested += 1
        name = event.call_details.method
        waiting = self.waiting
        count = len(waiting.since)
        if count >= waiting.check_from:
            waiting.check(time.monotonic())
        if len(self.live) - count >= self.limits.max_concurrent_calls:
            most = self.limits.max_concurrent_calls
            text = f"the server has {most} calls in flight, as many as it takes; try again later"
            refuse(event, StatusCode.UNAVAILABLE, text)
            return
        route = self._unary.get(name)
        if route is not None:
            call: ServerUnaryCall = (route.call_type or ServerUnaryCall)(self, event, route)
            self.live.add(call)
            waiting.since[call] = waiting.checked_at
            event.call.start_server_batch((ReceiveMessage(0),), call.on_message)
            return
        stream_route = self._stream.get(name)
        if stream_route is not None:
            ServerStreamCall(self, event).open(stream_route)
            return
        text = f"Method not found! This server does not serve '{name.decode(errors='replace')}'"
        refuse(event, StatusCode.UNIMPLEMENTED, text)


def server_credentials(files: CertificateFiles, log: logging.Logger) -> Any:
    """grpc.ServerCredentials that follow the files. Raises: OSError: a file cannot be read."""
    reloader = CertificateReloader(files, "gRPC", log)

    def configuration(certificates: Certificates | None) -> Any:
        if certificates is None:
            return None
        pair = (certificates.private_key, certificates.certificate_chain)
        return grpc.ssl_server_certificate_configuration([pair], certificates.root)

    return grpc.dynamic_ssl_server_credentials(
        configuration(reloader.first()), lambda: configuration(reloader.renewed()), files.root is not None
    )


POLLS_ITSELF = "-event_engine_listener"
"""In GRPC_EXPERIMENTS before grpc is imported."""
MOST_AT_ONCE = 100
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
        return min(self._watched, MOST_AT_ONCE) // 2 + 1

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
    if POLLS_ITSELF not in os.environ.get("GRPC_EXPERIMENTS", "").split(","):
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
