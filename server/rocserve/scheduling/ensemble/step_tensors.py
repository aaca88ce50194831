"""Places the tensors between an ensemble's steps, and gives them the shapes that members expect."""

from __future__ import annotations

from collections.abc import Sequence

from rocserve.core.datatypes import DataType
from rocserve.core.model_config import ModelConfig
from rocserve.core.responses import InferResponse
from rocserve.core.tensor_places import ALIGNMENT, PlacedTensors, TensorPlaces
from rocserve.core.tensors import COPIED_SOONER, Buffer, Tensor
from rocserve.plane.heap import COPIED_AT_ONCE, Slot


def stays(answer: InferResponse) -> bool:
    """Return whether an answer may stay in its worker's memory, except for what can be copied in one step."""
    slot = answer.slot
    return isinstance(slot, Slot) and all(
        len(tensor.data) <= COPIED_AT_ONCE or may_be_kept(tensor, slot) for tensor in answer.outputs
    )


def may_be_kept(tensor: Tensor, slot: Slot) -> bool:
    """Return whether a tensor may stay in its worker's memory. BYTES tensors may not: their worker could change the
    lengths after the check."""
    is_worth_it = len(tensor.data) > COPIED_SOONER and tensor.datatype is not DataType.BYTES
    return is_worth_it and slot.heap is not None and slot.heap.keep(slot)


def placed(data: Buffer, places: TensorPlaces, slot: object) -> Sequence[Buffer]:
    """Return a step's only input in its slot's heap, so that its worker may read it in place."""
    assert isinstance(slot, Slot)
    heap = slot.heap
    assert heap is not None
    offset = heap.offset_of(data)
    if offset is None or offset % ALIGNMENT or places.sizes != [len(data)]:
        return [data]
    # The view is created now, because the heap may be released before the block is read.
    block = heap.view(offset, places.end)
    return PlacedTensors(lambda *_: block, places.end, places, heap, offset, slot)


def member_shape(shape: tuple[int, ...], member: ModelConfig, input_name: str) -> tuple[int, ...]:
    """Return a tensor's shape as a member expects it, with a batch dimension of 1 added or removed."""
    named = (entry for entry in member.inputs if entry.name == input_name and not entry.any_rank)
    rank = next((len(entry.dims) for entry in named), -1)
    if member.max_batch_size > 0 and len(shape) == rank:
        return (1, *shape)
    if rank >= 0 and member.max_batch_size == 0 and len(shape) == rank + 1 and shape[0] == 1:
        return shape[1:]
    return shape
