"""The default transport: grpcio's completion queue, driven by one thread.

grpcio's own Python servers (grpc/_server.py, grpc.aio) are written on this queue and spend most of a small call's time
above it, in thread pools or tasks. All that touches the private module is in this file and in
`reactor_calls`.

The tag of every operation is a function that takes its event; the thread does nothing but call it.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import Any

from grpc._cython import cygrpc

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_memory import RequestMemory
from rocserve.frontends.grpc.credentials import server_credentials
from rocserve.frontends.grpc.dense_traffic import Companion, DenseTraffic
from rocserve.frontends.grpc.reactor_calls import (
    Event,
    ReactorCall,
    ReactorStreamCall,
    ReactorUnaryCall,
    ReceiveMessage,
    refuse,
)
from rocserve.frontends.grpc.received_bytes import received_bytes
from rocserve.frontends.grpc.transport import (
    LINGER_SECONDS,
    SERVER_EXITING,
    Routes,
    StreamRoute,
    TransportOptions,
    UnaryRoute,
    binding_error,
    certificate_files,
    channel_arguments,
    too_many_calls,
    unknown_method,
)
from rocserve.frontends.grpc.unfinished import CHECK_SECONDS, WaitingCalls
from rocserve.frontends.grpc.unfinished_bytes import UnfinishedBytes
from rocserve.observability.failures import RequestFailures

OUTSTANDING_REQUESTS = 64
"""How many calls the core may hand over at once."""
MOST_UNREQUESTED = OUTSTANDING_REQUESTS // 2
"""Calls that have come and that the core has not been asked for others in place of. A client decides when a call's
message comes, and whether it does: that must not keep others from being handed over."""

LAST_EVENTS_SECONDS = 0.05
"""How long the thread listens on after the server has shut down."""


class ReactorTransport:
    """A gRPC server on one completion queue and one thread. See `Transport`."""

    def __init__(
        self,
        options: TransportOptions,
        routes: Routes,
        log: logging.Logger,
        companion: Companion | None = None,
        memory: RequestMemory | None = None,
    ) -> None:
        """
        Args:
            companion: the thread whose work this one does as well while traffic is dense.
            memory: what unfinished messages and answers that clients do not read count against; None = the latter
                alone, against one of its own.
        """
        self.options = options
        self.memory = memory or RequestMemory()
        self._counts_unfinished = memory is not None
        self._companion = companion
        self.log = log
        self.failures = RequestFailures(log)
        self.live: set[ReactorCall] = set()
        self.sending: dict[ReactorUnaryCall | ReactorStreamCall, float] = {}
        self.waiting: WaitingCalls = WaitingCalls(options.waiting, time.monotonic(), log)
        self._unrequested = 0
        self.closed = False
        self.watch_lock = threading.Lock()
        self._unary = {name.encode(): route for name, route in routes.items() if isinstance(route, UnaryRoute)}
        self._stream = {name.encode(): route for name, route in routes.items() if isinstance(route, StreamRoute)}
        self._server: Any = None
        self._queue: Any = None
        self._stopping = False
        # The wall-clock time at which the thread looks at something else than events.
        self._check_at = 0.0
        self._is_shut_down = False
        # While the server shuts down: since when all calls have been answered.
        self._idle_since: float | None = None
        # Guards the server's end: cancelling the calls of a destroyed server would crash the process.
        self._end_lock = threading.Lock()
        self._ended = threading.Event()
        # A thread of its own because waiting on the queue blocks in C.
        self._thread = threading.Thread(target=self._run, name="grpc-reactor", daemon=True)

    def start(self) -> int:
        files = certificate_files(self.options)
        credentials = None if files is None else server_credentials(files, self.log)
        self._queue = cygrpc.CompletionQueue()
        self._server = cygrpc.Server(channel_arguments(self.options), False)
        self._server.register_completion_queue(self._queue)
        target = self.options.target.encode()
        try:
            if credentials is None:
                port: int = self._server.add_http2_port(target)
            else:
                port = self._server.add_http2_port(target, credentials._credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            self._server.destroy()
            raise binding_error(self.options)
        if self._counts_unfinished:
            self.waiting.unfinished = UnfinishedBytes(
                self.memory, partial(received_bytes, port), time.monotonic(), self.log
            )
        self._server.start()
        self._unrequested = OUTSTANDING_REQUESTS
        self.request_calls()
        self._thread.start()
        return port

    def stop(self, grace_seconds: float) -> None:
        with self._end_lock:
            if not self._thread.is_alive():
                return
            if not self._stopping:
                self._stopping = True
                self._server.shutdown(self._queue, self._on_shut_down)
        if not self._ended.wait(grace_seconds):
            with self._end_lock:
                if not self._ended.is_set():
                    self._server.cancel_all_calls()
        self._thread.join()

    def give_up_unread(self) -> None:
        now = time.monotonic()
        for call, since in list(self.sending.items()):
            if since + self.options.write_seconds(call.unsent_bytes) < now:
                call.give_up()

    def _run(self) -> None:
        dense = DenseTraffic(self._companion, self._next_event, self._handle) if self._companion else None
        while True:
            event = self._next_event(self._check_at)
            if event is not None:
                self._handle(event)
                if dense is not None and dense.count():
                    dense.run(self._is_over)
            # An event keeps its call alive; it must not while the thread waits for the next.
            del event
            if self._is_over():
                break
        with self._end_lock:
            self.closed = True
            self.live.clear()
            self._server.destroy()
            self._ended.set()

    def _next_event(self, deadline: float | None) -> Event | None:
        """The next event, or None once `deadline` (time.time() seconds) has passed without one."""
        while True:
            try:
                event = self._queue.poll(deadline)
            except Exception as error:
                # The event is lost; it may have been a call's arrival, so ask for one more.
                self.failures.report("an event of the gRPC completion queue could not be read", error)
                self._unrequested += 1
                self.request_calls()
                continue
            return event if event.tag is not None else None

    def _handle(self, event: Event) -> None:
        try:
            event.tag(event)
        except Exception as error:
            self.failures.report("an event of the gRPC completion queue could not be handled", error)

    def _is_over(self) -> bool:
        """Whether the server has shut down; makes the check that is due otherwise."""
        if time.time() < self._check_at:
            return False
        if not self._is_shut_down:
            self._check()
        return self._is_shut_down

    def _check(self) -> None:
        self._check_at = time.time() + CHECK_SECONDS
        try:
            self.waiting.check(time.monotonic())
            if self._stopping:
                self._hasten_end()
        except Exception as error:
            self.failures.report("calls that wait for their clients could not be checked", error)

    def _hasten_end(self) -> None:
        # The requests would be refused when they are whole.
        self.waiting.end_unary(ServeError(StatusCode.UNAVAILABLE, SERVER_EXITING))
        if self.live or self.sending:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        elif time.monotonic() - self._idle_since >= LINGER_SECONDS:
            # The core would wait 20 seconds for clients that do not answer its last ping.
            self._server.cancel_all_calls()

    def _on_shut_down(self, event: Event) -> None:
        # The ends of cancelled calls may still be on their way, and watchers and streams shall hear of them.
        self._is_shut_down = True
        self._check_at = time.time() + LAST_EVENTS_SECONDS

    def request_calls(self) -> None:
        """See CallOwner."""
        while self._unrequested and not self._stopping:
            self._unrequested -= 1
            try:
                self._server.request_call(self._queue, self._queue, self._on_call)
            except ValueError:
                # Shutting down has begun meanwhile.
                if not self._stopping:
                    raise

    def _on_call(self, event: Event) -> None:
        if not event.success:
            return
        self._unrequested += 1
        if self._unrequested >= MOST_UNREQUESTED:
            self.request_calls()
        name = event.call_details.method
        waiting = self.waiting
        count = len(waiting.since)
        if count >= waiting.check_from:
            waiting.check(time.monotonic())
        if len(self.live) - count >= self.options.max_concurrent_calls:
            refuse(event, StatusCode.UNAVAILABLE, too_many_calls(self.options.max_concurrent_calls))
            return
        route = self._unary.get(name)
        if route is not None:
            call = ReactorUnaryCall(self, event, route)
            self.live.add(call)
            waiting.since[call] = waiting.checked_at
            event.call.start_server_batch((ReceiveMessage(0),), call.on_message)
            return
        stream_route = self._stream.get(name)
        if stream_route is not None:
            ReactorStreamCall(self, event).open(stream_route)
            return
        refuse(event, StatusCode.UNIMPLEMENTED, unknown_method(name.decode(errors="replace")))
