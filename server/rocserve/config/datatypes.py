"""Datatypes by their names in config.pbtxt, where BYTES is TYPE_STRING."""

from __future__ import annotations

from typing import cast

from rocserve.core.datatypes import DataType
from rocserve.protocol import model_config_pb2


def type_name(datatype: DataType) -> str:
    return "TYPE_STRING" if datatype is DataType.BYTES else f"TYPE_{datatype.value}"


def type_number(datatype: DataType) -> model_config_pb2.DataType:
    return cast("model_config_pb2.DataType", model_config_pb2.DataType.Value(type_name(datatype)))


_BY_NUMBER = {int(type_number(datatype)): datatype for datatype in DataType}


def datatype_of_number(number: int) -> DataType:
    """Return the datatype of a number in config.pbtxt's enumeration. Raises KeyError for TYPE_INVALID."""
    return _BY_NUMBER[number]
