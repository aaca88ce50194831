"""Converts arrays to tensors on the wire, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.parameters import ParameterValue
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


def encode_array(name: str, value: Array | Input | list[Any]) -> Tensor:
    """Return an input's tensor, which shares the array's memory if the array is C-ordered and little-endian. Raises
    InvalidArgument if the value is not an array, or if its dtype fits no KServe datatype or not the requested one."""
    wanted = value.datatype if isinstance(value, Input) else ""
    array = value.array if isinstance(value, Input) else value
    if not isinstance(array, np.ndarray):
        raise InvalidArgument(
            f"input '{name}' is a {type(array).__name__}, expected a numpy array; infer(..., cast=True) takes lists,"
            " and for strings use numpy.array([...], dtype=object)"
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


def cast_input(name: str, value: Array | Input | list[Any], datatype: str) -> Array | Input:
    """Return an input with its values in the model's datatype: numbers are rounded to its precision. Raises
    InvalidArgument if a number would become another one (an integer of a fraction, too large), or the values are not
    of one shape. Strings, and inputs that name their datatype, are returned unchanged."""
    if isinstance(value, Input):
        if value.datatype:
            return value
        return replace(value, array=_cast_array(name, value.array, datatype))
    return _cast_array(name, value, datatype)


def _cast_array(name: str, value: Array | list[Any], datatype: str) -> Array:
    wanted = DataType(datatype)
    try:
        array = np.asarray(value, dtype=object if wanted is DataType.BYTES and isinstance(value, list) else None)
    except ValueError as error:
        raise InvalidArgument(f"input '{name}': {error}") from error
    target = _BF16 if wanted is DataType.BF16 else wanted.numpy_dtype
    if wanted is DataType.BYTES or array.dtype == target:
        return array
    if target is None:
        raise InvalidArgument(f"input '{name}' cannot be cast to BF16 without the package ml_dtypes; install it")
    kinds = "biuf" if target.kind not in "biu" else "biu" if target.kind != "b" else "b"
    if array.dtype.kind not in kinds:
        raise InvalidArgument(f"input '{name}' of {array.dtype} cannot be cast to the model's {datatype}")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(target)
    is_kept = cast == array if target.kind in "iu" else np.isfinite(cast.astype(np.float64)) | ~np.isfinite(array)
    if not np.all(is_kept):
        raise InvalidArgument(f"input '{name}' has numbers that {datatype}, the model's datatype, cannot hold")
    return cast


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
