"""A tensor as the server handles it: name, datatype, shape and a view on its bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rocserve.core.datatypes import DataType, datatype_of
from rocserve.core.errors import invalid_argument
from rocserve.core.steps import Steps, result_of

Buffer = bytes | bytearray | memoryview

ELEMENT_LENGTH = struct.Struct("<I")
"""Precedes each element of BYTES in raw contents."""
COPIED_SOONER = 4096
"""Bytes up to which a copy takes less time than a view."""
COUNTED_AT_ONCE = 32768
"""BYTES elements whose lengths are read in a step: about 4 ms."""


class TensorHead(NamedTuple):
    """A tensor without its data. A tuple, because it is the key of many caches."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]


@dataclass(slots=True)
class Tensor:
    """A named tensor. `data` is C-ordered and little-endian. Each BYTES element follows its length, an unsigned 32-bit
    little-endian integer (KServe's binary form). A view is valid only as long as its owner allows; copy the tensor to
    keep it longer. Mutable, because one is created for each input of each request."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    data: Buffer

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return an array of `shape`: a view for fixed-size datatypes, an object array of bytes for BYTES."""
        if self.datatype is DataType.BYTES:
            # Counted before the array is created: a shape may claim more elements than there is memory for.
            elements = bytes_elements(self.data, self.element_count, self.name)
            array = np.empty(self.element_count, dtype=np.object_)
            for index, element in enumerate(elements):
                array[index] = bytes(element)
            return array.reshape(self.shape)
        return np.frombuffer(self.data, dtype=self.datatype.numpy_dtype).reshape(self.shape)

    def copied(self) -> Tensor:
        return Tensor(self.name, self.datatype, self.shape, bytes(self.data))


