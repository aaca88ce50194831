"""Requests that run together: their layout, and their outcome taken apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig
from rocserve.core.request_form import Member
from rocserve.core.requests import InferRequest, InferResponse
from rocserve.core.serving import Responder
from rocserve.core.statistics import ModelStatistics
from rocserve.scheduling.responses import ResponseMaker
from rocserve.workers.instance import Instance
from rocserve.workers.results import BatchOutcome


@dataclass(slots=True, eq=False)
class FormedBatch:
    """Requests taken from the queue for one execution."""

    entries: list[InferRequest]
    compute_start_ns: int
    is_grouped: bool = False
    """They travel together, and the engine runs them one after the other."""
    sent_ahead: bool = False
    """It waits in its worker behind another."""
    is_first: bool = False
    """Of its instance, which may take far longer for it than for any other."""
    absent_rows: int = 0
    """Rows of no request; they are among the dropped."""
    dropped: set[InferRequest] | None = None
    """Those that have been answered since, because they waited in the worker for too long."""

    @property
    def undropped(self) -> list[InferRequest]:
        """The requests that are still to be answered."""
        if not self.dropped:
            return self.entries
        return [entry for entry in self.entries if entry not in self.dropped]

    def drop(self, entry: InferRequest) -> None:
        if self.dropped is None:
            self.dropped = set()
        self.dropped.add(entry)


class BatchAnswerer:
    """Tells workers of the requests of a batch, sends each its answer, and counts."""

    def __init__(self, config: ModelConfig, version: int, statistics: ModelStatistics) -> None:
        self._make_response = ResponseMaker(config, version).make
        self._statistics = statistics

    def members(self, batch: FormedBatch, instance: Instance) -> Sequence[Member]:
        """A batch's requests as an instance is told of them, any instance."""
        return [(entry.plan.form, entry.data, 0, b"") for entry in batch.entries]

    def forget(self, batch: FormedBatch) -> None:
        """Nothing of the batch ran."""

    def answer(self, batch: FormedBatch, outcome: BatchOutcome) -> bool:
        """Every request gets a response or an error, and the statistics their share; never raises. True: none is left
        open."""
        error, failures, dropped = outcome.error, outcome.failures, batch.dropped or ()
        times = (batch.compute_start_ns, outcome.input_end_ns, outcome.output_start_ns, outcome.compute_end_ns)
        answers: list[tuple[Responder, InferResponse | ServeError]] = []
        queue_starts: list[int] = []
        rows = batch.absent_rows
        for index, entry in enumerate(batch.entries):
            if entry in dropped:
                continue
            rows += entry.plan.batch_size
            if entry.trace is not None:
                entry.trace.note_run(entry.queue_start_ns, times)
            if entry.phases is not None:
                entry.phases.add_run(times)
            refusal = error or (failures.get(index) if failures else None)
            if refusal is None:
                try:
                    response = self._make_response(entry, *outcome.outputs_of(index))
                    response.is_large, response.slot = outcome.is_large, outcome.slot
                    answers.append((entry.responder, response))
                    queue_starts.append(entry.queue_start_ns)
                    continue
                except ServeError as fault:
                    refusal = fault
            answers.append((entry.responder, refusal))
            self._statistics.record_failure(entry.queue_start_ns, time.monotonic_ns(), by_backend=True)
            self._statistics.note_failure(refusal.text)
        # Counted before they are sent: who has an answer and asks for the statistics finds it there.
        if queue_starts:
            if batch.is_grouped:
                rows = batch.entries[0].plan.batch_size
            self._statistics.record_batch(*times, queue_starts, time.monotonic_ns(), rows, batch.is_grouped)
            if batch.absent_rows:
                self._statistics.leave_out(batch.absent_rows)
        for responder, answer in answers:
            if isinstance(answer, ServeError):
                responder.fail(answer)
            else:
                responder.send(answer)
        return True

    def drop(self, batch: FormedBatch, entry: InferRequest) -> bool:
        """A request that was sent ahead is answered by the caller, whatever comes back; whether that may be."""
        batch.drop(entry)
        return True
