"""Shapes of MIGraphX's in plain numbers and back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from rocserve.backends.migraphx.binding.c_api.library import Handle, Library
from rocserve.backends.migraphx.binding.checks import bounds
from rocserve.backends.migraphx.binding.datatypes import IN_ORDER
from rocserve.backends.migraphx.binding.interface import DimensionRange, MigraphxError, ProgramTensor

_LATEST_BOOL = 4
"""As a number of MIGraphX's; types have been added before it (2 in 7.1, 1 in older ones)."""


class Shapes:
    """Safe on several threads."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._first = self._number_of_bool()

    def tensor(self, name: str, shape: int) -> ProgramTensor:
        """`shape`: a handle; it is only read."""
        return ProgramTensor(name, self.datatype(shape), self._dimensions(shape))

    def datatype(self, shape: int) -> str:
        number = ctypes.c_int()
        self._library.call("shape_type", ctypes.byref(number), shape)
        index = number.value - self._first
        return IN_ORDER[index] if 0 <= index < len(IN_ORDER) else f"number {number.value}"

    def lengths(self, shape: int) -> tuple[int, ...]:
        return self._sizes("shape_lengths", shape)

    def strides(self, shape: int) -> tuple[int, ...]:
        """In elements."""
        return self._sizes("shape_strides", shape)

    def create(self, datatype: str, lengths: Sequence[int]) -> Handle:
        """Of values that lie close together, last dimension first; without lengths a single value."""
        number = self._first + IN_ORDER.index(datatype)
        if not lengths:
            return self._library.new("shape_create_scalar", "shape_destroy", number)
        return self._library.new("shape_create", "shape_destroy", number, size_array(lengths), len(lengths))

    def create_dynamic(self, dimensions: Sequence[int | DimensionRange]) -> Handle:
        handles = [self._dynamic_dimension(*bounds(dimension)) for dimension in dimensions]
        pointers = (ctypes.c_void_p * len(handles))(*(handle.pointer for handle in handles))
        return self._library.new(
            "dynamic_dimensions_create", "dynamic_dimensions_destroy", pointers, len(handles)
        )  # which copies them

    def _dimensions(self, shape: int) -> tuple[int | DimensionRange, ...]:
        varies = ctypes.c_bool()
        self._library.call("shape_dynamic", ctypes.byref(varies), shape)
        if varies.value:
            return self._dynamic_dimensions(shape)
        lengths = self.lengths(shape)
        # A single value without a dimension is {1} with the stride 0 to MIGraphX.
        return () if lengths == (1,) and self.strides(shape) == (0,) else lengths

    def _dynamic_dimensions(self, shape: int) -> tuple[int | DimensionRange, ...]:
        dimensions = self._library.new("shape_dyn_dims", "dynamic_dimensions_destroy", shape)
        count = self._library.size("dynamic_dimensions_size", dimensions)
        return tuple(
            self._range(self._library.borrowed("dynamic_dimensions_get", dimensions, index)) for index in range(count)
        )

    def _range(self, dimension: int) -> int | DimensionRange:
        """The C API does not give a dimension's bounds, but compares: those that its memory begins with are tried."""
        least, most = (ctypes.c_size_t * 2).from_address(dimension)
        equal = ctypes.c_bool()
        if least <= most:
            tried = self._dynamic_dimension(least, most)
            self._library.call("dynamic_dimension_equal", ctypes.byref(equal), tried, dimension)
        if not equal.value:
            raise MigraphxError("the bounds of a dimension that varies cannot be told through MIGraphX's C API")
        return least if least == most else DimensionRange(least, most)

    def _dynamic_dimension(self, least: int, most: int) -> Handle:
        return self._library.new("dynamic_dimension_create_min_max", "dynamic_dimension_destroy", least, most)

    def _sizes(self, name: str, shape: int) -> tuple[int, ...]:
        values = ctypes.POINTER(ctypes.c_size_t)()
        count = ctypes.c_size_t()
        self._library.call(name, ctypes.byref(values), ctypes.byref(count), shape)
        return tuple(values[: count.value]) if count.value else ()

    def _number_of_bool(self) -> int:
        """Half, float and double, which follow it, are known by their sizes."""
        for first in range(1, _LATEST_BOOL + 1):
            if [self._bytes(first + offset) for offset in range(4)] == [1, 2, 4, 8]:
                return first
        raise MigraphxError("this MIGraphX numbers its datatypes as no known version does")

    def _bytes(self, number: int) -> int:
        return self._library.size("shape_bytes", self._library.new("shape_create_scalar", "shape_destroy", number))


def size_array(sizes: Sequence[int]) -> ctypes.Array[ctypes.c_size_t]:
    return (ctypes.c_size_t * len(sizes))(*sizes)
