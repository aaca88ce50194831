"""KServe v2 datatypes, with their sizes and numpy dtypes."""

from __future__ import annotations

import enum
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike


class DataType(enum.Enum):
    """The type of a tensor's elements; the enum's value is the name on the KServe wire."""

    BOOL = "BOOL", np.bool_
    UINT8 = "UINT8", np.uint8
    UINT16 = "UINT16", np.uint16
    UINT32 = "UINT32", np.uint32
    UINT64 = "UINT64", np.uint64
    INT8 = "INT8", np.int8
    INT16 = "INT16", np.int16
    INT32 = "INT32", np.int32
    INT64 = "INT64", np.int64
    FP16 = "FP16", np.float16
    BF16 = "BF16", np.uint16
    FP32 = "FP32", np.float32
    FP64 = "FP64", np.float64
    BYTES = "BYTES", np.object_

    _value_: str
    itemsize: int
    """Bytes of one element; 0 for BYTES, whose elements have different lengths."""
    numpy_dtype: np.dtype[np.generic]
    """The dtype of an array of this type: uint16 with the bits for BF16, which numpy lacks; objects for BYTES."""

    # Enum's __hash__ and __eq__ run Python code; comparing identities is enough and several times faster.
    __hash__ = object.__hash__

    def __new__(cls, name: str, numpy: DTypeLike | None = None) -> Self:
        """Create a member. Only mypy needs `numpy`'s default: it mistakes a look-up, `DataType("FP32")`, for this
        call."""
        made = object.__new__(cls)
        made._value_ = name
        made.numpy_dtype = np.dtype(numpy)
        made.itemsize = 0 if made.numpy_dtype.hasobject else made.numpy_dtype.itemsize
        return made


DATATYPES = {datatype.value: datatype for datatype in DataType}


def datatype_of(array: np.ndarray[Any, Any]) -> DataType:
    """Return an array's datatype; strings and objects are BYTES. Raises ValueError without one (complex numbers)."""
    if array.dtype.kind in "OSU":
        return DataType.BYTES
    for datatype in DataType:
        if datatype is not DataType.BF16 and array.dtype == datatype.numpy_dtype:
            return datatype
    raise ValueError(f"numpy dtype {array.dtype} has no KServe datatype")
