"""Serves gRPC on grpcio's completion queue.

grpcio's own Python servers (grpc/_server.py, grpc.aio) use this queue, too, but spend most of a small call's time in
thread pools or tasks above it. Only this file and `server_calls` use the private module. The tag of every operation is
a function that takes the operation's event; the transport only calls it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import grpc
from grpc._cython import cygrpc

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.printable import readable_size
from rocserve.core.request_memory import RequestMemory
from rocserve.core.steps import Steps
from rocserve.frontends.grpc.open_calls import CHECK_SECONDS, Event, OpenCalls
from rocserve.frontends.grpc.polling import (
    QueuePolling,
    WaitingThread,
    find_epoll,
    refuse_handshakes,
    stop_listening,
)
from rocserve.frontends.grpc.server_calls import (
    ReceiveMessage,
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
from rocserve.frontends.shared_ports import has_connections
from rocserve.frontends.tls import CertificateFiles, CertificateReloader, certificate_files
from rocserve.frontends.unix_sockets import PublishedSocket, private_path, publish
from rocserve.plane.freed_memory import FreedMemory, private_bytes
from rocserve.plane.loop import PlaneLoop
from rocserve.settings import GrpcSettings

MOST_EVENTS = 48
"""The most events in one turn. They take about 1 ms, after which the loop must handle the workers' answers."""
_REQUESTED_TOGETHER = 16
"""Calls that are requested from the core together, after as many have arrived."""

LAST_EVENTS_SECONDS = 0.05
"""Events are still handled for this time after the server has shut down, and handshakes under way may take as long."""

_NOTHING = object()
"""The tag of an event that needs no work."""


