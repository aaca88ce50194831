"""KServe v2 datatypes, their sizes and their numpy counterparts."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
from numpy.typing import DTypeLike


class DataType(enum.Enum):
    """A tensor's element type; the value is the name on the KServe wire."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    BF16 = "BF16"
    FP32 = "FP32"
    FP64 = "FP64"
    BYTES = "BYTES"

    itemsize: int
    """Bytes of one element; 0 for BYTES, whose elements vary."""
    numpy_dtype: np.dtype[np.generic]
    """The array type of the element. BF16, which numpy lacks, is carried as its uint16 bits; BYTES as objects."""

    # Enum's own __hash__ and __eq__ run Python code; identity is enough and several times faster.
    __hash__ = object.__hash__


_NUMPY: dict[DataType, DTypeLike] = {
    DataType.BOOL: np.bool_,
    DataType.UINT8: np.uint8,
    DataType.UINT16: np.uint16,
    DataType.UINT32: np.uint32,
    DataType.UINT64: np.uint64,
    DataType.INT8: np.int8,
    DataType.INT16: np.int16,
    DataType.INT32: np.int32,
    DataType.INT64: np.int64,
    DataType.FP16: np.float16,
    DataType.BF16: np.uint16,
    DataType.FP32: np.float32,
    DataType.FP64: np.float64,
    DataType.BYTES: np.object_,
}

for _datatype, _numpy in _NUMPY.items():
    _datatype.numpy_dtype = np.dtype(_numpy)
    _datatype.itemsize = 0 if _datatype is DataType.BYTES else _datatype.numpy_dtype.itemsize


def datatype_of(array: np.ndarray[Any, Any]) -> DataType:
    """The KServe datatype of a numpy array; strings and objects are BYTES. Raises: ValueError: the array's dtype has no
    KServe counterpart (complex, datetime, records)."""
    if array.dtype.kind in "OSU":
        return DataType.BYTES
    for datatype, numpy in _NUMPY.items():
        if datatype is not DataType.BF16 and array.dtype == numpy:
            return datatype
    raise ValueError(f"numpy dtype {array.dtype} has no KServe datatype")
