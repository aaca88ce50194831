"""Runs batches on a GPU at fixed sizes, with pinned memory for inputs and outputs, and a captured graph per size.

A graph replays all kernels of a program in one call, on memory at fixed addresses: a batch is copied into the input of
the smallest size that fits, and the surplus rows of the results are dropped. Several batches may be in flight, each
with a separate stream and memory: while one batch is computed, the next is copied in, and the results of the previous
one are copied out.

A model serves with its first size. The others are prepared one by one between its batches; until all are, a batch of
another size runs operator by operator.
"""

from __future__ import annotations

import itertools
import logging
import math
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
from rocserve.core.padding import NO_PADDING, Buckets, Lengths, Padding
from rocserve.core.requests import TensorSpec
from rocserve.core.steps import Steps
from rocserve.core.tensors import Tensor

Array = np.ndarray[Any, Any]


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


Call = Callable[[Sequence[Any]], Sequence[Any]]
"""Computes the outputs from inputs on the GPU, on the current stream."""


@dataclass(frozen=True, slots=True)
class _Size:
    """Runs batches of one size."""

    run: Callable[[], Sequence[Any]]
    """Computes the outputs on the GPU from the values in `inputs`."""
    inputs: Sequence[Any]


class _Memory:
    """Memory for one tensor of an execution, which all sizes share, as a batch is copied out before the next begins."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: None = pinned memory of the host."""
        self._where = {"pin_memory": True} if device is None else {"device": device}
        self._octets = torch.empty(0, dtype=torch.uint8, **self._where)

    def reserve(self, shape: tuple[int, ...], dtype: Any) -> None:
        """Make it large enough for such a tensor. Existing tensors keep their own memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self._octets.numel() < nbytes:
            self._octets = torch.empty(nbytes, dtype=torch.uint8, **self._where)

    def tensor(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._octets[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def view(self, nbytes: int) -> memoryview:
        return memoryview(self._octets.numpy())[:nbytes]


class SizedExecution:
    """An Execution at fixed sizes, concurrent with the model's other executions. For one thread."""

    def __init__(
        self, model: SizedModel, call: Call, specs: Sequence[TensorSpec], padding: Padding, computed: Any
    ) -> None:
        """`call`, `specs`: see `sized_executions`. `computed`: ends each computation of the model; the next one reuses
        the memory, and waits for it."""
        self.sizes: dict[Lengths, dict[int, _Size]] = {}
        """Sizes of the padded dimensions -> batch size, ascending -> what runs it."""
        self.is_complete = False
        """No further size will be prepared."""
        self.staged_inputs = [_Memory() for _ in specs]
        self.staged_outputs: list[_Memory] = []
        self.outputs: list[_Memory] = []
        self._model = model
        self._call = call
        self._names = [spec.name for spec in specs]
        self._buckets = Buckets(padding)
        self._computed = computed
        self._stream = torch.cuda.Stream(model.device)
        """For copies and computations, and for inputs that are made on the GPU."""
        self._ended = torch.cuda.Event()
        self._batch: Batch
        self._failures: Mapping[int, ServeError]
        self._outputs: list[Any] = []

    @property
    def batch_sizes(self) -> Sequence[int]:
        return sorted({rows for by_rows in self.sizes.values() for rows in by_rows})

    def input_memory(self, rows: int, sizes: Lengths) -> Mapping[str, memoryview]:
        """Return pinned memory, by input name, which saves a copy; empty = no size takes the batch in one piece."""
        size = next((size for own, size in self.sizes.get(sizes, {}).items() if own >= rows), None)
        if size is None:
            return {}
        return {
            name: staging.view(tensor.numel() * tensor.element_size())
            for name, staging, tensor in zip(self._names, self.staged_inputs, size.inputs, strict=True)
        }

    def start(self, batch: Batch) -> None:
        self._batch = batch
        model = self._model
        with model.errors(), model.mode(), torch.cuda.stream(self._stream):
            given, self._failures = model.inputs_of(batch)
            inputs = [model.value(tensor, copies=False) for tensor in given]
            by_rows = self.sizes.get(self._buckets.lengths((tensor.name, tensor.shape) for tensor in given), {})
            if not by_rows or (len(inputs[0]) > max(by_rows) and not self.is_complete):
                self._run_unprepared(inputs, model.outputs_on_gpu(batch))
                return
            *others, (rest, smallest) = pieces(len(inputs[0]), tuple(by_rows))
            parts = []
            for rows, size in others:
                self._run([tensor[rows] for tensor in inputs], by_rows[size])
                self._ended.synchronize()
                parts.append([output.clone() for output in self._outputs])
            outputs_on_gpu: Collection[int] = () if parts else model.outputs_on_gpu(batch)
            self._run([tensor[rest] for tensor in inputs], by_rows[smallest], outputs_on_gpu)
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

    def _run_unprepared(self, inputs: Sequence[Any], outputs_on_gpu: Collection[int]) -> None:
        model = self._model
        outputs = self._call([value.to(model.device) for value in inputs])
        self._outputs = [
            model.tensors.share(output) if model.tensors is not None and index in outputs_on_gpu else output.cpu()
            for index, output in enumerate(outputs)
        ]
        self._ended.record(self._stream)

    def _run(self, inputs: Sequence[Any], size: _Size, outputs_on_gpu: Collection[int] = ()) -> None:
        """Run one size on the current stream. `outputs_on_gpu`: the positions of outputs that stay on the GPU."""
        rows = len(inputs[0])
        for value, staging, input_on_gpu in zip(inputs, self.staged_inputs, size.inputs, strict=True):
            if not value.is_cuda:
                staged = staging.tensor(value.shape, value.dtype)
                if value.data_ptr() != staged.data_ptr():
                    staged.copy_(value)
                value = staged
            input_on_gpu[:rows].copy_(value, non_blocking=True)
        self._stream.wait_event(self._computed)
        outputs = size.run()
        self._computed.record(self._stream)
        tensors = self._model.tensors
        assert tensors is not None, "a GPU's"
        self._outputs = []
        for index, (output, staging) in enumerate(zip(outputs, self.staged_outputs, strict=True)):
            own = output[:rows]
            self._outputs.append(
                tensors.share(own)
                if index in outputs_on_gpu
                else staging.tensor(own.shape, own.dtype).copy_(own, non_blocking=True)
            )
        self._ended.record(self._stream)


