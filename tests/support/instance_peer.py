"""An instance whose worker's end the test plays."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, unavailable
from rocserve.core.requests import Member
from rocserve.core.tensor_places import padded
from rocserve.core.tensors import Tensor, TensorHead
from rocserve.links.entries import DONE, ENTRY, RESPONSE, RESULTS_HEADER
from rocserve.plane.heap import SharedHeap
from rocserve.plane.loop import PlaneLoop
from rocserve.workers.instance import Instance
from rocserve.workers.instance_requests import CallStarter, RequestInstance
from rocserve.workers.results import BatchOutcome
from rocserve.workers.worker_end import OutgoingResult, ReceivedBatch, WorkerEnd
from support.shared_memory import GUARD
from support.workers import LOG, BatchInput, add_sub_inputs, execute, mail_of, on_plane

HEAD = TensorHead("SUM", DataType.INT32, (1, 16))


class Peer:
    """An instance and the worker's end of its link, which the test drives."""

    def __init__(
        self,
        plane: PlaneLoop,
        heap_bytes: int = 1 << 30,
        start_call: CallStarter | None = None,
        is_ours: bool = False,
        poll_seconds: float = 0.0,
    ) -> None:
        """`start_call`: see RequestInstance; None = an Instance. `is_ours`: see Instance. `poll_seconds`: see
        InstanceMail."""
        self.plane = plane
        self.broken: list[str] = []
        self.broken_event = threading.Event()
        self.inputs = SharedHeap("test", heap_bytes)
        self.mail = mail_of(plane, poll_seconds)
        shared = ("m", self.mail, self.inputs, self._on_broken, LOG)
        make = Instance if start_call is None else partial(RequestInstance, start_call=start_call)
        self.instance = make(*shared, is_ours=is_ours)
        self.socket = self.instance.peer
        self.end_of_worker = WorkerEnd(self.socket, GUARD)
        if start_call is None:
            self.instance.open()
        self._batches = self.end_of_worker.batches()
        self.outcomes: list[BatchOutcome] = []
        self.arrived = threading.Semaphore(0)

    def _on_broken(self, instance: Instance, reason: str) -> None:
        assert instance is self.instance
        self.broken.append(reason)
        self.broken_event.set()

    def on_outcome(self, outcome: BatchOutcome) -> None:
        self.outcomes.append(outcome)
        self.arrived.release()

    def send(self, inputs: list[BatchInput] | None = None, sizes: tuple[int, ...] = (1,)) -> None:
        execute(self.instance, inputs or add_sub_inputs(), ("SUM",), sizes, self.on_outcome)

    def submit(self, members: Sequence[Member], is_grouped: bool = False) -> None:
        on_plane(self.plane, lambda: self.instance.execute(is_grouped, members, self.on_outcome))

    def take(self) -> ReceivedBatch:
        return next(self._batches)

    def execute(self, inputs: list[BatchInput] | None = None, sizes: tuple[int, ...] = (1,)) -> ReceivedBatch:
        """Start a batch, and take it at the worker's end."""
        self.send(inputs, sizes)
        return self.take()

    def text(self, data: bytes) -> tuple[int, int]:
        return self.end_of_worker.sender.put_text(data), len(data)

    def result(self, data: bytes, head: TensorHead = HEAD) -> OutgoingResult:
        """A result with one output."""
        end, contents = self.end_of_worker, padded((data,))
        return OutgoingResult(
            RESPONSE, 1, 0, 0, 0, sum(map(len, contents)), contents, end.sender.of([Tensor(*head, data)])
        )

    def finish(self, batch: ReceivedBatch, *results: OutgoingResult) -> None:
        self.answered_ns = time.monotonic_ns()
        self.end_of_worker.finish(batch, (self.answered_ns - 2, self.answered_ns - 1), results)

    def results_of(self, batch: ReceivedBatch, entry: bytes, *times: int, entries: int = 1) -> bytes:
        """The message that finishes a batch with a table of one entry, in a slot of 1024 bytes."""
        now = time.monotonic_ns()
        header = RESULTS_HEADER.pack(entries, *(times or (now - 2, now - 1, now)))
        return done(batch, *self.text((header + entry).ljust(1024, b"\0")))

    def end(self, error: ServeError | None = None) -> None:
        on_plane(self.plane, lambda: self.instance.end(error or unavailable("it is over")))

    def release(self) -> None:
        """Release the outputs: nobody reads them any more."""
        on_plane(self.plane, self.outcomes.clear)

    def close(self) -> None:
        """Close the heaps of both ends."""
        for heap in (self.inputs, self.end_of_worker.inputs, self.end_of_worker._heap):
            heap.close()


def done(batch: ReceivedBatch, place: int, nbytes: int) -> bytes:
    return ENTRY.pack(DONE, 0, 0, 0, batch.id, place, nbytes)
