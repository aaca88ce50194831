"""BYTES tensors in their binary form: each element behind its length, 32 bits little-endian."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from rocserve.core.tensors import encode_bytes_elements

_LENGTH = struct.Struct("<I")


def serialize_byte_tensor(input_tensor: np.ndarray[Any, Any]) -> bytes | tuple[()] | None:
    """The elements of an array of objects or of bytes, in C order; what is not bytes is written as its str().

    As in Triton () for an array without elements, and None for an array of another type.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return encode_array(input_tensor)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> np.ndarray[Any, Any]:
    """A one-dimensional array of bytes objects.

    Raises:
        struct.error: the data ends within an element.
    """
    elements: list[bytes] = []
    position = 0
    while position < len(encoded_tensor):
        (length,) = _LENGTH.unpack_from(encoded_tensor, position)
        position += _LENGTH.size
        elements.extend(struct.unpack_from(f"<{length}s", encoded_tensor, position))
        position += length
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


def encode_array(array: np.ndarray[Any, Any]) -> bytes:
    elements = array.ravel().tolist()
    return encode_bytes_elements(element if isinstance(element, bytes) else str(element) for element in elements)
