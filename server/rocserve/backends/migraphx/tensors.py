"""Describes a program's tensors as clients see them: by KServe datatypes, and in the layout of the model's file.

MIGraphX makes every tensor of four dimensions of a TensorFlow graph NCHW, image or not. Clients see them as NHWC.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rocserve.backends.migraphx.binding import Array, DimensionRange, ProgramTensor
from rocserve.backends.migraphx.compiling.graph import ONNX_DATATYPES
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.requests import TensorSpec

IMAGE_RANK = 4
"""Number of dimensions of an image with its batch: NHWC for clients, NCHW for MIGraphX."""

_DATATYPES = {
    name.replace("bfloat16", "bf16").replace("float16", "half"): datatype for name, datatype in ONNX_DATATYPES.items()
}


def migraphx_name(datatype: DataType) -> str:
    """Return MIGraphX's name for a datatype that programs' tensors can have."""
    return next(name for name, known in _DATATYPES.items() if known is datatype)


def nchw(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the program's shape for a shape in a TensorFlow graph."""
    return (shape[0], shape[3], *shape[1:3]) if len(shape) == IMAGE_RANK else shape


def nhwc(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in a TensorFlow graph for a program's shape."""
    return (shape[0], *shape[2:], shape[1]) if len(shape) == IMAGE_RANK else shape


def program_view(array: Array) -> Array:
    """Return a view of a client's array in the layout of a TensorFlow graph's program."""
    return np.moveaxis(array, -1, 1) if array.ndim == IMAGE_RANK else array


def client_view(array: Array) -> Array:
    """Return a view of an array of a TensorFlow graph's program in the client's layout."""
    return np.moveaxis(array, 1, -1) if array.ndim == IMAGE_RANK else array


def client_tensor(name: str, what: str, tensor: ProgramTensor, is_nhwc: bool, by_values: bool = False) -> TensorSpec:
    """Return a program's tensor as clients see it: a range of sizes becomes its lower bound, or -1 if the inputs'
    values decide (`by_values`). `nhwc`: whether the program is a TensorFlow graph's. Raises ServeError
    (INVALID_ARGUMENT) if the protocol has no such datatype; `what` is "input" or "output"."""
    datatype = _DATATYPES.get(tensor.datatype)
    if datatype is None:
        raise invalid_argument(
            f"{what} '{name}' has MIGraphX's type {tensor.datatype}, which the KServe protocol does not have; supported"
            f" types are {', '.join(_DATATYPES)}"
        )
    shape = tuple(dim if isinstance(dim, int) else -1 if by_values else dim.least for dim in tensor.shape)
    return TensorSpec(name, datatype, nhwc(shape) if is_nhwc else shape)


def varies(tensor: ProgramTensor) -> bool:
    return any(isinstance(dim, DimensionRange) for dim in tensor.shape)


def varies_with_values(inputs: Iterable[ProgramTensor], output: ProgramTensor) -> bool:
    """Return whether the output's shape varies although no input's does."""
    return varies(output) and not any(map(varies, inputs))


def batch_range(tensors: Iterable[ProgramTensor]) -> DimensionRange | None:
    """Return the range of the inputs' first dimension; None = it is fixed. Raises ServeError (INVALID_ARGUMENT) if
    another dimension varies, or the ranges differ."""
    ranges: set[DimensionRange | None] = set()
    for tensor in tensors:
        first, *others = tensor.shape or (0,)
        if any(isinstance(dim, DimensionRange) for dim in others):
            raise invalid_argument(
                f"input '{tensor.name}' of the program varies in a dimension other than the first; only the batch may"
                " vary. Compile it with fixed sizes"
            )
        ranges.add(first if isinstance(first, DimensionRange) else None)
    if len(ranges) > 1:
        raise invalid_argument(
            "the inputs of the program vary differently in their first dimension; compile it with one batch range"
        )
    return ranges.pop() if ranges else None
