"""Converts arrays to tensors on the wire, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.requests import ParameterValue
from rocserve.core.tensors import Tensor, tensor_from_numpy
from rocserve_client.errors import Internal, InvalidArgument

try:
    from ml_dtypes import bfloat16

    _BF16: np.dtype[Any] | None = np.dtype(bfloat16)
except ImportError:
    _BF16 = None

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """An input with more than its array: a datatype or parameters."""

    array: Array
    datatype: str = ""
    """The KServe datatype; "" = derived from the array's dtype. "BF16" with a uint16 array sends the bits unchanged."""
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Output:
    """A requested output."""

    name: str
    classification: int = 0
    """0 = the tensor itself; k = its k highest classes, to be read with `InferResult.classes`."""


class Classification(NamedTuple):
    """One class of the classification extension."""

    score: float
    class_index: int
    label: str
    """"" if the model has no label for the class."""


def encode_array(name: str, value: Array | Input) -> Tensor:
    """Return an input's tensor, which shares the array's memory if the array is C-ordered and little-endian. Raises
    InvalidArgument if the value is not an array, or if its dtype fits no KServe datatype or not the requested one."""
    wanted = value.datatype if isinstance(value, Input) else ""
    array = value.array if isinstance(value, Input) else value
    if not isinstance(array, np.ndarray):
        raise InvalidArgument(
            f"input '{name}' is a {type(array).__name__}, expected a numpy array; for strings use"
            " numpy.array([...], dtype=object)"
        )
    if array.dtype.kind == "O" and not all(isinstance(element, bytes | str) for element in array.flat):
        raise InvalidArgument(f"input '{name}' is an object array, whose elements are expected to be bytes or str")
    if array.dtype.name == "bfloat16":
        array, wanted = array.view(np.uint16), wanted or "BF16"
    if array.dtype.byteorder == ">" and array.dtype.kind not in "SU":
        array = array.astype(array.dtype.newbyteorder("<"))
    try:
        datatype = DataType(wanted) if wanted else None
        if datatype is not None and datatype is not DataType.BYTES and datatype.numpy_dtype != array.dtype:
            raise ValueError(f"{datatype.value} is made from {datatype.numpy_dtype}, got {array.dtype}")
        return tensor_from_numpy(name, array, datatype)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"input '{name}': {error}") from error


def decode_array(name: str, datatype: str, shape: tuple[int, ...], content: memoryview) -> Array:
    """Return the array of an output: a read-only view on `content`, or an object array of bytes for BYTES.

    BF16 becomes ml_dtypes.bfloat16 if ml_dtypes is installed, else its bits as uint16. Raises Internal if the content
    does not fit the datatype and shape.
    """
    try:
        array = Tensor(name, DataType(datatype), shape, content).numpy()
    except (ServeError, ValueError) as error:
        raise Internal(f"output '{name}' cannot be read as {datatype} of shape {list(shape)}: {error}") from error
    return array.view(_BF16) if datatype == "BF16" and _BF16 is not None else array


def parse_classes(array: Array) -> tuple[tuple[Classification, ...], ...]:
    """Return the rows of a classification output. Raises ValueError if elements are not `score:index[:label]`."""
    if array.dtype != object:
        raise ValueError("classes are texts")
    # The number of rows comes from the shape, because the size of a row does not give it if the output is empty.
    rows = array.reshape(math.prod(array.shape[:-1]), array.shape[-1]) if array.ndim else array.reshape(1, 1)
    return tuple(tuple(_parse_class(element) for element in row) for row in rows)


def _parse_class(element: bytes) -> Classification:
    score, index, *label = element.decode(errors="replace").split(":", 2)
    return Classification(float(score), int(index), label[0] if label else "")
