"""References to tensors that stay on a GPU when one worker's output is another worker's input. Instead of such a
tensor, a BYTES tensor travels whose elements are references: one for each row, or a single one if the model does not
batch.

Only workers make references. A worker makes references to its outputs only if the server asked for them. A model may
also call another model with references; the server forwards such a call only to a model on the same GPU. All functions
that read references raise ServeError (INTERNAL) if the references are damaged.
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
"""Property of a version: the GPU on which the model takes and makes references; all processes use this name."""

UNCOUNTED = b"/gone"
"""The name of PyTorch's counter of the users of a GPU's memory, which does not exist: the server counts them, and other
programs than PyTorch do not."""

_FIXED = struct.Struct("<QQQBBxx")
"""Block offset, block bytes, offset, index in DataType, number of dimensions. The dimensions and the handle follow."""
_DATATYPES = tuple(DataType)


class References(bytes):
    """A tensor's data as BYTES elements, each a reference."""


@dataclass(frozen=True, slots=True)
class DeviceReference:
    """The location of one row of a tensor, or of the whole tensor, in GPU memory."""

    handle: bytes
    """The GPU driver opens another process's allocation with this handle."""
    block_offset: int
    """Offset, in the allocation, of the block that the owner shares."""
    block_bytes: int
    offset: int
    """Offset in the block."""
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


def pack_references(name: str, references: list[DeviceReference]) -> Tensor:
    data = encode_bytes_elements([reference.packed() for reference in references])
    return Tensor(name, DataType.BYTES, (len(references),), data)


def split_into_rows(tensor: Tensor) -> Tensor:
    """Turn references to several rows into one reference per row."""
    rows: list[DeviceReference] = []
    for reference in references_of(tensor):
        count, *shape = reference.shape or (0,)
        row = replace(reference, shape=tuple(shape))
        rows += [replace(row, offset=reference.offset + index * row.nbytes) for index in range(count)]
    return pack_references(tensor.name, rows)


def join_references(tensor: Tensor, are_rows: bool = False) -> Tensor:
    """Return the tensor whose references `tensor` has, joined along the first dimension, with References as its data.
    `are_rows`: each reference is a row, without that dimension."""
    references = references_of(tensor)
    if not references:
        raise internal(f"tensor '{tensor.name}' on a GPU has no references")
    first = references[0]
    shape = first.shape
    if are_rows:
        shape = (len(references), *shape)
    elif len(references) > 1:
        shape = (sum(reference.shape[0] for reference in references), *shape[1:])
    return Tensor(tensor.name, first.datatype, shape, References(tensor.data))


def as_single_row_batches(tensor: Tensor) -> Tensor:
    """Turn references to rows into references to batches of one row, as `join_references` takes them."""
    rows = references_of(tensor)
    return pack_references(tensor.name, [replace(row, shape=(1, *row.shape)) for row in rows])


def device_of(version: ServedVersion) -> str:
    """Return the GPU on which a model takes references; "" if it takes none or uses several devices."""
    device = version.properties.get(DEVICE_PROPERTY, "")
    is_one = device and len({gpu for group in version.config.instance_groups for gpu in group.gpus or (-1,)}) == 1
    return device if is_one else ""


def referable_outputs(config: ModelConfig) -> frozenset[str]:
    """Return the outputs that a model may leave on its GPU: not BYTES, and not reshaped by the server."""
    return frozenset(
        output.name for output in config.outputs if output.reshape is None and output.datatype is not DataType.BYTES
    )
