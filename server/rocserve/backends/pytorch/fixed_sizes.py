"""Runs batches on a GPU at fixed sizes, with pinned memory for inputs and outputs, and a captured graph per size.

A graph replays all kernels of a program in one call, on memory at fixed addresses: a batch is copied into the input of
the smallest size that fits, and the surplus rows of the results are dropped. Several batches may be in flight, each
with a separate stream and memory: while one batch is computed, the next is copied in, and the results of the previous
one are copied out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from rocserve.backends.base import Batch, BatchResult
from rocserve.backends.batch_sizes import pieces
from rocserve.backends.device_tensors import DeviceTensors
from rocserve.backends.pytorch.datatypes import torch_dtype
from rocserve.core.errors import ServeError
from rocserve.core.padding import Lengths
from rocserve.core.requests import TensorSpec
from rocserve.core.tensors import Tensor

Array = np.ndarray[Any, Any]
_LOG = logging.getLogger(__name__)

_RUNS_BEFORE = 3
"""Runs of a size before its capture, in which libraries choose their kernels."""


class SizedModel(Protocol):
    """A model that runs at fixed sizes, with any engine."""

    @property
    def device(self) -> torch.device: ...

    @property
    def tensors(self) -> DeviceTensors | None:
        """None = the model runs on the CPU."""

    def inputs_of(self, batch: Batch) -> tuple[list[Tensor], Mapping[int, ServeError]]:
        """Return a batch's inputs in the program's order, and the errors of requests whose values the program does not
        take. May raise ServeError for the whole batch."""

    def value(self, tensor: Tensor, copies: bool) -> Any:
        """Return an input as a PyTorch tensor, on its own memory or as a copy."""

    def outputs_on_gpu(self, batch: Batch) -> Collection[int]:
        """Return the positions of the outputs that stay on the GPU."""

    def batch_result(self, outputs: Sequence[Any], batch: Batch, failures: Mapping[int, ServeError]) -> BatchResult:
        """Return a batch's outputs under the signature's names, with the errors of its inputs. Raises ServeError
        (INTERNAL) if outputs are missing."""

    def errors(self) -> AbstractContextManager[Any]:
        """Turn the engine's errors of a batch into ServeErrors."""

    def mode(self) -> AbstractContextManager[Any]:
        """Return the PyTorch mode in which batches run."""


@dataclass(frozen=True, slots=True)
class _Size:
    """A batch size with its memory."""

    run: Callable[[], Sequence[Any]]
    """Computes the outputs on the GPU from the values in `inputs`."""
    inputs: Sequence[Any]
    staged_inputs: Sequence[Any]
    """Pinned host memory."""
    staged_outputs: Sequence[Any]
    memory: Mapping[str, memoryview]
    """Input name -> memory of its staged input."""


class SizedExecution:
    """An Execution at fixed batch sizes, concurrent with the model's other executions. For one thread."""

    def __init__(self, model: SizedModel, computed: Any) -> None:
        """`computed`: ends each computation of the model; the next one reuses the memory, and waits for it."""
        self.by_size: dict[int, _Size] = {}
        self._model = model
        self._computed = computed
        self._stream = torch.cuda.Stream(model.device)
        """For copies and computations, and for inputs that are made on the GPU."""
        self._ended = torch.cuda.Event()
        self._batch: Batch
        self._failures: Mapping[int, ServeError]
        self._outputs: list[Any] = []

    def input_memory(self, rows: int, sizes: Lengths) -> Mapping[str, memoryview]:
        """Return pinned memory, by input name, which saves a copy; empty = the batch is above the largest size."""
        size = next((size for size in self.by_size if size >= rows), None)
        return {} if size is None else self.by_size[size].memory

    def start(self, batch: Batch) -> None:
        self._batch = batch
        model = self._model
        with model.errors(), model.mode(), torch.cuda.stream(self._stream):
            given, self._failures = model.inputs_of(batch)
            inputs = [model.value(tensor, copies=False) for tensor in given]
            *others, last = pieces(len(inputs[0]), tuple(self.by_size))
            parts = []
            for piece in others:
                self._run([tensor[piece.start : piece.start + piece.rows] for tensor in inputs], piece.batch_size)
                self._ended.synchronize()
                parts.append([output.clone() for output in self._outputs])
            rest = [tensor[last.start : last.start + last.rows] for tensor in inputs]
            self._run(rest, last.batch_size, () if parts else model.outputs_on_gpu(batch))
            if parts:
                self._ended.synchronize()
                self._outputs = [torch.cat(column) for column in zip(*parts, self._outputs, strict=True)]

    @property
    def is_done(self) -> bool:
        return bool(self._ended.query())

    def result(self) -> BatchResult:
        with self._model.errors():
            self._ended.synchronize()
        named = self._model.batch_result(self._outputs, self._batch, self._failures)
        outputs = {name: _copied(value, self._batch.room.get(name)) for name, value in named.outputs.items()}
        return replace(named, outputs=outputs)

    def _run(self, inputs: Sequence[Any], size: int, outputs_on_gpu: Collection[int] = ()) -> None:
        """Run one batch size on the current stream. `outputs_on_gpu`: the positions of outputs that stay on the GPU."""
        memory = self.by_size[size]
        rows = len(inputs[0])
        for value, staged, input_on_gpu in zip(inputs, memory.staged_inputs, memory.inputs, strict=True):
            if not value.is_cuda and value.data_ptr() != staged.data_ptr():
                staged[:rows].copy_(value)
            input_on_gpu[:rows].copy_(value if value.is_cuda else staged[:rows], non_blocking=True)
        self._stream.wait_event(self._computed)
        outputs = memory.run()
        self._computed.record(self._stream)
        tensors = self._model.tensors
        assert tensors is not None, "a GPU's"
        self._outputs = [
            tensors.share(output[:rows])
            if index in outputs_on_gpu
            else staged[:rows].copy_(output[:rows], non_blocking=True)
            for index, (output, staged) in enumerate(zip(outputs, memory.staged_outputs, strict=True))
        ]
        self._ended.record(self._stream)


