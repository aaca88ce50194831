"""References to tensors that stay on a GPU on their way from one worker to another.

A tensor of BYTES is sent in the place of such a tensor, with an element for each row, or one for all where its model
does not batch. Only workers make references, and only where the server has asked for them.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from rocserve.core.datatypes import DataType
from rocserve.core.errors import internal
from rocserve.core.tensors import Tensor, encode_bytes_elements

DEVICE_PROPERTY = "device_tensors"
"""In a model's metadata: the GPU on which it takes and gives references, named alike in every process."""

_FIXED = struct.Struct("<QQQBBxx")
"""The three numbers, the datatype's place among all, and how many dimensions follow, before the handle."""
_DATATYPES = tuple(DataType)


class References(bytes):
    """In the place of a tensor's bytes: elements of BYTES, each a reference."""


@dataclass(frozen=True, slots=True)
class DeviceReference:
    """The place of a row of a tensor, or of all of it."""

    handle: bytes
    """By which the driver opens an allocation for another process."""
    block_offset: int
    """In the allocation: the begin of the block that its owner shares."""
    block_bytes: int
    offset: int
    """In the block."""
    datatype: DataType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.datatype.itemsize

    def packed(self) -> bytes:
        numbers = (self.block_offset, self.block_bytes, self.offset)
        fixed = _FIXED.pack(*numbers, _DATATYPES.index(self.datatype), len(self.shape))
        return fixed + struct.pack(f"<{len(self.shape)}Q", *self.shape) + self.handle


def references_of(tensor: Tensor) -> list[DeviceReference]:
    """Of a tensor whose data are References. Raises: ServeError: INTERNAL, they are damaged."""
    found: list[DeviceReference] = []
    try:
        rest = memoryview(tensor.data)
        while rest:
            end = 4 + int.from_bytes(rest[:4], "little")
            block_offset, block_bytes, offset, place, count = _FIXED.unpack_from(rest, 4)
            shape = struct.unpack_from(f"<{count}Q", rest, 4 + _FIXED.size)
            handle = bytes(rest[4 + _FIXED.size + 8 * count : end])
            found.append(DeviceReference(handle, block_offset, block_bytes, offset, _DATATYPES[place], shape))
            rest = rest[end:]
    except (struct.error, IndexError) as error:
        raise internal(f"tensor '{tensor.name}' on a GPU has damaged references: {error}") from None
    return found


def referring(name: str, references: list[DeviceReference]) -> Tensor:
    """The tensor of BYTES that is sent."""
    data = encode_bytes_elements([each.packed() for each in references])
    return Tensor(name, DataType.BYTES, (len(references),), data)


def referred(tensor: Tensor, batching: bool) -> Tensor:
    """The tensor in whose place one of BYTES was sent, with References for data. `batching`: each of them is a row.

    Raises:
        ServeError: INTERNAL, they are damaged.
    """
    references = references_of(tensor)
    if not references:
        raise internal(f"tensor '{tensor.name}' on a GPU has no references")
    first = references[0]
    shape = (len(references), *first.shape) if batching else first.shape
    return Tensor(tensor.name, first.datatype, shape, References(tensor.data))
