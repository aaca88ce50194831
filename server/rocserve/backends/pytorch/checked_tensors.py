"""Describes a program's tensors to the load check, and runs the program on its arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rocserve.backends.dropped_sizes import with_dropped_sizes
from rocserve.backends.pytorch.binding import BoundProgram
from rocserve.backends.pytorch.program import Program, ProgramTensor
from rocserve.core.padding import NO_PADDING, Buckets, Padding
from rocserve.core.requests import TensorSpec
from rocserve.core.tensors import Tensor, tensor_from_numpy
from rocserve.load_check.tensors import ROWS, Array, CheckedInput, Feed, Run


def checked_inputs(
    bound: BoundProgram, tensors: Sequence[ProgramTensor], end: int | None = None, padding: Padding = NO_PADDING
) -> tuple[CheckedInput, ...]:
    """Describe the inputs, in the program's order. Open sizes are those of the export's example, where the file tells
    them, but for those of `padding`. `end`: exclusive end of integers without known limits, for programs in which one
    out of range would end the process; None = any may be tried."""
    labels = {
        (name, place): padding.dimensions[index].label
        for name, places in Buckets(padding).inputs.items()
        for place, index in places
    }
    return tuple(
        _checked_input(spec, sample, tensor, bound.signature.supports_batching, end, labels)
        for spec, sample, tensor in zip(bound.inputs, bound.samples, tensors, strict=True)
    )


def _checked_input(
    spec: TensorSpec,
    sample: Sequence[int],
    tensor: ProgramTensor,
    batches: bool,
    end: int | None,
    labels: Mapping[tuple[str, int], str],
) -> CheckedInput:
    # A sample's 1 may stand for a size that is not known.
    sizes = [
        labels.get((spec.name, place)) or (own if own != -1 else known if known > 1 else "")
        for place, (own, known) in enumerate(zip(spec.shape, sample, strict=True))
    ]
    if batches and (spec.name, 0) not in labels:
        sizes[0] = ROWS
    least, most = tensor.limits or (0, 0)
    checked = CheckedInput(spec.name, spec.datatype, tuple(sizes), least=max(least, 0))
    if tensor.limits:
        return replace(checked, end=most + 1)
    return replace(checked, end=end) if checked.kind in "iu" else checked


def fixed_rows(most_rows: int | None) -> int | None:
    """Return the only size of a batch that the check of the rows may run; None = any. Usually it takes three rows."""
    return most_rows if most_rows is not None and most_rows <= 2 else None


def run_of(bound: BoundProgram, call: Callable[[Sequence[Tensor]], Any]) -> Run:
    """Return the program as the load check runs it. `call` takes the inputs in the program's order."""
    specs = {spec.name: spec for spec in bound.signature.outputs}

    def run(feed: Feed) -> Feed:
        inputs = [tensor_from_numpy(spec.name, feed[spec.name], spec.datatype) for spec in bound.inputs]
        values = bound.outputs_in(call(inputs))
        return {name: _array(specs[name], values[index]) for name, index in bound.outputs.items()}

    return run


def _array(spec: TensorSpec, value: Any) -> Array:
    if not isinstance(value, torch.Tensor):
        if not value:
            raise ValueError(f"the result has no output '{spec.name}'")
        return np.array(value, np.object_)
    numbers = value.float() if value.dtype is torch.bfloat16 else value
    array = np.array(numbers.detach().cpu().resolve_conj().resolve_neg().numpy())
    dropped = with_dropped_sizes(spec.shape, array.shape)
    return array if dropped is None else array.reshape(dropped)


@contextmanager
def unchanged(program: Program) -> Iterator[None]:
    """Give the program its buffers and attributes back after made-up inputs have changed them: BatchNorm in training
    mode counts, and a recurrent network may keep its state."""
    before = [(buffer, buffer.clone()) for buffer in program.buffers if buffer.layout is torch.strided]
    give_back = program.keep_attributes() if program.keep_attributes is not None else None
    try:
        yield
    finally:
        with torch.inference_mode():
            for buffer, values in before:
                buffer.copy_(values)
            if give_back is not None:
                give_back()