def sized_executions(
    model: SizedModel,
    call: Callable[[Sequence[Any]], Sequence[Any]],
    specs: Sequence[TensorSpec],
    sizes: Sequence[int],
    count: int,
    captures: bool,
    report: Callable[[str], None],
    stream: Any = None,
) -> list[SizedExecution]:
    """Make `count` executions of the ascending `sizes`, as many sizes as fit into memory. `call` computes the outputs
    from inputs on the GPU, on the current stream. `specs`: the inputs in the program's order, with fixed dimensions
    apart from the batch. `captures`: whether graphs are captured. `stream`: the stream for the captures; None = a new
    one. Any exception is possible if the program cannot be captured, or memory does not suffice for the first size."""
    computed = torch.cuda.Event()
    executions = [SizedExecution(model, computed) for _ in range(count)]
    # All captures use one stream, so that a graph may reuse the memory of another.
    stream, pool = stream or torch.cuda.Stream(model.device), torch.cuda.graph_pool_handle()

    def captured(run: Callable[[], Sequence[Any]]) -> Callable[[], Sequence[Any]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            outputs = run()

        def replay() -> Sequence[Any]:
            graph.replay()
            return outputs

        return replay

    def opened(size: int) -> _Size:
        shapes = [((size, *spec.shape[1:]), torch_dtype(spec.datatype)) for spec in specs]
        inputs = [torch.zeros(shape, dtype=dtype, device=model.device) for shape, dtype in shapes]

        def run() -> Sequence[Any]:
            return call(inputs)

        with torch.cuda.stream(stream):
            for _ in range(_RUNS_BEFORE):
                outputs = run()
        stream.synchronize()
        if not all(isinstance(output, torch.Tensor) and output.shape[:1] == (size,) for output in outputs):
            raise ValueError("an output has not the batch's rows")
        staged = [torch.empty(shape, dtype=dtype, pin_memory=True) for shape, dtype in shapes]
        return _Size(
            captured(run) if captures else run,
            inputs,
            staged,
            [torch.empty(output.shape, dtype=output.dtype, pin_memory=True) for output in outputs],
            {spec.name: _octets(tensor) for spec, tensor in zip(specs, staged, strict=True)},
        )

    for done, size in enumerate(sizes):
        report(f"preparing batch size {size}")
        try:
            made = [opened(size) for _ in executions]
        except torch.OutOfMemoryError:
            if not done:
                raise
            torch.cuda.empty_cache()
            _LOG.warning("the GPU's memory suffices for batches of %d rows; larger ones run in pieces", sizes[done - 1])
            break
        for execution, own in zip(executions, made, strict=True):
            execution.by_size[size] = own
    return executions


def _octets(tensor: Any) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _copied(value: Array | Tensor, room: Array | None) -> Array | Tensor:
    """Copy an output out of memory that the next batch reuses, to `room` if it fits."""
    if isinstance(value, Tensor):
        return Tensor(value.name, value.datatype, value.shape, bytes(value.data))
    if room is None or room.shape != value.shape or room.dtype != value.dtype:
        return value.copy()
    np.copyto(room, value)
    return room
