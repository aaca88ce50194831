"""When the reactor does the completion thread's work itself.

Two threads that both need the GIL for a few microseconds at a time spend most of a small request's cost on handing it
to each other. While calls come thick and fast the reactor's thread therefore takes the workers' answers too: it looks
at the completion queue without waiting, and waits for the workers only while the queue has nothing. A slow model, or a
quiet minute, ends that at once: then a thread each is what keeps a new call from waiting behind a worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from rocserve.backends.parameters import usable_cpus

Event = Any

DENSE_EVENTS = 64
DENSE_SECONDS = 0.032
"""Traffic is dense when so many events took no longer than this: some 700 small calls a second."""

WORKER_WAIT_SECONDS = 0.001
"""How long a new call may have to wait behind a worker."""
QUEUE_WAIT_SECONDS = 0.004
"""How long the reactor waits for a call, when no worker has anything to do, before traffic counts as thin."""
MOST_SLOW_WAITS = 3
"""Waits for workers in a row that brought nothing."""
MOST_EVENTS = 256
"""Events that are handled before the workers are looked at again."""
BURST_EVENTS = 6
"""Events at once from which on calls are taken to come in bursts; one call alone makes three."""
LOOKS = 100
"""How often the workers are looked at, some 0.1 ms in all, before the thread sleeps until they answer: when calls come
one by one, falling asleep and being woken is a sixth of a small request's time. Not where there is one CPU only, which
the worker needs."""
PATIENCE_SECONDS = 0.01


class Companion(Protocol):
    """The thread whose work can be borrowed (rocserve.workers.completion.CompletionThread)."""

    @property
    def awaited(self) -> set[object]:
        """Empty when no worker is due to say anything."""

    def has_timer_within(self, seconds: float) -> bool: ...
    def borrow(self, patience_seconds: float) -> bool: ...
    def give_back(self) -> None: ...
    def wait(self, seconds: float) -> list[tuple[int, int]]: ...
    def handle(self, readable: list[tuple[int, int]]) -> None: ...

    def begin_collecting(self) -> None:
        """Requests that come from now on are about to have company: hold them until `end_collecting`."""

    def end_collecting(self) -> None: ...


class DenseTraffic:
    """Watches the density of events, and runs both threads' work on the caller's while it is high."""

    def __init__(
        self, companion: Companion, poll: Callable[[float], Event | None], handle: Callable[[Event], None]
    ) -> None:
        """`poll` gives the next event until a time.time() deadline, or None; `handle` never raises."""
        self._companion = companion
        self._poll = poll
        self._handle = handle
        self._events = 0
        self._since = time.monotonic()
        self._in_bursts = False
        self._look_at = 0.0
        self._may_look_again = usable_cpus() > 1

    def count(self) -> bool:
        """One event has come; whether traffic is dense."""
        self._events += 1
        if self._events < DENSE_EVENTS:
            return False
        now = time.monotonic()
        dense = now - self._since <= DENSE_SECONDS
        self._events, self._since = 0, now
        return dense

    def run(self, is_over: Callable[[], bool]) -> None:
        """Until traffic is thin, or all is over."""
        companion = self._companion
        if not companion.borrow(PATIENCE_SECONDS):
            return
        try:
            slow_waits = 0
            self._look_at = time.monotonic() + QUEUE_WAIT_SECONDS
            while slow_waits < MOST_SLOW_WAITS and not is_over():
                more = self._drain()
                if companion.awaited:
                    readable = self._wait_for_workers(more)
                    if readable:
                        slow_waits = 0
                        if self._in_bursts:
                            # First the calls that have come meanwhile: they may join the batch that starts next.
                            self._drain()
                        companion.handle(readable)
                    elif not more:
                        slow_waits += 1
                elif companion.has_timer_within(QUEUE_WAIT_SECONDS):
                    # The completion queue's clock is too coarse for it.
                    return
                else:
                    self._hear_the_unasked()
                    if not more:
                        event = self._poll(time.time() + QUEUE_WAIT_SECONDS)
                        if event is None:
                            return
                        self._handle(event)
        finally:
            companion.give_back()
            self._events, self._since = 0, time.monotonic()

    def _hear_the_unasked(self) -> None:
        """Of a worker that is not due to say anything: it must not wait for calls to stop coming."""
        if time.monotonic() >= self._look_at:
            readable = self._companion.wait(0)
            if readable:
                self._companion.handle(readable)
            self._look_at = time.monotonic() + QUEUE_WAIT_SECONDS

    def _wait_for_workers(self, more: bool) -> list[tuple[int, int]]:
        """What the workers have to say; `more` calls may be there, so that nothing is waited for."""
        if not more and self._may_look_again and not self._in_bursts:
            for _ in range(LOOKS):
                readable = self._companion.wait(0)
                if readable:
                    return readable
        return self._companion.wait(0 if more else WORKER_WAIT_SECONDS)

    def _drain(self) -> bool:
        """Handle the events that are there; whether more may be."""
        if not self._in_bursts:
            return self._handle_events()
        self._companion.begin_collecting()
        try:
            return self._handle_events()
        finally:
            self._companion.end_collecting()

    def _handle_events(self) -> bool:
        handled = 0
        while handled < MOST_EVENTS:
            event = self._poll(0.0)
            if event is None:
                break
            self._handle(event)
            handled += 1
        if handled:
            self._in_bursts = handled >= BURST_EVENTS
        return handled == MOST_EVENTS