def heads_of(tensors: Iterable[Tensor]) -> tuple[TensorHead, ...]:
    return tuple([TensorHead(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in tensors])


def can_hold(datatype: DataType, shape: tuple[int, ...], nbytes: int) -> bool:
    """Return whether a tensor of this shape may have `nbytes` bytes. A BYTES element has at least 4, its length."""
    # The protocol has int64 for a dimension.
    if any(not 0 <= extent <= (1 << 63) - 1 for extent in shape):
        return False
    count = math.prod(shape)
    return count * ELEMENT_LENGTH.size <= nbytes if datatype is DataType.BYTES else count * datatype.itemsize == nbytes


def tensor_from_numpy(name: str, array: np.ndarray[Any, Any], datatype: DataType | None = None) -> Tensor:
    """Return a tensor on the array's memory. BYTES, other dtypes and arrays that are not C-contiguous are copied."""
    datatype = datatype or datatype_of(array)
    if datatype is DataType.BYTES:
        return Tensor(name, datatype, array.shape, encode_bytes_elements(array.ravel()))
    return Tensor(name, datatype, array.shape, octets(np.ascontiguousarray(array, dtype=datatype.numpy_dtype)))


def octets(array: np.ndarray[Any, Any]) -> Buffer:
    """Return the bytes of a C-contiguous array, on its memory."""
    # A view without elements cannot be cast.
    return array.data.cast("B") if array.size else b""


def flat_octets(data: Buffer) -> memoryview:
    """Return a buffer of any item type as bytes, on its memory."""
    view = memoryview(data)
    # An empty view cannot be cast.
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def bfloat16_values(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the values of BF16, which numpy lacks, as float32: the bits, uint16, are the upper half of these."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def scalar(datatype: DataType, value: float) -> np.generic:
    """Return a number as an element of an array of this datatype."""
    if datatype is DataType.BF16:
        return np.uint16(np.float32(value).view(np.uint32) >> 16)
    return datatype.numpy_dtype.type(value)


def filled_up(
    datatype: DataType,
    shape: tuple[int, ...],
    value: float,
    parts: Iterable[tuple[tuple[int, ...], Buffer]],
    memory: memoryview | None = None,
) -> Buffer:
    """Write tensors, each with its shape, one after the other along the first dimension into an array of `shape`, and
    `value` into the rest. `memory`: of the array; None = new memory."""
    dtype, row = datatype.numpy_dtype, 0
    array = np.empty(shape, dtype) if memory is None else np.ndarray(shape, dtype, memory)
    array.fill(scalar(datatype, value))
    for own, data in parts:
        array[(slice(row, row := row + own[0]), *map(slice, own[1:]))] = np.ndarray(own, dtype, data)
    return octets(array)


def encode_bytes_elements(elements: Iterable[bytes | str | memoryview]) -> bytes:
    """Encode elements in KServe's binary form; text becomes UTF-8."""
    parts: list[bytes | memoryview] = []
    for element in elements:
        raw = element.encode() if isinstance(element, str) else element
        if not isinstance(raw, bytes | memoryview):
            # Otherwise bytes(3) would become three zero bytes.
            raise TypeError(f"elements of BYTES must be bytes or str, got {type(raw).__name__}")
        parts.append(ELEMENT_LENGTH.pack(len(raw)))
        parts.append(raw)
    return b"".join(parts)


def count_elements(data: Buffer, expected: int) -> Steps[str]:
    """Count BYTES elements in steps, because there may be millions. The result is the error text, with {where} for the
    input, if there are not `expected` elements, else ""."""
    unpack = ELEMENT_LENGTH.unpack_from
    begin = position = 0
    end = len(data)
    last = end - ELEMENT_LENGTH.size
    for first in range(0, expected, COUNTED_AT_ONCE):
        for index in range(first, min(first + COUNTED_AT_ONCE, expected)):
            if position > last:
                return (
                    _early_end(begin, position, end)
                    or f"expected {expected} string elements for {{where}}, got {index}"
                )
            begin = position
            position += 4 + unpack(data, position)[0]
        yield
    return _early_end(begin, position, end) or (
        f"unexpected number of string elements {expected + 1} for {{where}}, expecting {expected}"
        if position < end
        else ""
    )


def _early_end(begin: int, position: int, end: int) -> str:
    """Return the error text for data that end within the element at `begin` or the length at `position`, else ""."""
    if position > end:
        return (
            "incomplete string data for {where}, expecting string of length"
            f" {position - begin - ELEMENT_LENGTH.size} but only {end - begin - ELEMENT_LENGTH.size} bytes available"
        )
    if end - ELEMENT_LENGTH.size < position < end:
        return (
            f"incomplete string length indicator for {{where}}, expecting {ELEMENT_LENGTH.size} bytes but only"
            f" {end - position} bytes available. Please make sure the string length indicator is in one buffer."
        )
    return ""


def element_fault(data: Buffer, expected: int) -> str:
    """Count BYTES elements in one call, as `count_elements` does in steps."""
    length = ELEMENT_LENGTH.size
    if expected == 1 and len(data) >= length and ELEMENT_LENGTH.unpack_from(data)[0] == len(data) - length:
        return ""  # One element, such as an image or a text: most requests with BYTES.
    return result_of(count_elements(data, expected))


def bytes_elements(data: Buffer, expected: int, name: str) -> list[memoryview]:
    """Return views on BYTES elements. Raises ServeError (INVALID_ARGUMENT) if there are not exactly `expected`."""
    if fault := element_fault(data, expected):
        raise invalid_argument(fault.format(where=f"inference input '{name}'"))
    view = memoryview(data)
    elements: list[memoryview] = []
    position = 0
    for _ in range(expected):
        start = position + 4
        position = start + ELEMENT_LENGTH.unpack_from(view, position)[0]
        elements.append(view[start:position])
    return elements


def classify(tensor: Tensor, class_count: int, labels: Sequence[str], batching: bool) -> Tensor:
    """Return the highest elements of each row (without batching, of the whole tensor), highest first, as BYTES of shape
    [rows, n] or [n]. An element reads `value:index`, or `value:index:label` if the model has a label for the index. Of
    equal values the lower index comes first. Raises ServeError (INVALID_ARGUMENT) for BYTES, BF16 or a large output."""
    if tensor.datatype in (DataType.BYTES, DataType.BF16):
        raise invalid_argument(
            f"class result not available for output due to unsupported type '{tensor.datatype.value}'"
        )
    rows, *dims = tensor.shape if batching and tensor.shape else (1, *tensor.shape)
    values = tensor.numpy().reshape(rows, math.prod(dims))
    count = min(class_count, values.shape[1])
    # Sorting more values would keep all other requests waiting for more than 100 ms, formatting more classes of one
    # answer for more than 60 ms.
    if values.size > 1_048_576 or rows * count > 65_536:
        raise invalid_argument(
            f"class result not available for output with {values.size} values and {rows * count} classes, at most"
            " 1048576 and 65536 can be"
        )
    order = np.argsort(-values.astype(np.float64), axis=1, kind="stable")[:, :count]
    texts = [_class_text(values[row, index], int(index), labels) for row in range(rows) for index in order[row]]
    shape = (rows, count) if batching else (count,)
    return Tensor(tensor.name, DataType.BYTES, shape, encode_bytes_elements(texts))


def _class_text(value: np.generic, index: int, labels: Sequence[str]) -> str:
    number = f"{float(value):f}" if isinstance(value, np.floating) else str(int(value))
    label = labels[index] if index < len(labels) else ""
    return f"{number}:{index}:{label}" if label else f"{number}:{index}"
