"""Describes the graph of a model file in any format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rocserve.backends.migraphx.compiling.known_faults import KnownFault
from rocserve.core.datatypes import DataType
from rocserve.core.model_config import NO_PURPOSE, Purpose

ONNX_DATATYPES: Mapping[str, DataType] = {
    "bool": DataType.BOOL,
    "uint8": DataType.UINT8,
    "uint16": DataType.UINT16,
    "uint32": DataType.UINT32,
    "uint64": DataType.UINT64,
    "int8": DataType.INT8,
    "int16": DataType.INT16,
    "int32": DataType.INT32,
    "int64": DataType.INT64,
    "float16": DataType.FP16,
    "bfloat16": DataType.BF16,
    "float": DataType.FP32,
    "double": DataType.FP64,
}
"""Name in onnx.proto, in lower case -> KServe datatype. Strings are missing."""

LARGEST_FILE = (1 << 31) - 1
"""In bytes: protobuf's limit, which the formats of ONNX and of TensorFlow share."""

Dims = tuple[int | str, ...]
"""Each dimension is a number, or the name of an open dimension ("" = without a name)."""


def is_beyond_memory(dims: Sequence[int | str]) -> bool:
    """Return whether no machine can hold such a tensor, whatever its open dimensions. The number of dimensions is
    checked first, because a file may list so many sizes that their product alone takes hours."""
    sizes = [size for size in dims if isinstance(size, int)]
    # An array of numpy has at most 64 dimensions.
    return len(dims) > 64 or math.prod(sizes) > 1 << 48


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """An input or output of a model's file, or of a plan for it."""

    name: str
    datatype: DataType | None
    """None = not in the file (TensorFlow's outputs)."""
    dims: Dims | None
    """None = the file does not even have the number of dimensions."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The dimensions with -1 for each open one."""
        return None if self.dims is None else tuple(dim if isinstance(dim, int) else -1 for dim in self.dims)


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """Inputs, outputs and weights of an ONNX file."""

    inputs: tuple[GraphTensor, ...]
    """The inputs that a run needs; inputs with a default are missing."""
    outputs: tuple[GraphTensor, ...]
    weight_bytes: int
    external_files: tuple[Path, ...] = ()
    """The files with external data, in the order of their first mention. Each file exists and is long enough."""
    defaults: frozenset[str] = frozenset()
    """The inputs with a default, which MIGraphX takes as constants."""
    is_quantised: bool = False
    """Whether the graph holds quantising operators (QDQ or integer operators)."""
    faults: Mapping[str, KnownFault] = field(default_factory=dict)
    """Operator -> its fault in MIGraphX that no comparison finds."""
    purpose: Purpose = NO_PURPOSE
