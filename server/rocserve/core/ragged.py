"""Batches requests of different shapes: joins their inputs, computes batch inputs, splits outputs. The arithmetic is
the same as in Triton's backend library. Shapes are as the model sees them, with the batch dimension."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate

from rocserve.core.datatypes import DataType
from rocserve.core.model_config import BatchInput, BatchInputKind, ModelConfig
from rocserve.core.tensors import Tensor

Shape = tuple[int, ...]


class RaggedBatching:
    """A model's settings for requests of different shapes in one batch; false if the model has none."""

    def __init__(self, config: ModelConfig) -> None:
        lead = (-1,) if config.max_batch_size > 0 else ()
        dims = {output.name: (*lead, *output.model_dims) for output in config.outputs}
        self.inputs = frozenset(tensor.name for tensor in config.inputs if tensor.allow_ragged_batch)
        """Inputs whose elements are concatenated over the batch, to shape [total]."""
        self._made = config.batch_inputs
        self._scattered = {
            # An output's dims may not be completed yet.
            name: (source, dims.get(name, ()))
            for name, source in config.scattered_outputs.items()
        }
        """Output -> (the input that gives the output's shape in each request, the output's dims, in which -1 means the
        input's dimension at the same index)."""

    def __bool__(self) -> bool:
        return bool(self.inputs or self._made or self._scattered)

    def parts(self, shapes: Mapping[str, Sequence[Shape]]) -> tuple[list[Tensor], dict[str, Sequence[Shape]]]:
        """Return a batch's computed inputs, and scattered outputs' shapes. `shapes`: input -> its shape per request."""
        made = [tensor for entry in self._made for tensor in made_tensors(entry, shapes[entry.source_inputs[0]])]
        cuts: dict[str, Sequence[Shape]] = {
            name: [
                tuple(shape[place] if size == -1 else size for place, size in enumerate(dims))
                for shape in shapes[source]
            ]
            for name, (source, dims) in self._scattered.items()
        }
        return made, cuts


def made_tensors(entry: BatchInput, shapes: Sequence[Shape]) -> list[Tensor]:
    """Compute a batch input, INT32 or FP32. `shapes`: the source input's shape in each request."""
    numbers = _numbers(entry.kind, shapes)
    data = struct.pack(f"<{len(numbers)}{'f' if entry.datatype is DataType.FP32 else 'i'}", *numbers)
    is_table = entry.kind is BatchInputKind.ITEM_SHAPE
    shape = (sum(shape[0] for shape in shapes), len(shapes[0]) - 1) if is_table else (len(numbers),)
    return [Tensor(name, entry.datatype, shape, data) for name in entry.target_names]


def _numbers(kind: BatchInputKind, shapes: Sequence[Shape]) -> Sequence[int]:
    counts = [math.prod(shape) for shape in shapes]
    match kind:
        case BatchInputKind.ELEMENT_COUNT:
            return counts
        case BatchInputKind.ACCUMULATED_ELEMENT_COUNT:
            return list(accumulate(counts))
        case BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO:
            return [0, *accumulate(counts)]
        case BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE:
            # Only the tensor's length matters.
            return [0] * max(counts)
        case _:
            return [size for shape in shapes for _ in range(shape[0]) for size in shape[1:]]
