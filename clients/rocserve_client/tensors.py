"""Arrays and the bytes that stand for them on the wire."""

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
    """An input that says more than its array does."""

    array: Array
    datatype: str = ""
    """The KServe datatype; empty: from the array's dtype. "BF16" with a uint16 array sends the bits as they are."""
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Output:
    """An output that is asked for."""

    name: str
    classification: int = 0
    """0: the tensor itself; k: its k highest classes, to be read with `InferResult.classes`."""


class Classification(NamedTuple):
    """One class of the classification extension."""

    score: float
    class_index: int
    label: str
    """Empty when the model has no label for the class."""


def encode_array(name: str, value: Array | Input) -> Tensor:
    """The tensor for an input; shares the array's memory where that is C-ordered and little-endian.

    Raises:
        InvalidArgument: the value is no array, or its dtype has no KServe datatype or is not the one asked for.
    """
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
    """The array of an output: a read-only view on `content`, or an object array of bytes for BYTES.

    BF16 comes as ml_dtypes.bfloat16 where ml_dtypes is installed, else as its uint16 bits.

    Raises:
        Internal: the content does not fit the datatype and shape that the server gave.
    """
    try:
        array = Tensor(name, DataType(datatype), shape, content).numpy()
    except (ServeError, ValueError) as error:
        raise Internal(f"output '{name}' cannot be read as {datatype} of shape {list(shape)}: {error}") from error
    return array.view(_BF16) if datatype == "BF16" and _BF16 is not None else array


def parse_classes(array: Array) -> tuple[tuple[Classification, ...], ...]:
    """The rows of an output asked for with `classification`, whose elements read `score:index[:label]`. Raises:
    ValueError: they do not."""
    if array.dtype != object:
        raise ValueError("classes are texts")
    # As many rows as the shape says: of an output without values that does not follow from what a row has.
    rows = array.reshape(math.prod(array.shape[:-1]), array.shape[-1]) if array.ndim else array.reshape(1, 1)
    return tuple(tuple(_parse_class(element) for element in row) for row in rows)


def _parse_class(element: bytes) -> Classification:
    score, index, *label = element.decode(errors="replace").split(":", 2)
    return Classification(float(score), int(index), label[0] if label else "")
