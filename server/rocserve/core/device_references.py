"""References to tensors that stay on a GPU on their way from one worker to another.

In the place of such a tensor travels one of BYTES, with an element for each row, or one for all where its model does
not batch. Only workers make references, and only where the server has asked for them: nobody else can.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from rocserve.core.datatypes import DataType
from rocserve.core.errors import internal
from rocserve.core.tensors import Tensor, encode_bytes_elements

DEVICE_PROPERTY = "device_tensors"
"""What a model's metadata call the GPU on which it takes and gives references, by the same name in every process."""

_FIXED = struct.Struct("<QQQBBxx")
"""The three numbers, the datatype's place among all, and how many dimensions follow, before the handle."""
_DATATYPES = tuple(DataType)


class References(bytes):
    """In the place of a tensor's bytes: elements of BYTES, each a reference."""


@dataclass(frozen=True, slots=True)
class DeviceReference:
    """Where a row of a tensor, or all of it, lies."""

    handle: bytes
    """By which the driver opens an allocation for another process."""
    block_offset: int
    """Where in the allocation the block begins that its owner shares."""
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
    """What a tensor's References say. Raises: ServeError: INTERNAL, they are damaged."""
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
        raise internal(f"tensor '{tensor.name}' on a GPU is told of by what makes no reference: {error}") from None
    return found


def referring(name: str, references: list[DeviceReference]) -> Tensor:
    """The tensor of BYTES that travels."""
    data = encode_bytes_elements([each.packed() for each in references])
    return Tensor(name, DataType.BYTES, (len(references),), data)


def referred(tensor: Tensor, batching: bool) -> Tensor:
    """What a tensor of BYTES stands for, with References for data. `batching`: each of them is a row.

    Raises:
        ServeError: INTERNAL, they are damaged.
    """
    references = references_of(tensor)
    if not references:
        raise internal(f"tensor '{tensor.name}' on a GPU is told of by no reference")
    first = references[0]
    shape = (len(references), *first.shape) if batching else first.shape
    return Tensor(tensor.name, first.datatype, shape, References(tensor.data))
