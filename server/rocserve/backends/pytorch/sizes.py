"""Batches on a GPU at fixed sizes: pinned memory on the way there and back, and a captured graph for each size.

A graph replays all of a program's kernels by one call, on memory that stays where it is: a batch is put into the input
of the next size, and what its results' other rows hold is nobody's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rocserve.backends.batch_sizes import pieces
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


class SizedProgram:
    """A program whose batches run at fixed sizes; on one thread at a time."""

    def __init__(self, program: Program, specs: Sequence[TensorSpec], device: torch.device, captures: bool) -> None:
        """`specs`: of the inputs in the program's order; all their dimensions but the batch's are numbers. `captures`:
        whether graphs are captured."""
        self._program = program
        self._specs = specs
        self._device = device
        self._captures = captures
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._by_size: dict[int, _Size] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(self._by_size)

    def open(self, sizes: Sequence[int], report: Report) -> None:
        """Have these sizes, ascending, as far as memory suffices.

        Raises:
            Exception: the program cannot be captured, or memory does not suffice for the first size.
        """
        for size in sizes:
            report(f"preparing batch size {size}")
            try:
                self._by_size[size] = self._opened(size)
            except torch.OutOfMemoryError:
                if not self._by_size:
                    raise
                torch.cuda.empty_cache()
                _LOG.warning(
                    "the GPU's memory suffices for batches of %d rows; larger ones run in pieces", self.sizes[-1]
                )
                return

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Outputs in the program's order, from inputs on the host; valid until the next call."""
        parts = pieces(len(inputs[0]), self.sizes)
        if len(parts) == 1:
            return self._run(inputs, parts[0].batch_size)
        results = []
        for part in parts:
            rows = [tensor[part.start : part.start + part.rows] for tensor in inputs]
            results.append([output.clone() for output in self._run(rows, part.batch_size)])
        return [torch.cat(column) for column in zip(*results, strict=True)]

    def _run(self, inputs: Sequence[Any], size: int) -> list[Any]:
        own = self._by_size[size]
        rows = len(inputs[0])
        with torch.cuda.stream(self._stream):
            for given, staged, placed in zip(inputs, own.staged_inputs, own.inputs, strict=True):
                staged[:rows].copy_(given)
                placed[:rows].copy_(staged[:rows], non_blocking=True)
            for output, staged in zip(own.run(), own.staged_outputs, strict=True):
                staged[:rows].copy_(output[:rows], non_blocking=True)
        self._stream.synchronize()
        return [staged[:rows] for staged in own.staged_outputs]

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
        return _Size(
            self._captured(run) if self._captures else run,
            inputs,
            [torch.empty(shape, dtype=dtype, pin_memory=True) for shape, dtype in shapes],
            [torch.empty(output.shape, dtype=output.dtype, pin_memory=True) for output in outputs],
        )

    def _captured(self, run: Callable[[], Sequence[Any]]) -> Callable[[], Sequence[Any]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = run()

        def replay() -> Sequence[Any]:
            graph.replay()
            return outputs

        return replay
