"""Requests that run together: their inputs joined, their outcome taken apart."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rocserve.core.classification import classify
from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import InferResponse
from rocserve.core.statistics import BatchTimes, ModelStatistics
from rocserve.core.tensors import Tensor
from rocserve.core.validation import reshape_dims
from rocserve.scheduling.entry import QueuedRequest
from rocserve.workers.channel import BatchInput


class Outcome(Protocol):
    """What an instance reports of a batch (rocserve.workers.channel.BatchOutcome)."""

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

    @property
    def row_count(self) -> int:
        return sum(entry.plan.batch_size for entry in self.entries)

    def request_sizes(self) -> tuple[int, ...]:
        return tuple(entry.plan.batch_size for entry in self.entries)

    def inputs(self, batching: bool) -> list[BatchInput]:
        """One joined input for each of the requests' inputs; a part a request."""
        entries = self.entries
        first = entries[0]
        if len(entries) == 1:
            return [
                BatchInput(entry.name, entry.datatype, entry.shape, (data,))
                for entry, data in zip(first.plan.inputs, first.request.data, strict=True)
            ]
        rows = self.row_count
        plan = first.plan
        if all(entry.plan is plan for entry in entries):
            parts: list[Sequence[bytes | bytearray | memoryview]] = list(
                zip(*(entry.request.data for entry in entries), strict=True)
            )
        else:
            # Clients may order the same inputs differently.
            by_name = [_data_by_name(entry) for entry in entries]
            parts = [[data[spec.name] for data in by_name] for spec in plan.inputs]
        return [
            BatchInput(spec.name, spec.datatype, (rows, *spec.shape[1:]) if batching else spec.shape, part)
            for spec, part in zip(plan.inputs, parts, strict=True)
        ]

    def requested_outputs(self, order: Sequence[str]) -> tuple[str, ...]:
        """What any of the requests wants, in the order of the configuration where they differ."""
        first = self.entries[0].plan.outputs
        if all(entry.plan.outputs == first for entry in self.entries):
            return first
        wanted = {name for entry in self.entries for name in entry.plan.outputs}
        return tuple(name for name in order if name in wanted)


def _data_by_name(entry: QueuedRequest) -> dict[str, bytes | bytearray | memoryview]:
    return {spec.name: data for spec, data in zip(entry.plan.inputs, entry.request.data, strict=True)}


class BatchAnswerer:
    """Sends each request of a finished batch its answer, and counts."""

    def __init__(self, config: ModelConfig, version: int, statistics: ModelStatistics) -> None:
        self._name = config.name
        self._version = str(version)
        self._batching = config.max_batch_size > 0
        self._outputs = {output.name: output for output in config.outputs}
        self._reshapes = any(output.reshape is not None for output in config.outputs)
        self._statistics = statistics

    def answer(self, batch: FormedBatch, outcome: Outcome) -> None:
        """Every request gets a response or an error, and the statistics their share; never raises."""
        times = BatchTimes(
            batch.compute_start_ns, outcome.input_end_ns, outcome.output_start_ns, outcome.compute_end_ns
        )
        queue_starts: list[int] = []
        request_ends: list[int] = []
        for index, entry in enumerate(batch.entries):
            error = outcome.error or outcome.failures.get(index)
            if error is None:
                try:
                    entry.responder.send(self._response(entry, outcome.outputs_of(index)))
                except ServeError as caught:
                    error = caught
            now = time.monotonic_ns()
            if error is None:
                queue_starts.append(entry.queue_start_ns)
                request_ends.append(now)
            else:
                self._statistics.record_failure(entry.queue_start_ns, now)
                entry.responder.fail(error)
        if queue_starts:
            self._statistics.record_batch(times, queue_starts, request_ends, batch.row_count)

    def _response(self, entry: QueuedRequest, outputs: list[Tensor]) -> InferResponse:
        plan = entry.plan
        if len(outputs) != len(plan.outputs):
            wanted = set(plan.outputs)
            outputs = [tensor for tensor in outputs if tensor.name in wanted]
        if self._reshapes:
            outputs = [self._reshaped(tensor) for tensor in outputs]
        if plan.classifications:
            outputs = [self._classified(tensor, plan.classifications) for tensor in outputs]
        return InferResponse(self._name, self._version, entry.request.id, outputs)

    def _reshaped(self, tensor: Tensor) -> Tensor:
        config = self._outputs[tensor.name]
        if config.reshape is None:
            return tensor
        lead = tensor.shape[:1] if self._batching else ()
        dims = reshape_dims(tensor.shape[len(lead) :], config.reshape, config.dims)
        return Tensor(tensor.name, tensor.datatype, (*lead, *dims), tensor.data)

    def _classified(self, tensor: Tensor, classifications: Mapping[str, int]) -> Tensor:
        count = classifications.get(tensor.name, 0)
        if not count:
            return tensor
        return classify(tensor, count, self._outputs[tensor.name].labels, self._batching)
