"""Queues the requests of a version that is not loaded, until the loaded version takes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rocserve.core.errors import ServeError, unavailable
from rocserve.core.exchange import RECEIVED, Exchange
from rocserve.core.requests import InferRequest
from rocserve.scheduling.model_scheduler import ModelScheduler
from rocserve.scheduling.scheduler import SchedulerParts


class ColdScheduler(ModelScheduler):
    """A scheduler without instances. Requests wait in the order of their arrival, unvalidated: the model's inputs are
    known only after its load, and its policies and timeouts apply from then on."""

    def __init__(self, parts: SchedulerParts, wait_seconds: float, on_empty: Callable[[], None]) -> None:
        """`wait_seconds`: requests are refused after this time. `on_empty`: called when the last waiting request has
        been refused."""
        config = replace(parts.config, dynamic_batching=None, sequence_batching=None)
        super().__init__(replace(parts, config=config))
        self._wait_seconds = wait_seconds
        self._on_empty = on_empty

    def submit(self, request: InferRequest, exchange: Exchange) -> None:
        """See Scheduler. The request needs no validation."""
        now_ns = time.monotonic_ns()
        until = now_ns / 1e9 + self._wait_seconds
        request.exchange, request.queue_start_ns = exchange, now_ns
        request.nbytes = sum(memoryview(data).nbytes for data in request.data)
        request.expires_at = until if request.deadline is None else min(until, request.deadline)
        self._queue.push(request)
        self._arrived.append(request)
        # Immediately, because a load takes long.
        exchange.watch_cancellation(lambda: self._client_left(request))
        self._schedule_pump()

    def take_all(self) -> Sequence[InferRequest]:
        """Close the scheduler. Returns the waiting requests in their order, in their state before `submit`."""
        requests = list(self._queue)
        for request in requests:
            self._queue.remove(request)
            request.exchange.enter(RECEIVED)
            request.exchange.unwatch()
            request.expires_at = None
        self._arrived.clear()
        self._break_cycles()
        return requests

    def _take_out(self, request: InferRequest, error: ServeError) -> None:
        super()._take_out(request, error)
        if not self._queue.count:
            self._on_empty()

    def _time_out(self, request: InferRequest) -> ServeError | None:
        return unavailable(f"model '{self._config.name}' was not loaded within {self._wait_seconds:g} s; ask again")
