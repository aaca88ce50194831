"""The graph of a model file, whatever its format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocserve.core.datatypes import DataType

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
"""By the names of onnx.proto, in lower case: those of numbers that KServe has, too."""

Dims = tuple[int | str, ...]
"""Each a number, or the name of a dimension that is left open ("" where it has none)."""

IMAGE_RANK = 4
"""Dimensions of the tensors of a TensorFlow graph that have a layout: NHWC to clients, NCHW to MIGraphX."""

_MOST_DIMENSIONS = 64
"""Of an array of numpy's."""
_MOST_ELEMENTS = 1 << 48


def is_beyond_memory(dims: Sequence[int | str]) -> bool:
    """Whether no machine holds such a tensor, whatever its open dimensions are: a file may claim any number of sizes,
    whose product alone would take hours."""
    sizes = [size for size in dims if isinstance(size, int)]
    return len(dims) > _MOST_DIMENSIONS or math.prod(sizes) > _MOST_ELEMENTS


@dataclass(frozen=True, slots=True)
class GraphTensor:
    name: str
    datatype: DataType | None
    """None where the file has none (TensorFlow's outputs)."""
    dims: Dims | None
    """None where the file has not even their number."""


@dataclass(frozen=True, slots=True)
class ModelGraph:
    inputs: tuple[GraphTensor, ...]
    """What a run needs: without the inputs that have a default."""
    outputs: tuple[GraphTensor, ...]
    """In the program's order."""
    weight_bytes: int
    external_files: tuple[Path, ...] = ()
    """Of external data, in the order in which they are first named; each is there and long enough."""
    is_quantised: bool = False
    """Whether it holds quantising operators (QDQ or integer ones)."""
