"""Requests that run together: their layout, and their outcome taken apart."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig
from rocserve.core.ragged import Shape, ragged_batching
from rocserve.core.requests import InferResponse
from rocserve.core.statistics import ModelStatistics
from rocserve.core.tensors import Buffer, Tensor
from rocserve.core.validation import InputPlan, RequestPlan
from rocserve.scheduling.entry import QueuedRequest
from rocserve.scheduling.responses import ResponseMaker
from rocserve.workers.batch_inputs import InputLayout
from rocserve.workers.channel import Channel
from rocserve.workers.messages import BatchLayout, RaggedShapes, TensorHead

_REMEMBERED_LAYOUTS = 1024


class Outcome(Protocol):
    """What an instance reports of a batch (rocserve.workers.batch_outcome.BatchOutcome)."""

    error: ServeError | None
    failures: Mapping[int, ServeError]
    input_end_ns: int
    output_start_ns: int
    compute_end_ns: int

    def outputs_of(self, request_index: int) -> list[Tensor]: ...


@dataclass(slots=True, eq=False)
class FormedBatch:
    """Requests taken from the queue for one execution."""

    entries: list[QueuedRequest]
    compute_start_ns: int
    one_by_one: bool = False
    """A convoy: its requests run one after the other."""
    sent_ahead: bool = False
    """It waits in its worker behind another."""
    is_first: bool = False
    """Of its instance, which may take far longer for it than for any other."""
    absent_rows: int = 0
    """Rows of no request; they are among the dropped."""
    dropped: set[QueuedRequest] | None = None
    """Those that have been answered since, because they waited in the worker for too long."""

    @property
    def undropped(self) -> list[QueuedRequest]:
        """The requests that are still to be answered."""
        if not self.dropped:
            return self.entries
        return [entry for entry in self.entries if entry not in self.dropped]

    def drop(self, entry: QueuedRequest) -> None:
        if self.dropped is None:
            self.dropped = set()
        self.dropped.add(entry)


class BatchLayouts:
    """The layouts of batches, remembered for requests with equal heads, which most are."""

    def __init__(self, config: ModelConfig) -> None:
        self._batching = config.max_batch_size > 0
        self._output_order = tuple(output.name for output in config.outputs)
        self._ragged = ragged_batching(config)
        self._layouts: dict[tuple[RequestPlan, int], InputLayout] = {}
        self._mixed_layouts: dict[tuple[RequestPlan, ...], InputLayout] = {}

    def of(self, batch: FormedBatch, channel: Channel) -> tuple[InputLayout, Sequence[Sequence[Buffer]]]:
        """The layout of a batch, and each request's data in its order; the same on any channel."""
        entries = batch.entries
        plan = entries[0].plan
        data: list[Sequence[Buffer]] = [entry.request.data for entry in entries]
        for entry in entries:
            if entry.plan is not plan:
                # Clients may order the same inputs differently, or want different outputs.
                return self._of_mixed(batch), [_in_order(entry, plan) for entry in entries]
        key = (plan, len(entries))
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._make(batch)
            if len(self._layouts) >= _REMEMBERED_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = layout
        return layout, data

    def forget(self, batch: FormedBatch) -> None:
        """Nothing of the batch ran."""

    def heads(self, batch: FormedBatch) -> tuple[TensorHead, ...]:
        """The inputs of the whole batch."""
        return tuple(
            TensorHead(spec.name, spec.datatype, self._shape(spec, batch)) for spec in batch.entries[0].plan.inputs
        )

    def _shape(self, spec: InputPlan, batch: FormedBatch) -> Shape:
        if spec.name in self._ragged.inputs:
            return (sum(math.prod(entry.plan.input_shape(spec.name)) for entry in batch.entries),)
        if self._batching:
            return (sum(entry.plan.batch_size for entry in batch.entries), *spec.shape[1:])
        return spec.shape

    def _of_mixed(self, batch: FormedBatch) -> InputLayout:
        plans = tuple([entry.plan for entry in batch.entries])
        layout = self._mixed_layouts.get(plans)
        if layout is None:
            layout = self._make(batch)
            if len(self._mixed_layouts) >= _REMEMBERED_LAYOUTS:
                self._mixed_layouts.clear()
            self._mixed_layouts[plans] = layout
        return layout

    def _make(self, batch: FormedBatch) -> InputLayout:
        entries = batch.entries
        plan = entries[0].plan
        sizes = tuple(entry.plan.batch_size for entry in entries)
        wanted = {name for entry in entries for name in entry.plan.outputs}
        if len(wanted) == len(plan.outputs):
            requested = plan.outputs
        else:
            requested = tuple(name for name in self._output_order if name in wanted)
        return InputLayout(
            BatchLayout(self.heads(batch), requested, sizes, batch.one_by_one, self._ragged_shapes(entries))
        )

    def _ragged_shapes(self, entries: Sequence[QueuedRequest]) -> RaggedShapes | None:
        ragged = self._ragged
        if not ragged.inputs and not ragged.scattered:
            return None
        return RaggedShapes(
            {name: tuple(entry.plan.input_shape(name) for entry in entries) for name in sorted(ragged.inputs)},
            {
                name: tuple(scatter.shape_of(entry.plan.input_shape(scatter.source)) for entry in entries)
                for name, scatter in ragged.scattered.items()
            },
        )


