"""Keeps the instances of model versions with their batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from rocserve.core.exchange import Exchange
from rocserve.core.requests import InferRequest
from rocserve.scheduling.batch import FormedBatch
from rocserve.scheduling.call_cycles import LimitedInstance, LimitedModel
from rocserve.scheduling.compute_times import SEND_AHEAD_BELOW_NS, ComputeTimes
from rocserve.scheduling.rate_limiter import RateLimiter
from rocserve.workers.instance import Instance

MOST_AHEAD = 2
"""Batches that may wait in a worker, so that its engine never waits for one. More would only wait longer."""

ROUND_TRIP_NS = 100_000
"""About the time of a round trip to a worker. If the engine takes less for a batch, idle instances would be sent
many small batches: 8 requests in flight on four instances took a sixth more CPU time each."""


class InstancePool:
    """Keeps the batches that each instance has in flight. With a rate limiter, instances run only while it grants them
    their resources."""

    def __init__(
        self, times: ComputeTimes, sends_ahead: bool, limiter: RateLimiter | None, limited: LimitedModel
    ) -> None:
        """`sends_ahead`: a busy instance may be sent further batches, which can then no longer be overtaken; never with
        a limiter. `limited`: the limiter's record of the version, which nothing uses without a limiter."""
        self.in_flight: dict[Instance, deque[FormedBatch]] = {}
        """Instance -> its batches: the first `batches_at_once` are in the engine, the others were sent ahead."""
        self._used: set[Instance] = set()
        self._times = times
        self._last_begin_ns = 0
        self.sends_ahead = sends_ahead and limiter is None
        self.limiter = limiter
        self._limited = limited

    def attach(self, instance: Instance, on_granted: Callable[[], None]) -> None:
        self.in_flight[instance] = deque()
        if self.limiter is not None:
            record = LimitedInstance(self._limited, instance.rate_limiter, instance.device, on_granted)
            self._limited.instances[instance] = record

    def detach(self, instance: Instance) -> None:
        self.in_flight.pop(instance, None)
        self._used.discard(instance)
        if self.limiter is not None and (lost := self._limited.instances.pop(instance, None)) is not None:
            self.limiter.lose(lost)

    def idle(self) -> Instance | None:
        """Return an instance whose engine can begin a batch, preferably one without batches. With a limiter, return
        only one without batches, which may have to wait for its resources."""
        best = None
        for instance, batches in self.in_flight.items():
            if not batches:
                return instance
            if best is None and len(batches) < instance.batches_at_once:
                best = instance
        return best if self.limiter is None else None

    @property
    def idle_count(self) -> int:
        """Return the number of instances without batches."""
        return sum([not batches for batches in self.in_flight.values()])

    def is_idle(self, instance: Instance) -> bool:
        batches = self.in_flight.get(instance)
        return batches is not None and not batches

    def ahead(self) -> Instance | None:
        """Return the busy instance with the fewest batches, if it may be sent one more."""
        if self._times.engine_ns >= SEND_AHEAD_BELOW_NS or not self.sends_ahead:
            return None
        best, fewest = None, MOST_AHEAD + 1
        for instance, batches in self.in_flight.items():
            count = len(batches)
            if count < fewest:
                best, fewest = instance, count
        return best

    @property
    def next_return_ns(self) -> int:
        """time.monotonic_ns() when a batch is likely to come back; 0 = none is in flight, or none comes back soon."""
        if self._times.engine_ns >= ROUND_TRIP_NS or not self.sends_ahead or not any(self.in_flight.values()):
            return 0
        return self._last_begin_ns + ROUND_TRIP_NS

    # The rate limiter, if there is one

    def claim(self, instance: Instance) -> bool:
        """Ask for an idle instance's resources. Returns whether it may run now."""
        return self.limiter is None or self.limiter.ask(self._limited.instances[instance])

    def claim_any(self, idle: Instance) -> Instance | None:
        """Return the instance without batches that may run now; None if all must wait for their resources. Without a
        limiter this is `idle`."""
        limiter = self.limiter
        if limiter is None:
            return idle
        records = self._limited.instances
        free = [one for one, batches in self.in_flight.items() if not batches]
        free.sort(key=lambda one: (not records[one].is_granted, records[one].finish))
        return next((one for one in free if limiter.ask(records[one])), None)

    def give_back(self, also_wanted: bool) -> None:
        """Give back the resources of instances that do not run. `also_wanted`: they also stop waiting for resources,
        because there is no work."""
        if self.limiter is not None:
            for instance, batches in self.in_flight.items():
                record = self._limited.instances[instance]
                if not batches and (record.is_granted or (also_wanted and record.is_staged)):
                    self.limiter.release(record, has_run=False)

    def caller(self, instance: object) -> LimitedInstance | None:
        """Return the `caller` of requests that the instance's model makes."""
        return None if self.limiter is None else self._limited.instances.get(instance)

    def follow(self, request: InferRequest, exchange: Exchange) -> None:
        """Follow a call by another model."""
        assert self.limiter is not None, "the request has a caller"
        self.limiter.follow(request, exchange, self._limited)

    def take_over(self, request: InferRequest) -> None:
        """Take over a call that another version of the model began to follow."""
        if self.limiter is not None and request.caller is not None:
            self.limiter.move(request, self._limited, None)

    def begin(self, instance: Instance, batch: FormedBatch) -> None:
        batches = self.in_flight[instance]
        batches.append(batch)
        batch.instance = instance
        self._last_begin_ns = batch.compute_start_ns
        batch.sent_ahead = len(batches) > 1
        if instance not in self._used:
            self._used.add(instance)
            batch.is_first = True
        if (limiter := self.limiter) is not None and not self._limited.keeps_order:
            for request in batch.requests:
                if request.caller is not None:
                    limiter.move(request, self._limited, self._limited.instances[instance])

    def end(self, instance: Instance, batch: FormedBatch) -> None:
        batches = self.in_flight.get(instance)
        if batches and batch in batches:
            batches.remove(batch)
        if self.limiter is not None and not batches and instance in self._limited.instances:
            self.limiter.release(self._limited.instances[instance], has_run=True)

    # Requests that instances have, and that have not begun to run

    def waiting(self) -> Iterator[InferRequest]:
        """Yield the requests that, to the server's knowledge, wait in workers. Safe on any thread."""
        # Copies, each made in one step, because the data plane changes these meanwhile.
        for instance, batches in tuple(self.in_flight.items()):
            for _, waiting in _waiting(instance, tuple(batches)):
                yield from waiting

    def batch_ahead(self, request: InferRequest) -> FormedBatch | None:
        """Return the batch with which a request waits in a worker, sent ahead or in a group behind others; None if it
        does not wait there."""
        for instance, batches in self.in_flight.items():
            for batch, waiting in _waiting(instance, batches):
                if any(one is request for one in waiting):
                    return batch
        return None


def _waiting(
    instance: Instance, batches: Iterable[FormedBatch]
) -> Iterator[tuple[FormedBatch, Sequence[InferRequest]]]:
    """Yield the batches of an instance, with the requests that, to the server's knowledge, have not begun to run."""
    begins = instance.batches_at_once
    for batch in batches:
        if begins <= 0:
            yield batch, batch.running
        elif batch.is_grouped:
            # At least the first has begun. A group runs alone.
            first = batch.requests[0]
            yield batch, [request for request in batch.running if request is not first]
            begins = 0
        begins -= 1
