"""Datatypes and shapes in the words of config.pbtxt (BYTES is TYPE_STRING there)."""

from __future__ import annotations

from typing import cast

from rocserve.core.datatypes import DataType
from rocserve.protocol import model_config_pb2


def type_name(datatype: DataType) -> str:
    """The datatype as config.pbtxt spells it, e.g. TYPE_FP32."""
    return "TYPE_STRING" if datatype is DataType.BYTES else f"TYPE_{datatype.value}"


def type_number(datatype: DataType) -> model_config_pb2.DataType:
    return cast("model_config_pb2.DataType", model_config_pb2.DataType.Value(type_name(datatype)))


_BY_NUMBER = {int(type_number(datatype)): datatype for datatype in DataType}


def datatype_of_number(number: int) -> DataType:
    """The datatype of a number of config.pbtxt's enumeration; KeyError for TYPE_INVALID."""
    return _BY_NUMBER[number]