def sized_executions(
    model: SizedModel,
    call: Call,
    specs: Sequence[TensorSpec],
    batch_sizes: Sequence[int],
    count: int,
    captures: bool,
    report: Callable[[str], None],
    stream: Any = None,
    padding: Padding = NO_PADDING,
) -> tuple[Sequence[SizedExecution], Steps[None]]:
    """Make `count` executions of the ascending batch sizes, each at all sizes of the padded dimensions. Returns them
    with their first size, and the steps that prepare the others, as many as fit into memory. `specs`: the inputs in the
    program's order, with fixed dimensions apart from the batch and those of `padding`. `captures`: whether graphs are
    captured. `stream`: the stream for the captures; None = a new one. Any exception is possible, also in the steps, if
    the program cannot be captured, or memory does not suffice for the first size. The steps may run on another thread,
    while none of the executions runs a batch."""
    computed = torch.cuda.Event()
    executions = [SizedExecution(model, call, specs, padding, computed) for _ in range(count)]
    # All captures use one stream, so that a graph may reuse the memory of another.
    stream, pool = stream or torch.cuda.Stream(model.device), torch.cuda.graph_pool_handle()
    buckets = Buckets(padding)

    def captured(run: Callable[[], Sequence[Any]], outputs: Sequence[Any]) -> Callable[[], Sequence[Any]]:
        """Return a replay, with its results in `outputs`: the graph's own memory is that of other graphs, too, which
        may run while results are copied to the host."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            for output, result in zip(outputs, run(), strict=True):
                output.copy_(result)

        def replay() -> Sequence[Any]:
            graph.replay()
            return outputs

        return replay

    def add(execution: SizedExecution, rows: int, lengths: Lengths) -> None:
        inputs = []
        for spec, staging in zip(specs, execution.staged_inputs, strict=True):
            shape = buckets.padded_shape(spec.name, (rows, *spec.shape[1:]), lengths)
            inputs.append(torch.zeros(shape, dtype=torch_dtype(spec.datatype), device=model.device))
            staging.reserve(shape, inputs[-1].dtype)

        def run() -> Sequence[Any]:
            return call(inputs)

        with torch.cuda.stream(stream):
            # In the runs before a capture, libraries choose their kernels.
            for _ in range(3):
                outputs = run()
        stream.synchronize()
        if not all(isinstance(output, torch.Tensor) and output.shape[:1] == (rows,) for output in outputs):
            raise ValueError("an output does not have the batch's rows")
        if not execution.outputs:
            execution.outputs = [_Memory(model.device) for _ in outputs]
            execution.staged_outputs = [_Memory() for _ in outputs]
        for output, *memory in zip(outputs, execution.outputs, execution.staged_outputs, strict=True):
            for own in memory:
                own.reserve(tuple(output.shape), output.dtype)
        own_outputs = [
            memory.tensor(tuple(output.shape), output.dtype)
            for output, memory in zip(outputs, execution.outputs, strict=True)
        ]
        size = _Size(captured(run, own_outputs) if captures else run, inputs)
        execution.sizes.setdefault(lengths, {})[rows] = size

    def prepare() -> Steps[None]:
        for lengths in itertools.product(*(dimension.sizes for dimension in padding.dimensions)):
            of = "".join(f", {own.label} {size}" for own, size in zip(padding.dimensions, lengths, strict=True))
            for rows in batch_sizes:
                report(f"preparing batch size {rows}{of}")
                try:
                    # Threads begin with the first GPU.
                    with torch.cuda.device(model.device):
                        for execution in executions:
                            add(execution, rows, lengths)
                except torch.OutOfMemoryError:
                    if not executions[-1].sizes:
                        raise
                    torch.cuda.empty_cache()
                    logging.getLogger(__name__).warning(
                        "the GPU's memory does not suffice for batches of %d rows%s; they run in pieces", rows, of
                    )
                    break
                yield
        for execution in executions:
            execution.is_complete = True

    steps = prepare()
    next(steps)
    return executions, steps


def _copied(value: Array | Tensor, room: Array | None) -> Array | Tensor:
    """Copy an output out of memory that the next batch reuses, to `room` if it fits."""
    if isinstance(value, Tensor):
        return Tensor(value.name, value.datatype, value.shape, bytes(value.data))
    if room is None or room.shape != value.shape or room.dtype != value.dtype:
        return value.copy()
    np.copyto(room, value)
    return room