class GrpcServer:
    """Serves a set of routes on one completion queue.

    A source of the data plane's loop. Handlers and gRPC's core are called only on the loop's thread.
    """

    def __init__(
        self,
        settings: GrpcSettings,
        routes: Routes,
        log: logging.Logger,
        plane: PlaneLoop,
        memory: RequestMemory | None = None,
        limits: TransportLimits | None = None,
        behind_relay: bool = False,
    ) -> None:
        """`memory` counts unread answers; None = in a separate memory. `behind_relay`: only a relay in this process
        connects to the Unix socket, through `relay_path`."""
        limits = limits or TransportLimits()
        self._settings = settings
        self.plane = plane
        self.calls = OpenCalls(limits, memory or RequestMemory(), log)
        self._log = log
        self._unrequested = 0
        self._unary = {name.encode(): route for name, route in routes.items() if isinstance(route, UnaryRoute)}
        self._stream = {name.encode(): route for name, route in routes.items() if isinstance(route, StreamRoute)}
        self._server: Any = None
        self._queue: Any = None
        self._polling: QueuePolling | WaitingThread
        self._stopping = False
        self._bound: int | str = 0
        """The port, or the path under which the Unix socket was bound."""
        self._behind_relay = behind_relay
        self._published: PublishedSocket | None = None
        self._socket_file: int | None = None
        """Descriptor of the Unix socket's file, which has no name behind a relay."""
        self._shut_down_at = 0.0
        # While the server shuts down: the time when all calls had been answered.
        self._idle_since: float | None = None
        self._ended = threading.Event()
        self._on_ended: Callable[[], None] = self._ended.set

    def start(self) -> int:
        """Bind, serve, and return the port; 1 for a Unix socket. From any thread. Raises OSError if the address cannot
        be bound (in use, not permitted, unknown), or if a certificate cannot be read or used."""
        files = certificate_files(self._settings, self._settings)
        credentials = None if files is None else server_credentials(files, self._log)
        self._queue = cygrpc.CompletionQueue()
        self._server = cygrpc.Server(channel_arguments(self._settings, self.calls.limits), False)
        self._server.register_completion_queue(self._queue)
        where = listen_address(self._settings)
        host = f"[{where.address}]" if ":" in where.address else where.address
        target, reached_at = f"{host}:{where.port}", None
        with ExitStack() as binding:
            try:
                if where.unix is not None:
                    self._bound = binding.enter_context(private_path(where.unix))
                    target = f"unix:{self._bound}"
                port: int = self._server.add_http2_port(target.encode(), credentials and credentials._credentials)
                if where.unix is not None and self._behind_relay:
                    self._socket_file = os.open(target.removeprefix("unix:"), os.O_PATH | os.O_CLOEXEC)
                    reached_at = self.relay_path
                elif where.unix is not None:
                    self._published = publish(where.unix, target.removeprefix("unix:"))
                    reached_at = where.unix.path
            except RuntimeError:
                port = 0
            except OSError as error:
                self._abandon()
                raise where.refusal(error) from None
        if port == 0:
            self._server.destroy()
            raise binding_error(where, files)
        self._server.start()
        self._bound = self._bound or port
        epoll = find_epoll(self._bound, reached_at)
        if epoll is not None:
            self._polling = QueuePolling(self._queue, epoll)
        else:
            self._log.debug(
                "gRPC serves its sockets on its own threads, which is slower; set"
                " GRPC_EXPERIMENTS=-event_engine_listener to serve them on the data plane's thread"
            )
            self._polling = WaitingThread(self._queue, self.plane.wake)
        self.wake_descriptor: int | None = self._polling.wake_descriptor
        # The core may hand over so many calls before the server requests others.
        self._unrequested = MOST_EVENTS + _REQUESTED_TOGETHER
        self.plane.call_soon(self._begin)
        return port

    def _abandon(self) -> None:
        """End a server that has not started. The core aborts the process if one that listens is destroyed."""
        self._server.start()
        self._server.shutdown(self._queue, _NOTHING)
        while self._queue.poll(time.time() + LINGER_SECONDS).tag is not _NOTHING:
            pass
        self._server.destroy()

    @property
    def relay_path(self) -> str:
        """The path by which a relay in this process connects. No other process can use it."""
        return f"/proc/self/fd/{self._socket_file}"

    def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, wait for calls in flight, cancel them after the grace time, and close.

        Blocks until all is closed, so it must not run on the loop's thread (from asyncio, use `to_thread`).
        """
        if self._server is not None and not self._ended.is_set():
            self.plane.call_soon(lambda: self.stop_soon(grace_seconds, self._ended.set))
            self._ended.wait()

    def stop_soon(self, grace_seconds: float, on_ended: Callable[[], None]) -> None:
        """As `stop`, on the loop's thread and without waiting; `on_ended` is called at the end."""
        self._on_ended = on_ended
        self._continue_closing(self._close())
        self.plane.call_at(time.monotonic() + grace_seconds, self._cancel_all)

    @property
    def longest_sleep_seconds(self) -> float:
        return self._polling.longest_sleep_seconds

    @property
    def idle_polls(self) -> int:
        return self._polling.idle_polls

    def has_mail(self) -> bool:
        return self._polling.has_mail()

    def poll(self) -> bool:
        # Requested at the beginning of a turn, when the last turn's calls are already on their way to workers.
        if self._unrequested >= _REQUESTED_TOGETHER:
            self._request_calls()
        next_event = self._polling.next
        busy = missed = False
        for _ in range(MOST_EVENTS):
            try:
                event = next_event()
            except Exception as error:
                # The event is lost. It may have been the arrival of a call, so one more call is requested.
                self.calls.failures.report("cannot read an event of the gRPC completion queue", error)
                self._unrequested += 1
                continue
            tag = event.tag
            if tag is None:
                # A poll that reads a socket returns no event; the next poll returns the event for what was read.
                if missed:
                    break
                missed = True
                continue
            busy, missed = True, False
            try:
                tag(event)
            except Exception as error:
                self.calls.failures.report("cannot handle an event of the gRPC completion queue", error)
        return busy

    def _begin(self) -> None:
        self.plane.add_source(self)
        self._check()

    def _check(self) -> None:
        if self._ended.is_set():
            return
        self.plane.call_at(time.monotonic() + CHECK_SECONDS, self._check)
        self.calls.cancel_unread()
        self.calls.waiting.check(time.monotonic())
        self.plane.work_off(self._bound_memory())
        if not self._stopping:
            return
        # These requests would be refused once complete.
        self.calls.waiting.end_unary(ServeError(StatusCode.UNAVAILABLE, SERVER_EXITING))
        if self.calls.live or self.calls.sending:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        elif time.monotonic() - self._idle_since >= LINGER_SECONDS:
            # The core would wait 20 seconds for clients that do not answer its last ping.
            self._server.cancel_all_calls()

    def _bound_memory(self) -> Steps[None]:
        """If this process uses too much memory, give freed memory back. If that is not enough, unfinished messages may
        hold the rest, so the calls that wait for them are ended."""
        most = self.calls.limits.most_private_bytes
        # Reading /proc fails without a free descriptor; the next check may succeed.
        with suppress(OSError):
            if most is None or private_bytes() <= most:
                return
            yield from FreedMemory.give_back()
            if private_bytes() > most:
                text = (
                    f"the server uses more than {readable_size(most)}, its share of the machine's or container's"
                    " memory, and ends calls whose messages arrive slowly; try again later"
                )
                self.calls.waiting.end_slow(ServeError(StatusCode.RESOURCE_EXHAUSTED, text))

    def _continue_closing(self, steps: Steps[None]) -> None:
        """Take the next step of closing, and schedule the step after it."""
        if not self._stopping:
            for _ in steps:
                self.plane.call_at(time.monotonic() + LAST_EVENTS_SECONDS, lambda: self._continue_closing(steps))
                break

    def _close(self) -> Steps[None]:
        """Stop listening, then shut down. Clients that have connected are served. If connections end by age, the method
        waits for their end, because a shutdown of the core cancels calls on their way."""
        bound, self._bound = self._bound, 0
        if not bound:
            return
        if self._published is not None:
            self._published.withdraw()
        elif isinstance(bound, int):
            refuse_handshakes(bound)
        yield
        while not stop_listening(bound):
            yield
        # gRPC's core ends connections between 0.9 and 1.1 times the set age.
        age_seconds = self._settings.max_connection_age_ms * 1.1 / 1000
        deadline = time.monotonic() + age_seconds + LINGER_SECONDS if age_seconds else 0.0
        while time.monotonic() < deadline and has_connections(bound):
            yield
        self._shut_down()

    def _shut_down(self) -> None:
        self._stopping = True
        self._server.shutdown(self._queue, self._on_shut_down)

    def _on_shut_down(self, event: Event) -> None:
        self._shut_down_at = time.monotonic()
        self._end_later()

    def _end_later(self) -> None:
        self.plane.call_at(time.monotonic() + LAST_EVENTS_SECONDS, self._end)

    def _cancel_all(self) -> None:
        # Cancelling the calls of a destroyed server would crash the process.
        if not self._ended.is_set():
            if not self._stopping:
                self._shut_down()
            self._server.cancel_all_calls()

    def _end(self) -> None:
        # Events of cancelled calls may come after the shutdown's event, and watchers and streams must get them.
        # The thread that brings the last events may have to wait for a CPU.
        is_late = time.monotonic() >= self._shut_down_at + 10.0
        if not is_late and any(call.is_watched for call in self.calls.live):
            self._end_later()
            return
        self.calls.closed = True
        self.calls.live.clear()
        # gRPC's core closes its epoll with the last server.
        self.plane.remove_source(self)
        self._polling.stop()
        self._server.destroy()
        if self._socket_file is not None:
            os.close(self._socket_file)
        self._ended.set()
        self._on_ended()

    def _request_calls(self) -> None:
        """Request calls from the core in place of those that have arrived."""
        request_call, queue, on_call = self._server.request_call, self._queue, self._on_call
        try:
            while self._unrequested and not self._stopping:
                self._unrequested -= 1
                request_call(queue, queue, on_call)
        except ValueError:
            # The shutdown has begun meanwhile.
            if not self._stopping:
                raise

    def _on_call(self, event: Event) -> None:
        if not event.success:
            return
        self._unrequested += 1
        name = event.call_details.method
        calls = self.calls
        waiting = calls.waiting
        count = len(waiting.since)
        if count >= waiting.limits.burst:
            waiting.check(time.monotonic())
        most = calls.limits.max_concurrent_calls
        if len(calls.live) - count >= most:
            text = f"the server has {most} calls in flight, the most that it accepts; try again later"
            refuse(event, StatusCode.UNAVAILABLE, text)
            return
        route = self._unary.get(name)
        if route is not None:
            call: ServerUnaryCall = (route.call_type or ServerUnaryCall)(calls, event, route)
            calls.live.add(call)
            waiting.since[call] = waiting.checked_at
            event.call.start_server_batch((ReceiveMessage(0),), call.on_message)
            return
        stream_route = self._stream.get(name)
        if stream_route is not None:
            ServerStreamCall(calls, event).open(stream_route)
            return
        text = f"Method not found! This server does not serve '{name.decode(errors='replace')}'"
        refuse(event, StatusCode.UNIMPLEMENTED, text)


def server_credentials(files: CertificateFiles, log: logging.Logger) -> Any:
    """Return grpc.ServerCredentials that use renewed files. Raises OSError if a file cannot be read."""
    reloader = CertificateReloader(files, "gRPC", log)

    def configuration(contents: Sequence[bytes] | None) -> Any:
        if contents is None:
            return None
        chain, key, *root = contents
        return grpc.ssl_server_certificate_configuration([(key, chain)], *root)

    return grpc.dynamic_ssl_server_credentials(
        configuration(reloader.first()), lambda: configuration(reloader.renewed()), files.root is not None
    )
