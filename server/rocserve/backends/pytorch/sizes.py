"""Batches on a GPU at fixed sizes: pinned memory on the way there and back, and a captured graph for each size.

A graph replays all of a program's kernels by one call, on memory that stays where it is: a batch is put into the input
of the next size, and what its results' other rows hold is nobody's. Several batches may be under way, each on a stream
and memory of its own: while one is computed the next is copied in, and the results of the one before are copied out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rocserve.backends.batch_sizes import pieces
from rocserve.backends.device_tensors import DeviceTensors
from rocserve.backends.pytorch.datatypes import torch_dtype
from rocserve.backends.pytorch.program import Program, outputs_of
from rocserve.core.requests import TensorSpec

_LOG = logging.getLogger(__name__)

_RUNS_BEFORE = 3
"""Of a size before it is captured: libraries choose their kernels then."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Size:
    """A batch size, and the memory that it works on."""

    run: Callable[[], Sequence[Any]]
    """From what lies in `inputs` to the outputs, on the GPU."""
    inputs: Sequence[Any]
    staged_inputs: Sequence[Any]
    """Pinned, on the host."""
    staged_outputs: Sequence[Any]
    memory: Mapping[str, memoryview]
    """Of the staged inputs."""


class SizedLane:
    """A batch of a program under way; on one thread."""

    def __init__(self, device: torch.device, computed: Any, tensors: DeviceTensors) -> None:
        """`computed`: the event that follows each computation of the program, which shares memory with the next."""
        self.by_size: dict[int, _Size] = {}
        self._tensors = tensors
        self.stream = torch.cuda.Stream(device)
        """That of its copies and computations, and of inputs that are made on the GPU."""
        self._computed = computed
        self._ended = torch.cuda.Event()
        self._results: list[Any] = []

    def input_memory(self, rows: int) -> Mapping[str, memoryview]:
        """See Execution; in it a batch need not be copied."""
        size = next((size for size in self.by_size if size >= rows), None)
        return {} if size is None else self.by_size[size].memory

    def start(self, inputs: Sequence[Any], staying: Collection[int] = ()) -> None:
        """Run a batch of inputs, in the program's order. `staying`: the places of outputs that are left on the GPU."""
        *others, last = pieces(len(inputs[0]), tuple(self.by_size))
        parts = []
        for piece in others:
            self._start([tensor[piece.start : piece.start + piece.rows] for tensor in inputs], piece.batch_size)
            parts.append([output.clone() for output in self.result()])
        rest = [tensor[last.start : last.start + last.rows] for tensor in inputs]
        self._start(rest, last.batch_size, () if parts else staying)
        if parts:
            self._results = [torch.cat(column) for column in zip(*parts, self.result(), strict=True)]

    @property
    def is_done(self) -> bool:
        """See Execution."""
        return bool(self._ended.query())

    def result(self) -> list[Any]:
        """Outputs on the host, in the program's order, valid until the next start; a SharedTensor where one stays."""
        self._ended.synchronize()
        return self._results

    def _start(self, inputs: Sequence[Any], size: int, staying: Collection[int] = ()) -> None:
        own = self.by_size[size]
        rows = len(inputs[0])
        with torch.cuda.stream(self.stream):
            for given, staged, placed in zip(inputs, own.staged_inputs, own.inputs, strict=True):
                if not given.is_cuda and given.data_ptr() != staged.data_ptr():
                    staged[:rows].copy_(given)
                placed[:rows].copy_(given if given.is_cuda else staged[:rows], non_blocking=True)
            self.stream.wait_event(self._computed)
            outputs = own.run()
            self._computed.record(self.stream)
            self._results = [
                self._tensors.share(output[:rows])
                if place in staying
                else staged[:rows].copy_(output[:rows], non_blocking=True)
                for place, (output, staged) in enumerate(zip(outputs, own.staged_outputs, strict=True))
            ]
            self._ended.record(self.stream)


class SizedProgram:
    """A program whose batches run at fixed sizes."""

    def __init__(
        self,
        program: Program,
        specs: Sequence[TensorSpec],
        device: torch.device,
        captures: bool,
        lanes: int,
        tensors: DeviceTensors,
    ) -> None:
        """`specs`: of the inputs in the program's order; all their dimensions but the batch's are numbers. `captures`:
        whether graphs are captured. `lanes`: how many batches may be under way."""
        self._program = program
        self._specs = specs
        self._device = device
        self._captures = captures
        # All are captured on one stream: memory that one of them has used is another's then.
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        computed = torch.cuda.Event()
        self.lanes = [SizedLane(device, computed, tensors) for _ in range(lanes)]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(self.lanes[0].by_size)

    def open(self, sizes: Sequence[int], report: Report) -> None:
        """Have these sizes, ascending, as far as memory suffices.

        Raises:
            Exception: the program cannot be captured, or memory does not suffice for the first size.
        """
        for size in sizes:
            report(f"preparing batch size {size}")
            try:
                opened = [self._opened(size) for _ in self.lanes]
            except torch.OutOfMemoryError:
                if not self.sizes:
                    raise
                torch.cuda.empty_cache()
                _LOG.warning(
                    "the GPU's memory suffices for batches of %d rows; larger ones run in pieces", self.sizes[-1]
                )
                return
            for lane, own in zip(self.lanes, opened, strict=True):
                lane.by_size[size] = own

    def _opened(self, size: int) -> _Size:
        shapes = [((size, *spec.shape[1:]), torch_dtype(spec.datatype)) for spec in self._specs]
        inputs = [torch.zeros(shape, dtype=dtype, device=self._device) for shape, dtype in shapes]

        def run() -> list[Any]:
            return outputs_of(self._program.call(inputs))

        with torch.cuda.stream(self._stream):
            for _ in range(_RUNS_BEFORE):
                outputs = run()
        self._stream.synchronize()
        if not all(isinstance(output, torch.Tensor) and output.shape[:1] == (size,) for output in outputs):
            raise ValueError("an output has not the batch's rows")
        staged = [torch.empty(shape, dtype=dtype, pin_memory=True) for shape, dtype in shapes]
        return _Size(
            self._captured(run) if self._captures else run,
            inputs,
            staged,
            [torch.empty(output.shape, dtype=output.dtype, pin_memory=True) for output in outputs],
            {spec.name: _octets(tensor) for spec, tensor in zip(self._specs, staged, strict=True)},
        )

    def _captured(self, run: Callable[[], Sequence[Any]]) -> Callable[[], Sequence[Any]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = run()

        def replay() -> Sequence[Any]:
            graph.replay()
            return outputs

        return replay


def _octets(tensor: Any) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
