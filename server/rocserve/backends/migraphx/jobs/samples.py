"""Inputs to try a program with, about which nothing is known but datatypes and shapes.

Values are such that a graph can be expected to take them: floats between 0 and 1 (logarithms and roots exist, images
look like this), integers 0 or 1 (they may be indices, masks or counts). Seeded, so that a check is the same each time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rocserve.backends.migraphx.binding.interface import NUMPY_DTYPES, Array, DimensionRange, ProgramTensor
from rocserve.core.errors import invalid_argument

_FLOATS = ("half", "float", "double")
_HALF_TO_ONE: Mapping[str, tuple[int, int]] = {
    "fp8e4m3fn": (0x30, 0x38),
    "fp8e4m3fnuz": (0x38, 0x40),
    "fp8e5m2": (0x38, 0x3C),
    "fp8e5m2fnuz": (0x3C, 0x40),
}
"""The bits of 0.5 and 1: those between are numbers between."""


class Samples:
    """Makes inputs, other ones each time."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)

    def inputs(self, tensors: Mapping[str, ProgramTensor], rows: int = 0) -> dict[str, Array]:
        """By name. `rows`: in place of the first dimension; 0 = as the tensor has it.

        Dimensions that may vary are as large as they may be.

        Raises:
            ServeError: INVALID_ARGUMENT, arrays cannot hold an input's datatype.
        """
        made = {}
        for name, tensor in tensors.items():
            shape = largest_shape(tensor)
            made[name] = self._array(tensor.datatype, (rows, *shape[1:]) if rows else shape)
        return made

    def _array(self, datatype: str, shape: tuple[int, ...]) -> Array:
        dtype = NUMPY_DTYPES.get(datatype)
        if dtype is None:
            raise invalid_argument(f"an input is of MIGraphX's type {datatype}, which no request can bring")
        if datatype == "bf16":
            bits: Array = self._generator.random(shape, np.float32).view(np.uint32) >> 16
            return bits.astype(np.uint16)
        if datatype in _HALF_TO_ONE:
            least, most = _HALF_TO_ONE[datatype]
            return self._generator.integers(least, most, shape, np.uint8, endpoint=True)
        if datatype in _FLOATS:
            return self._generator.random(shape).astype(dtype)
        return self._generator.integers(0, 2, shape).astype(dtype)


def largest_shape(tensor: ProgramTensor) -> tuple[int, ...]:
    """With the upper bound in place of a dimension that varies."""
    return tuple(dim.most if isinstance(dim, DimensionRange) else dim for dim in tensor.shape)
