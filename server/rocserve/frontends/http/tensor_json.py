"""Tensors between JSON arrays and raw contents; what Triton takes, refuses and says."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal, invalid_argument
from rocserve.core.tensors import Tensor, bytes_elements, encode_bytes_elements
from rocserve.frontends.http.json_text import DEEPEST_NESTING, find, nested_too_deeply

_WHERE = "Unable to parse 'data'"
_WRONG_COUNT = f"{_WHERE}: Shape does not match true shape of 'data' field"
_NOT_A_BOOLEAN = f"{_WHERE}: attempt to access JSON non-boolean as boolean"
_NOT_SIGNED = f"{_WHERE}: attempt to access JSON non-signed-integer as signed-integer"
_NOT_UNSIGNED = f"{_WHERE}: attempt to access JSON non-unsigned-integer as unsigned-integer"
_NOT_A_NUMBER = f"{_WHERE}: attempt to access JSON non-number as double"

_UNSIGNED = frozenset({DataType.UINT8, DataType.UINT16, DataType.UINT32, DataType.UINT64})
_FLOATING = frozenset({DataType.FP32, DataType.FP64})
_BINARY_ONLY = frozenset({DataType.FP16, DataType.BF16})
SLICE = 4096
"""Elements whose JSON is written at a time: nothing else runs meanwhile."""

DATATYPES = {datatype.value: datatype for datatype in DataType}


def raw_contents(data: Any, datatype: str, element_count: int, input_name: str, is_base64: bool = False) -> bytes:
    """The elements of an array, however it is nested, as raw contents; integers that are too wide keep their low bytes.
    In place of an element of BYTES, and of all those of UINT8, may be `{"b64": "..."}`, as in TensorFlow Serving.

    Args:
        data: an array, or one element.
        element_count: how many there must be. Elements of BYTES are not counted here.
        is_base64: each element of BYTES is text in base64.

    Raises:
        ServeError: INTERNAL for elements of another type or number, INVALID_ARGUMENT for a datatype that has no JSON.
    """
    elements = _flat(data) if type(data) is list else [data]
    if datatype == "BYTES":
        return _bytes_contents([{"b64": entry} for entry in elements] if is_base64 else elements, input_name)
    known = DATATYPES.get(datatype)
    if known is None:
        raise invalid_argument(f"invalid datatype for input {input_name}")
    if known in _BINARY_ONLY:
        raise invalid_argument(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input"
            f" {input_name}"
        )
    # Only those that fit are converted; then their number is checked.
    if known is DataType.UINT8 and len(elements) == 1 and type(elements[0]) is dict:
        raw = _decoded(elements[0], input_name)
        count = len(raw)
    else:
        raw = _numbers(elements[:element_count], known)
        count = len(elements)
    if count != element_count:
        raise internal(_WRONG_COUNT)
    return raw


def element_slices(tensor: Tensor) -> Iterator[list[Any]]:
    """The elements of a tensor, one after the other, as JSON has them; few enough at a time that it takes little.

    Raises:
        ServeError: INVALID_ARGUMENT for a datatype that has no JSON, INTERNAL when the data does not fit the shape.
    """
    datatype = tensor.datatype
    if datatype in _BINARY_ONLY:
        raise invalid_argument(
            f"sending {datatype.value} data via JSON is not supported. Please use the binary data format for output"
        )
    count = math.prod(tensor.shape)
    if datatype is DataType.BYTES:
        try:
            elements = bytes_elements(tensor.data, count, tensor.name)
        except ServeError:
            raise _wrong_size(tensor.name) from None
        for start in range(0, count, SLICE):
            yield [str(element, "utf-8", "surrogateescape") for element in elements[start : start + SLICE]]
        return
    if len(tensor.data) != count * datatype.itemsize:
        raise _wrong_size(tensor.name)
    array = np.frombuffer(tensor.data, dtype=datatype.numpy_dtype)
    for start in range(0, count, SLICE):
        yield array[start : start + SLICE].tolist()


def _wrong_size(output_name: str) -> ServeError:
    return internal(f"output tensor shape does not match size of output for '{output_name}'")


def _flat(data: list[Any]) -> list[Any]:
    for _ in range(DEEPEST_NESTING):
        kinds = set(map(type, data))
        if list not in kinds:
            return data
        if len(kinds) > 1:
            data = [entry if type(entry) is list else [entry] for entry in data]
        data = list(chain.from_iterable(data))
    raise nested_too_deeply()


def _numbers(elements: list[Any], datatype: DataType) -> bytes:
    wide: Any
    kinds: set[type]
    if datatype is DataType.BOOL:
        wide, kinds, fault = np.bool_, {bool}, _NOT_A_BOOLEAN
    elif datatype in _FLOATING:
        wide, kinds, fault = np.float64, {int, float}, _NOT_A_NUMBER
    elif datatype in _UNSIGNED:
        wide, kinds, fault = np.uint64, {int}, _NOT_UNSIGNED
    else:
        wide, kinds, fault = np.int64, {int}, _NOT_SIGNED
    if not kinds.issuperset(map(type, elements)) or (datatype in _UNSIGNED and min(elements, default=0) < 0):
        raise internal(fault)
    try:
        array = np.array(elements, dtype=wide)
    except OverflowError:
        raise internal(fault) from None
    with np.errstate(over="ignore"):
        return array.astype(datatype.numpy_dtype, copy=False).tobytes()


def _bytes_contents(elements: list[Any], input_name: str) -> bytes:
    kinds = set(map(type, elements))
    if not kinds <= {str, dict}:
        raise internal("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
    if dict in kinds:
        elements = [_decoded(entry, input_name) if type(entry) is dict else entry for entry in elements]
    try:
        return encode_bytes_elements(
            [entry.encode("utf-8", "surrogateescape") if type(entry) is str else entry for entry in elements]
        )
    except UnicodeEncodeError:
        raise internal(
            "failed to parse the request JSON buffer: The surrogate pair in string is invalid. at 0"
        ) from None


def _decoded(value: Any, input_name: str) -> bytes:
    """The bytes of `{"b64": "..."}`."""
    text = find(value, "b64")
    if type(text) is not str or len(value) != 1:
        raise invalid_argument(f"input '{input_name}': bytes in base64 are given as a text, or as {{\"b64\": text}}")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise invalid_argument(f"input '{input_name}' has an element that is no base64: {error}") from None
