"""Places the tensors between an ensemble's steps, and gives them the shapes that members expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rocserve.core.datatypes import DataType
from rocserve.core.model_config import ModelConfig
from rocserve.core.responses import InferResponse
from rocserve.core.tensor_places import ALIGNMENT, PlacedTensors, ScatteredTensors, TensorPlaces
from rocserve.core.tensors import COPIED_SOONER, Buffer, Tensor
from rocserve.plane.heap import COPIED_AT_ONCE, HeapReader, Slot
from rocserve.workers.batch_inputs import READ_IN_PLACE

_NAMED_FROM = 256 << 10
"""Bytes from which it takes less time to name one input among several than to copy it."""


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


def placed(data: Sequence[Buffer], places: TensorPlaces, slots: Mapping[int, object]) -> Sequence[Buffer]:
    """Return a step's inputs, and name those in their slots' heaps that its worker may read there. `slots`: an input's
    index -> its slot."""
    if len(data) == 1:
        return _placed(data[0], places, slots[0])
    elsewhere: dict[int, tuple[HeapReader, int]] = {}
    for index, slot in slots.items():
        if len(data[index]) >= _NAMED_FROM and places.heads[index].datatype in READ_IN_PLACE:
            heap, offset = _place_of(data[index], slot)
            if offset is not None:
                elsewhere[index] = (heap, offset)
    return ScatteredTensors(data, elsewhere, slots) if elsewhere else data


def _placed(data: Buffer, places: TensorPlaces, slot: object) -> Sequence[Buffer]:
    """Return a step's only input in its slot's heap."""
    heap, offset = _place_of(data, slot)
    if offset is None or places.sizes != [len(data)]:
        return [data]
    # The view is created now, because the heap may be released before the block is read.
    block = heap.view(offset, places.end)
    return PlacedTensors(lambda *_: block, places.end, places, heap, offset, slot)


def _place_of(data: Buffer, slot: object) -> tuple[HeapReader, int | None]:
    """Return the heap of a slot, and the offset of a tensor there; None if no worker can read it there."""
    assert isinstance(slot, Slot)
    heap = slot.heap
    assert heap is not None
    offset = heap.offset_of(data)
    return heap, None if offset is None or offset % ALIGNMENT else offset


def member_shape(shape: tuple[int, ...], member: ModelConfig, input_name: str) -> tuple[int, ...]:
    """Return a tensor's shape as a member expects it, with a batch dimension of 1 added or removed."""
    named = (entry for entry in member.inputs if entry.name == input_name and not entry.any_rank)
    rank = next((len(entry.dims) for entry in named), -1)
    if member.max_batch_size > 0 and len(shape) == rank:
        return (1, *shape)
    if rank >= 0 and member.max_batch_size == 0 and len(shape) == rank + 1 and shape[0] == 1:
        return shape[1:]
    return shape
