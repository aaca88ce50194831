"""Arrays as MIGraphX's arguments, and its arguments as arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import byref, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocserve.backends.migraphx.binding.c_api.library import Handle, Library
from rocserve.backends.migraphx.binding.c_api.shapes import Shapes
from rocserve.backends.migraphx.binding.datatypes import numpy_dtype
from rocserve.backends.migraphx.binding.interface import Array, MigraphxError, ProgramTensor


class Parameters:
    """What a program runs on: arguments that share the arrays' memory. An array at the same place costs nothing again.

    MIGraphX does not keep the arrays alive, nor does this: they must live until the call that takes `handle` is over.
    """

    def __init__(self, library: Library, shapes: Shapes, tensors: Sequence[ProgramTensor]) -> None:
        self._shapes = shapes
        self._datatypes = {tensor.name: tensor.datatype for tensor in tensors}
        self._bound: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._made: dict[str, tuple[tuple[int, ...], Handle]] = {}
        """The latest shape of each."""
        # These fail for bad handles only, and where memory is out.
        self._create = library.function("argument_create")
        self._add = library.function("program_parameters_add")
        self._destroy = library.function("argument_destroy")
        self.handle = library.new("program_parameters_create", "program_parameters_destroy")

    def bind(self, arrays: Mapping[str, Array]) -> None:
        for name, array in arrays.items():
            place = (array.__array_interface__["data"][0], array.shape)
            if self._bound.get(name) != place:
                self._bind(name, *place)
                self._bound[name] = place

    def _bind(self, name: str, address: int, lengths: tuple[int, ...]) -> None:
        argument = c_void_p()
        # It copies the shape, and is copied by the parameters, where an earlier one of this name goes.
        if self._create(byref(argument), self._shape(name, lengths), address):
            raise MigraphxError(f"input '{name}' could not be given to MIGraphX")
        status = self._add(self.handle, name.encode(), argument)
        self._destroy(argument)
        if status:
            raise MigraphxError(f"input '{name}' could not be given to MIGraphX")

    def _shape(self, name: str, lengths: tuple[int, ...]) -> Handle:
        made = self._made.get(name)
        if made is None or made[0] != lengths:
            made = self._made[name] = (lengths, self._shapes.create(self._datatypes[name], lengths))
        return made[1]


@dataclass(frozen=True, slots=True)
class Layout:
    """How an output lies in MIGraphX's memory: strides in bytes, the memory as a type of ctypes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    memory: Any

    def view(self, address: int) -> Array:
        return np.ndarray(self.shape, self.dtype, self.memory.from_address(address), strides=self.strides)


class Results:
    """What runs of one program gave, as arrays on MIGraphX's memory."""

    def __init__(self, library: Library, shapes: Shapes, outputs: Sequence[ProgramTensor]) -> None:
        self._shapes = shapes
        self._fixed = [all(isinstance(size, int) for size in output.shape) for output in outputs]
        self._layouts: list[Layout | None] = [None] * len(outputs)
        # These fail for bad handles only.
        self._get = library.function("arguments_get")
        self._buffer = library.function("argument_buffer")
        self._shape = library.function("argument_shape")
        self._argument, self._place = c_void_p(), c_void_p()

    def views(self, arguments: c_void_p) -> Sequence[Array]:
        """`arguments`: the handle that a run gave; the views are good as long as it is."""
        return [self._view(arguments, index) for index in range(len(self._layouts))]

    def _view(self, arguments: c_void_p, index: int) -> Array:
        argument, buffer = self._argument, self._place
        self._get(byref(argument), arguments, index)
        self._buffer(byref(buffer), argument)
        layout = self._layouts[index]
        if layout is None or not self._fixed[index]:
            layout = self._layouts[index] = self._layout(argument)
        return layout.view(buffer.value or 0)

    def _layout(self, argument: c_void_p) -> Layout:
        shape = c_void_p()
        self._shape(byref(shape), argument)
        tensor = self._shapes.tensor("", shape.value or 0)
        dtype = numpy_dtype(tensor.datatype)
        if dtype is None:
            raise MigraphxError(f"an output is of MIGraphX's type {tensor.datatype}, which no array can hold")
        sizes = tuple(size for size in tensor.shape if isinstance(size, int))  # what ran has one shape
        strides = self._shapes.strides(shape.value or 0)[: len(sizes)]
        extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        memory = ctypes.c_char * (extent * dtype.itemsize if all(sizes) else 0)
        return Layout(sizes, dtype, tuple(stride * dtype.itemsize for stride in strides), memory)
