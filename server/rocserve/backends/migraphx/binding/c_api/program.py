"""A program of the C API."""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rocserve.backends.migraphx.binding.c_api.library import Handle, Library
from rocserve.backends.migraphx.binding.c_api.shapes import Shapes
from rocserve.backends.migraphx.binding.datatypes import numpy_dtype
from rocserve.backends.migraphx.binding.interface import Array, CompileFlags, MigraphxError, ProgramTensor


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


Result = TypeVar("Result")

_STANDARD_OUTPUT = 1
_PRINTING = threading.Lock()
"""Standard output is the process's: one program is printed at a time."""


class CProgram:
    """`bare.BareProgram`. One call at a time."""

    def __init__(self, library: Library, shapes: Shapes, handle: Handle) -> None:
        self._library = library
        self._shapes = shapes
        self._handle = handle
        self._runner: Runner | None = None

    def parameters(self) -> Sequence[ProgramTensor]:
        found = self._library.new("program_get_parameter_shapes", "program_parameter_shapes_destroy", self._handle)
        names = (ctypes.c_char_p * self._library.size("program_parameter_shapes_size", found))()
        self._library.call("program_parameter_shapes_names", names, found)
        return [
            self._shapes.tensor(
                name.decode(errors="replace"), self._library.borrowed("program_parameter_shapes_get", found, name)
            )
            for name in sorted(filter(None, names))
        ]

    def outputs(self) -> Sequence[ProgramTensor]:
        found = self._library.new("program_get_output_shapes", "shapes_destroy", self._handle)
        count = self._library.size("shapes_size", found)
        return [self._shapes.tensor("", self._library.borrowed("shapes_get", found, index)) for index in range(count)]

    def quantize_fp16(self) -> None:
        self._library.call("quantize_fp16", self._handle)

    def quantize_bf16(self) -> None:
        self._library.call("quantize_bf16", self._handle)

    def quantize_int8(self, target: str, calibration: Sequence[Mapping[str, Array]]) -> None:
        self._quantize("int8", target, calibration)

    def quantize_fp8(self, target: str, calibration: Sequence[Mapping[str, Array]]) -> None:
        self._quantize("fp8", target, calibration)

    def compile(self, target: str, flags: CompileFlags) -> None:
        options = self._library.new("compile_options_create", "compile_options_destroy")
        self._library.call("compile_options_set_offload_copy", options, flags.offload_copy)
        self._library.call("compile_options_set_fast_math", options, flags.fast_math)
        if flags.exhaustive_tune:
            self._library.call("compile_options_set_exhaustive_tune_flag", options, True)
        self._library.call("program_compile", self._handle, self._target(target), options)
        self._runner = None

    def save(self, path: Path) -> None:
        options = self._library.new("file_options_create", "file_options_destroy")
        self._library.call("save", self._handle, os.fsencode(path), options)

    def run(self, inputs: Mapping[str, Array], use: Callable[[Sequence[Array]], Result]) -> Result:
        if self._runner is None:
            self._runner = Runner(self._library, self._shapes, self._handle, self.parameters(), self.outputs())
        return self._runner.run(inputs, use)

    def text(self) -> str:
        """The C API prints to standard output, which is exchanged meanwhile."""
        flush = ctypes.CDLL(None).fflush
        with _PRINTING, tempfile.TemporaryFile() as file:
            flush(None)
            kept = _kept_output()
            os.dup2(file.fileno(), _STANDARD_OUTPUT)
            try:
                self._library.call("program_print", self._handle)
            finally:
                flush(None)
                os.dup2(kept, _STANDARD_OUTPUT)
                os.close(kept)
            file.seek(0)
            return file.read().decode(errors="replace")

    def _quantize(self, kind: str, target: str, calibration: Sequence[Mapping[str, Array]]) -> None:
        """The samples' arrays are in the caller's hands, and so alive, until this returns."""
        create, destroy = f"quantize_{kind}_options_create", f"quantize_{kind}_options_destroy"
        options = self._library.new(create, destroy)
        tensors = self.parameters()
        for sample in calibration:
            parameters = Parameters(self._library, self._shapes, tensors)
            parameters.bind(sample)
            self._library.call(f"quantize_{kind}_options_add_calibration_data", options, parameters.handle)
        self._library.call(f"quantize_{kind}", self._handle, self._target(target), options)

    def _target(self, name: str) -> Handle:
        return self._library.new("target_create", "target_destroy", name.encode())


def _kept_output() -> int:
    """A copy of standard output; where it is closed, one that leads nowhere."""
    try:
        return os.dup(_STANDARD_OUTPUT)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


class Runner:
    """Runs a compiled program; what it needs for that is made once."""

    def __init__(
        self,
        library: Library,
        shapes: Shapes,
        program: Handle,
        parameters: Sequence[ProgramTensor],
        outputs: Sequence[ProgramTensor],
    ) -> None:
        self._library = library
        self._program = program
        self._parameters = Parameters(library, shapes, parameters)
        self._results = Results(library, shapes, outputs)
        self._destroy = library.function("arguments_destroy")

    def run(self, inputs: Mapping[str, Array], use: Callable[[Sequence[Array]], Result]) -> Result:
        self._parameters.bind(inputs)
        arguments = c_void_p()
        self._library.call("program_run", byref(arguments), self._program, self._parameters.handle)
        try:
            return use(self._results.views(arguments))
        finally:
            self._destroy(arguments)