def _in_order(entry: QueuedRequest, plan: RequestPlan) -> Sequence[Buffer]:
    by_name = {spec.name: data for spec, data in zip(entry.plan.inputs, entry.request.data, strict=True)}
    return [by_name[spec.name] for spec in plan.inputs]


def convoy_shares(begin: int, times: Sequence[int], count: int) -> tuple[int, int, int]:
    """When the input of one request of a convoy of `count` was there, and its engine and its output ended: of a
    convoy's times since `begin` each request has the same part."""
    input_end, output_start, compute_end = (begin + (time_ns - begin) // max(count, 1) for time_ns in times)
    return input_end, output_start, compute_end


class BatchAnswerer:
    """Sends each request of a finished batch its answer, and counts."""

    def __init__(self, config: ModelConfig, version: int, statistics: ModelStatistics) -> None:
        self._make_response = ResponseMaker(config, version).make
        self._statistics = statistics

    def answer(self, batch: FormedBatch, outcome: Outcome) -> bool:
        """Every request gets a response or an error, and the statistics their share; never raises. True: none is left
        open."""
        entries = batch.entries
        answers = [self._answer(index, entry, outcome) for index, entry in enumerate(entries)]
        if batch.dropped:
            answers = [answer for entry, answer in zip(entries, answers, strict=True) if entry not in batch.dropped]
            entries = batch.undropped
        now = time.monotonic_ns()
        # Counted before they are sent: who has an answer and asks for the statistics finds it there.
        self._record(batch, entries, outcome, answers, now)
        for entry, answer in zip(entries, answers, strict=True):
            if isinstance(answer, ServeError):
                entry.responder.fail(answer)
            else:
                entry.responder.send(answer)
        return True

    def drop(self, batch: FormedBatch, entry: QueuedRequest) -> bool:
        """A request that was sent ahead is answered by the caller, whatever comes back; whether that may be."""
        batch.drop(entry)
        return True

    def _record(
        self,
        batch: FormedBatch,
        entries: Sequence[QueuedRequest],
        outcome: Outcome,
        answers: Sequence[InferResponse | ServeError],
        now: int,
    ) -> None:
        """`entries`: those that `answers` are for."""
        queue_starts: list[int] = []
        rows = 0
        times = (batch.compute_start_ns, outcome.input_end_ns, outcome.output_start_ns, outcome.compute_end_ns)
        for entry, answer in zip(entries, answers, strict=True):
            rows += entry.plan.batch_size
            if entry.request.trace is not None:
                entry.request.trace.note_run(entry.queue_start_ns, times)
            if entry.request.phases is not None:
                entry.request.phases.add_run(times)
            if isinstance(answer, ServeError):
                self._statistics.record_failure(entry.queue_start_ns, now, by_backend=True)
            else:
                queue_starts.append(entry.queue_start_ns)
        if batch.one_by_one:
            self._record_convoy(times, queue_starts, now, batch.entries[0].plan.batch_size)
        elif queue_starts:
            self._statistics.record_batch(*times, queue_starts, now, rows + batch.absent_rows)
            if batch.absent_rows:
                self._statistics.leave_out(batch.absent_rows)

    def _record_convoy(self, times: tuple[int, int, int, int], queue_starts: list[int], now: int, rows: int) -> None:
        """An execution for each request; of the time, each has the same part."""
        begin, *ends = times
        shares = convoy_shares(begin, ends, len(queue_starts))
        for queue_start in queue_starts:
            self._statistics.record_batch(begin, *shares, [queue_start], now, rows)

    def _answer(self, index: int, entry: QueuedRequest, outcome: Outcome) -> InferResponse | ServeError:
        if outcome.error is not None:
            return outcome.error
        if outcome.failures and index in outcome.failures:
            return outcome.failures[index]
        try:
            return self._make_response(entry, outcome.outputs_of(index))
        except ServeError as error:
            return error
