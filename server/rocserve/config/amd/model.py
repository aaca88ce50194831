"""A model as AMD Inference Server's configuration files describe it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument

_NAMES = {datatype.value: datatype for datatype in DataType}


@dataclass(frozen=True, slots=True)
class AmdTensor:
    name: str
    datatype: DataType
    shape: tuple[int, ...]
    """Of one item, without a batch dimension."""
    id: str = ""
    """The link of a chain: an input takes the output of the same id; empty means the client."""


@dataclass(frozen=True, slots=True)
class AmdModel:
    name: str
    platform: str
    inputs: tuple[AmdTensor, ...]
    outputs: tuple[AmdTensor, ...]
    id: str = ""
    """In a chain: the name of the stage's model file."""
    parameters: dict[str, str] = field(default_factory=dict)


def parse_datatype(name: str, where: str) -> DataType:
    """A datatype as those files write it: "FP32" or "Fp32".

    Raises:
        ServeError: INVALID_ARGUMENT for an unknown one.
    """
    datatype = _NAMES.get(name.upper())
    if datatype is None:
        raise invalid_argument(f"{where}: unknown datatype '{name}'; expected one of: {', '.join(_NAMES)}")
    return datatype
