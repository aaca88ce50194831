"""KServe v2 datatypes, their sizes and their numpy counterparts."""

from __future__ import annotations

import enum
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike


class DataType(enum.Enum):
    """A tensor's element type; the value is the name on the KServe wire."""

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
    """Bytes of one element; 0 for BYTES, whose elements vary."""
    numpy_dtype: np.dtype[np.generic]
    """The array type of the element. BF16, which numpy lacks, is carried as its uint16 bits; BYTES as objects."""

    # Enum's own __hash__ and __eq__ run Python code; identity is enough and several times faster.
    __hash__ = object.__hash__

    def __new__(cls, name: str, numpy: DTypeLike | None = None) -> Self:
        """Not called where one is looked up by its name, which needs no `numpy`."""
        made = object.__new__(cls)
        made._value_ = name
        made.numpy_dtype = np.dtype(numpy)
        made.itemsize = 0 if made.numpy_dtype.hasobject else made.numpy_dtype.itemsize
        return made


def datatype_of(array: np.ndarray[Any, Any]) -> DataType:
    """The KServe datatype of a numpy array; strings and objects are BYTES. Raises: ValueError: the array's dtype has no
    KServe counterpart (complex, datetime, records)."""
    if array.dtype.kind in "OSU":
        return DataType.BYTES
    for datatype in DataType:
        if datatype is not DataType.BF16 and array.dtype == datatype.numpy_dtype:
            return datatype
    raise ValueError(f"numpy dtype {array.dtype} has no KServe datatype")
