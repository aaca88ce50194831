"""References to tensors that stay on a GPU on their way from one worker to another.

A tensor of BYTES is sent in the place of such a tensor, with an element for each row, or one for all where its model
does not batch. Only workers make references: of outputs only where the server has asked for them, and of what a model
calls another with, which the server hands on only to a model on the same GPU.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace

from rocserve.core.datatypes import DataType
from rocserve.core.errors import internal
from rocserve.core.model_config import ModelConfig
from rocserve.core.serving import ServedVersion
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
    Raises: ServeError: INTERNAL, they are damaged."""
    references = references_of(tensor)
    if not references:
        raise internal(f"tensor '{tensor.name}' on a GPU has no references")
    first = references[0]
    shape = (len(references), *first.shape) if batching else first.shape
    return Tensor(tensor.name, first.datatype, shape, References(tensor.data))


def in_rows(tensor: Tensor) -> Tensor:
    """The one of BYTES with a reference for each row, of one that refers to all rows together. Raises: ServeError:
    INTERNAL, they are damaged."""
    rows: list[DeviceReference] = []
    for whole in references_of(tensor):
        count, *shape = whole.shape or (0,)
        row = replace(whole, shape=tuple(shape))
        rows += [replace(row, offset=whole.offset + index * row.nbytes) for index in range(count)]
    return referring(tensor.name, rows)


def whole(tensor: Tensor) -> Tensor:
    """The tensor that references to rows, or to all of it, make together along its first dimension, with References for
    data. Raises: ServeError: as `in_rows`."""
    references = references_of(tensor)
    if not references:
        raise internal(f"tensor '{tensor.name}' on a GPU has no references")
    first = references[0]
    shape = first.shape
    if len(references) > 1:
        shape = (sum(each.shape[0] for each in references), *shape[1:])
    return Tensor(tensor.name, first.datatype, shape, References(tensor.data))


def of_one_row_each(tensor: Tensor) -> Tensor:
    """References to rows as `whole` takes them."""
    rows = references_of(tensor)
    return referring(tensor.name, [replace(row, shape=(1, *row.shape)) for row in rows])


def device_of(version: ServedVersion) -> str:
    """The one GPU on which a model takes references; "": it does not."""
    device = version.properties.get(DEVICE_PROPERTY, "")
    is_one = device and len({gpu for group in version.config.instance_groups for gpu in group.gpus or (-1,)}) == 1
    return device if is_one else ""


def may_be_references(config: ModelConfig) -> frozenset[str]:
    """The outputs of a model that it may leave on its GPU: the server has nothing to do with their shapes, and no text
    can be there."""
    return frozenset(
        output.name for output in config.outputs if output.reshape is None and output.datatype is not DataType.BYTES
    )
