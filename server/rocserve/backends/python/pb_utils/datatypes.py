"""Triton's names and numbers of datatypes, and the numpy types that go with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rocserve.core.datatypes import DataType

_NUMBERS: dict[DataType, int] = {
    DataType.BOOL: 1,
    DataType.UINT8: 2,
    DataType.UINT16: 3,
    DataType.UINT32: 4,
    DataType.UINT64: 5,
    DataType.INT8: 6,
    DataType.INT16: 7,
    DataType.INT32: 8,
    DataType.INT64: 9,
    DataType.FP16: 10,
    DataType.FP32: 11,
    DataType.FP64: 12,
    DataType.BYTES: 13,
    DataType.BF16: 14,
}
"""TRITONSERVER_DataType, which are also the numbers of config.pbtxt's DataType."""

BY_NUMPY_DTYPE = {datatype.numpy_dtype: datatype for datatype in DataType if datatype is not DataType.BF16}
_BY_NUMBER = {number: datatype for datatype, number in _NUMBERS.items()}

TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    "TYPE_STRING" if datatype is DataType.BYTES else f"TYPE_{datatype.value}": datatype.numpy_dtype.type
    for datatype in DataType
    if datatype is not DataType.BF16
}
TRITON_STRING_TO_NUMPY["TYPE_BOOL"] = bool


def triton_number(datatype: DataType) -> int:
    return _NUMBERS[datatype]


def datatype_of_config(name: str) -> DataType | None:
    """The datatype that a configuration's "TYPE_FP32" names; None for no such name."""
    if name == "TYPE_STRING":
        return DataType.BYTES
    try:
        datatype = DataType(name.removeprefix("TYPE_"))
    except ValueError:
        return None
    return None if datatype is DataType.BYTES or not name.startswith("TYPE_") else datatype


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The numpy type of a configuration's data_type, e.g. "TYPE_FP32".

    Raises:
        KeyError: there is none, as for TYPE_BF16.
    """
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """The numpy type of a TRITONSERVER_DataType number; None when there is none."""
    datatype = _BY_NUMBER.get(data_type)
    return None if datatype is None or datatype is DataType.BF16 else datatype.numpy_dtype.type


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The TRITONSERVER_DataType number of a numpy type; None when there is none."""
    datatype = datatype_of_numpy(np.dtype(data_type))
    return None if datatype is None else _NUMBERS[datatype]


def datatype_of_numpy(dtype: np.dtype[Any]) -> DataType | None:
    """Arrays of bytes or of objects are BYTES; arrays of str (numpy's kind "U") have no datatype, as in Triton."""
    return DataType.BYTES if dtype.kind in "OS" else BY_NUMPY_DTYPE.get(dtype)
