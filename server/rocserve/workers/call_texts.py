"""What stands beside the tensors of a model's call of another model, and of the answer, in a slot of either heap.

The slot: numbers (u64 each), the length of a text and then, for each tensor, its size; the text, a CallLayout or a
ResultLayout in JSON; the tensors, each at a multiple of 64. An error is its text alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from rocserve.backends.request_model import Answer, ModelCall, ModelResponse
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.plain import from_json, to_json
from rocserve.core.tensor_places import aligned, lay_out
from rocserve.core.tensors import Tensor, TensorHead, can_hold, flat_octets, heads_of
from rocserve.plane.heap import Heap, HeapReader, Slot
from rocserve.workers.entries import LONGEST_TEXT_BYTES, numbers
from rocserve.workers.messages import CallLayout, ResultLayout
from rocserve.workers.wire import LONGEST_TEXT

_Place = TypeVar("_Place")

_MOST_NUMBERS = 1 << 16


def call_layout(call: ModelCall) -> CallLayout:
    return CallLayout(
        model_name=call.model_name,
        model_version=call.model_version,
        inputs=heads_of(call.inputs),
        requested_outputs=tuple(call.requested_outputs),
        id=call.id,
        correlation_id=call.correlation_id,
        flags=call.flags,
        priority=call.priority,
        timeout_microseconds=call.timeout_microseconds,
        parameters=call.parameters,
        trace_number=call.trace_number,
    )


def read_call(heap: HeapReader, place: int, count: int) -> ModelCall:
    """A call whose tensors are views on the heap. Raises: ValueError."""
    text, contents = _read(heap, place, count)
    layout = from_json(CallLayout, text)
    return ModelCall(
        model_name=layout.model_name,
        inputs=_tensors(layout.inputs, contents),
        requested_outputs=layout.requested_outputs,
        model_version=layout.model_version,
        id=layout.id,
        correlation_id=layout.correlation_id,
        flags=layout.flags,
        priority=layout.priority,
        timeout_microseconds=layout.timeout_microseconds,
        parameters=layout.parameters,
        trace_number=layout.trace_number,
    )


def write_response(heap: Heap, answer: Answer) -> tuple[Slot, int, int]:
    """The slot of an answer, its status code (0 = a response), and how many numbers or bytes of text it has.

    Raises:
        ValueError: it cannot be said. HeapFull: there is no room for it.
    """
    if isinstance(answer, ServeError):
        told = answer.text[:LONGEST_TEXT].encode(errors="replace")
        slot, view = heap.place(len(told))
        view[:] = told
        return slot, int(answer.code), len(told)
    text = to_json(ResultLayout(heads_of(answer.outputs), parameters=answer.parameters))
    slot, count = write(heap.place, text, answer.outputs)
    return slot, 0, count


def read_response(heap: HeapReader, place: int, count: int) -> ModelResponse:
    """A response on memory of its own."""
    text, contents = _read(heap, place, count)
    layout = from_json(ResultLayout, text)
    owned = [bytearray(content) for content in contents]
    return ModelResponse(_tensors(layout.outputs, owned), layout.parameters)


def write(
    allocate: Callable[[int], tuple[_Place, memoryview]], text: bytes, tensors: Sequence[Tensor]
) -> tuple[_Place, int]:
    """The place of a text and its tensors, and how many numbers stand before them.

    Raises:
        ValueError: the text is too long, or a tensor's bytes are not those of its shape. HeapFull.
    """
    if len(text) > LONGEST_TEXT_BYTES:
        raise ValueError(
            f"what stands beside the tensors (names, shapes, parameters) takes {len(text)} bytes, at most"
            f" {LONGEST_TEXT_BYTES} can be sent"
        )
    contents = [flat_octets(tensor.data) for tensor in tensors]
    for tensor, content in zip(tensors, contents, strict=True):
        check_size(tensor.name, tensor, len(content))
    head = numbers(len(contents) + 1)
    offsets, end = lay_out(map(len, contents), head.size + len(text))
    place, view = allocate(end)
    head.pack_into(view, 0, len(text), *map(len, contents))
    view[head.size : head.size + len(text)] = text
    for offset, content in zip(offsets, contents, strict=True):
        view[offset : offset + len(content)] = content
    return place, len(contents) + 1


def _read(heap: HeapReader, place: int, count: int) -> tuple[bytes, list[memoryview]]:
    """Raises: ValueError."""
    if not 1 <= count <= _MOST_NUMBERS:
        raise ValueError(f"{count} numbers before a text")
    head = numbers(count)
    length, *sizes = head.unpack(heap.checked(place, head.size))
    if length > LONGEST_TEXT_BYTES:
        raise ValueError(f"a text of {length} bytes, expected at most {LONGEST_TEXT_BYTES}")
    end = head.size + length
    text = bytes(heap.checked(place, end)[head.size :])
    contents: list[memoryview] = []
    for size in sizes:
        start = aligned(end)
        end = start + size
        contents.append(heap.checked(place, end)[start:])
    return text, contents


def _tensors(heads: Sequence[TensorHead], contents: Sequence[memoryview | bytearray]) -> list[Tensor]:
    if len(heads) != len(contents):
        raise ValueError(f"{len(contents)} tensors, told of {len(heads)}")
    for head, content in zip(heads, contents, strict=True):
        check_size(head.name, head, len(content))
    return [Tensor(*head, content) for head, content in zip(heads, contents, strict=True)]


def check_size(name: str, of: Tensor | TensorHead, size: int) -> None:
    """Raises: ValueError: so many bytes are not those of its shape."""
    if not can_hold(of.datatype, tuple(of.shape), size):
        is_bytes = of.datatype is DataType.BYTES
        needed = "4 for each element" if is_bytes else f"{math.prod(of.shape) * of.datatype.itemsize} bytes"
        raise ValueError(f"tensor '{name}' of shape {list(of.shape)} needs {needed}, got {size}")
