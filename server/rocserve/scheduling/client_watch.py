"""Asks after the clients of requests that have waited for a while, so that what nobody wants is dropped."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from rocserve.scheduling.entry import QueuedRequest
from rocserve.scheduling.timers import RoughTimers

_LOOK_SECONDS = 0.01
"""A request that has waited this long is asked after: whoever is served sooner never pays for the asking."""


class Waiting(Protocol):
    """The requests of a version that do not run yet."""

    def __iter__(self) -> Iterator[QueuedRequest]: ...
    def __bool__(self) -> bool: ...


class ClientWatch:
    """Looks from time to time as long as there is anything to look at."""

    def __init__(
        self,
        timers: RoughTimers,
        lock: threading.Lock,
        waiting: Waiting,
        on_left: Callable[[QueuedRequest], None],
    ) -> None:
        """
        Args:
            lock: guards `waiting`, which is looked at under it.
            on_left: called, without the lock and from any thread, when a request's client has gone.
        """
        self._timers = timers
        self._lock = lock
        self._waiting = waiting
        self._on_left = on_left
        self._is_on = False

    def start(self) -> None:
        """Under the lock: there is something to look at."""
        if not self._is_on:
            self._is_on = True
            self._timers.call_about(time.monotonic() + _LOOK_SECONDS, self._look)

    def _look(self) -> None:
        oldest_ns = time.monotonic_ns() - int(_LOOK_SECONDS * 1e9)
        with self._lock:
            unwatched = [entry for entry in self._waiting if not entry.watched and entry.queue_start_ns <= oldest_ns]
            for entry in unwatched:
                entry.watched = True
            self._is_on = bool(self._waiting)
            if self._is_on:
                self._timers.call_about(time.monotonic() + _LOOK_SECONDS, self._look)
        for entry in unwatched:
            entry.responder.watch_cancellation(functools.partial(self._on_left, entry))
