"""Calls MIGraphX's C API (libmigraphx_c.so.3) through ctypes. Any Python works, and each call releases the GIL.

The functions take pointers, and numbers that are passed as 64 bits whatever their width, so ctypes needs no prototypes.
Every function returns a status. This file names the functions without "migraphx_".
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from rocserve.backends.migraphx.binding import (
    NUMPY_DTYPES,
    Array,
    Binding,
    Dimension,
    DimensionRange,
    MigraphxError,
    Program,
    ProgramTensor,
    Shapes,
    bounds,
    loaded_version,
)
from rocserve.backends.output_capture import STANDARD_OUTPUT, OutputCapture
from rocserve.core.printable import without_colours

_IN_ORDER = tuple(NUMPY_DTYPES)


class CBinding(Binding):
    """Parses and loads programs through the C API: calls its functions, and converts MIGraphX's shapes to plain numbers
    and back. Safe on several threads; each call releases the GIL."""

    name = "c_api"

    def __init__(self, path: str) -> None:
        """Raises MigraphxError if the library cannot be loaded into this process."""
        super().__init__()
        try:
            self._functions = ctypes.CDLL(path)
        except OSError as error:
            raise MigraphxError(f"MIGraphX's C library cannot be loaded: {error}") from None
        self.library = path
        self.migraphx_version = loaded_version()
        # MIGraphX writes an error in pieces, which overlapping calls would mix.
        self._errors = OutputCapture()
        self.output = OutputCapture(STANDARD_OUTPUT)
        self._first = self._number_of_bool()

    def check_target(self, target: str) -> None:
        self.new("target_create", "target_destroy", target.encode())

    def _parse_onnx(self, path: Path, shapes: Shapes) -> CProgram:
        handle = self.new("onnx_options_create", "onnx_options_destroy")
        # MIGraphX takes either fixed or varying shapes: if one varies, all are passed as varying.
        fixed = {name: [size for size in shape if isinstance(size, int)] for name, shape in shapes.items()}
        if all(len(fixed[name]) == len(shape) for name, shape in shapes.items()):
            for name, sizes in fixed.items():
                self.call(
                    "onnx_options_set_input_parameter_shape", handle, name.encode(), _size_array(sizes), len(sizes)
                )
        else:
            for name, shape in shapes.items():
                ranges = [self.range(*bounds(dimension)) for dimension in shape]
                pointers = (ctypes.c_void_p * len(ranges))(*(one.pointer for one in ranges))
                dimensions = self.new(
                    "dynamic_dimensions_create", "dynamic_dimensions_destroy", pointers, len(ranges)
                )  # The function copies them.
                self.call("onnx_options_set_dyn_input_parameter_shape", handle, name.encode(), dimensions)
        return self._program("parse_onnx", path, handle)

    def _parse_tensorflow(
        self, path: Path, shapes: Mapping[str, tuple[int, ...]], batch_size: int, output_names: Sequence[str]
    ) -> CProgram:
        handle = self.new("tf_options_create", "tf_options_destroy")
        self.call("tf_options_set_nhwc", handle, True)
        self.call("tf_options_set_default_dim_value", handle, batch_size)
        for name, shape in shapes.items():
            sizes = _size_array(shape)
            self.call("tf_options_set_input_parameter_shape", handle, name.encode(), sizes, len(shape))
        if output_names:
            names = (ctypes.c_char_p * len(output_names))(*(name.encode() for name in output_names))
            self.call("tf_options_set_output_names", handle, names, len(names))
        return self._program("parse_tf", path, handle)

    def load(self, path: Path) -> CProgram:
        options = self.new("file_options_create", "file_options_destroy")
        return self._program("load", path, options, compiled=True)

    def _program(self, function: str, path: Path, options: Handle, compiled: bool = False) -> CProgram:
        handle = self.new(function, "program_destroy", os.fsencode(path), options)
        return CProgram(self, handle, compiled)

    def _number_of_bool(self) -> int:
        """Return MIGraphX's number of the type bool, which new types have moved: 4 in the newest known version, 2 in
        ROCm 7.1, 1 before. The types half, float and double follow bool. Their sizes identify them."""
        for first in range(1, 5):
            scalars = [self.new("shape_create_scalar", "shape_destroy", first + offset) for offset in range(4)]
            if [self.number("shape_bytes", scalar) for scalar in scalars] == [1, 2, 4, 8]:
                return first
        raise MigraphxError("this MIGraphX numbers its datatypes differently from all known versions")

    def function(self, name: str) -> Any:
        """Return the bare function, for calls that cannot fail. It takes numbers as c_size_t or c_void_p. Raises
        MigraphxError if this MIGraphX is too old to have it."""
        try:
            return getattr(self._functions, f"migraphx_{name}")
        except AttributeError:
            raise MigraphxError(f"this version of MIGraphX is too old: its C API has no migraphx_{name}") from None

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; raise MigraphxError with MIGraphX's text if it fails. Standard error is captured only during
        functions that may not be repeated, one call at a time: if a run kills the process, its last output (a GPU
        driver's, say) still reaches the log. If another function fails, the call is repeated with standard error
        captured, to get MIGraphX's text; if the second call succeeds, its result is used."""
        function = self.function(name)
        passed = [ctypes.c_size_t(one) if isinstance(one, int) else one for one in arguments]
        # These write messages other than errors, or change their arguments.
        may_repeat = name not in {
            "load",
            "save",
            "parse_onnx",
            "parse_tf",
            "target_create",
            "program_compile",
            "program_print",
            "quantize_fp16",
            "quantize_bf16",
            "quantize_int8",
            "quantize_fp8",
        }
        if may_repeat and function(*passed) == 0:
            return
        with self._errors.captured() as errors:
            status = function(*passed)
        if status:
            raise self._error(name, status, without_colours(errors.text))
        if errors.text:
            self.add_message(errors.text)

    def new(self, name: str, destroy: str, *arguments: Any) -> Handle:
        """Call a function whose first argument receives a new handle, which the caller owns."""
        return Handle(self, self.borrowed(name, *arguments), destroy)

    def borrowed(self, name: str, *arguments: Any) -> int:
        """Call a function whose first argument receives a handle that another object owns."""
        return self.number(name, *arguments, kind=c_void_p)

    def number(self, name: str, *arguments: Any, kind: Any = ctypes.c_size_t) -> int:
        """Call a function whose first argument receives a number of type `kind`."""
        number = kind()
        self.call(name, byref(number), *arguments)
        return number.value or 0

    def tensor(self, name: str, shape: int) -> ProgramTensor:
        """Describe a tensor. `shape`: a handle, which is only read."""
        number = self.number("shape_type", shape, kind=ctypes.c_int)
        index = number - self._first
        datatype = _IN_ORDER[index] if 0 <= index < len(_IN_ORDER) else f"number {number}"
        if self.number("shape_dynamic", shape, kind=ctypes.c_bool):
            dimensions = self.new("shape_dyn_dims", "dynamic_dimensions_destroy", shape)
            count = self.number("dynamic_dimensions_size", dimensions)
            found = (self.borrowed("dynamic_dimensions_get", dimensions, index) for index in range(count))
            return ProgramTensor(name, datatype, tuple(map(self._bounds, found)))
        lengths = self._sizes("shape_lengths", shape)
        # MIGraphX's shape of a scalar is {1} with the stride 0.
        return ProgramTensor(name, datatype, () if lengths == (1,) and self.strides(shape) == (0,) else lengths)

    def strides(self, shape: int) -> tuple[int, ...]:
        """Return the strides in elements."""
        return self._sizes("shape_strides", shape)

    def create(self, datatype: str, lengths: Sequence[int]) -> Handle:
        """Make the shape of a packed row-major tensor; no lengths = a scalar."""
        number = self._first + _IN_ORDER.index(datatype)
        if not lengths:
            return self.new("shape_create_scalar", "shape_destroy", number)
        return self.new("shape_create", "shape_destroy", number, _size_array(lengths), len(lengths))

    def _bounds(self, dimension: int) -> Dimension:
        """Return a dimension's bounds. The C API only compares dimensions, so the bounds are read from the object's
        first bytes and compared with the dimension."""
        least, most = (ctypes.c_size_t * 2).from_address(dimension)
        tried = self.range(least, most) if least <= most else None
        if tried is None or not self.number("dynamic_dimension_equal", tried, dimension, kind=ctypes.c_bool):
            raise MigraphxError("MIGraphX's C API does not give the bounds of a varying dimension")
        return least if least == most else DimensionRange(least, most)

    def range(self, least: int, most: int) -> Handle:
        return self.new("dynamic_dimension_create_min_max", "dynamic_dimension_destroy", least, most)

    def _sizes(self, name: str, shape: int) -> tuple[int, ...]:
        values = ctypes.POINTER(ctypes.c_size_t)()
        count = ctypes.c_size_t()
        self.call(name, byref(values), byref(count), shape)
        return tuple(values[: count.value]) if count.value else ()

    def _error(self, name: str, status: int, text: str) -> MigraphxError:
        """Make the error without the function's name, and keep the output before it as messages."""
        before, *messages = text.split(f"migraphx_{name}: Error: ")
        if not messages:
            # Compilers name the function differently.
            before, *messages = re.split(r"^[^\n]*?: Error: ", text, flags=re.MULTILINE)
        if not messages:
            before, messages = "", [text]
        # The last error may be a run's on another thread that has just begun.
        words = next((words.strip() for words in reversed(messages) if words.strip()), "")
        # After a failed pass MIGraphX writes the program to a file. If that fails too, only the log has the reason.
        # MIGraphX 2.16 and later log such a line.
        logged = re.search(r"\[ERROR\] \[[^]]*\] Error (?P<pass>[^:]+): (?P<reason>.+)", before)
        if logged and logged["reason"] not in words:
            words = f"{logged['pass']}: {logged['reason']}; then {words}"
        self.add_message(before)
        return MigraphxError(words or f"MIGraphX failed without a message (migraphx_{name}, status {status})")


class Handle:
    """Owns an object of MIGraphX, and destroys it with the last reference to the handle. At the end of the process the
    object is left alone, because the objects that it depends on may be gone."""

    def __init__(self, binding: CBinding, pointer: int, destroy: str) -> None:
        self.pointer = pointer
        self._as_parameter_ = ctypes.c_void_p(pointer)
        self._finalizer = weakref.finalize(self, binding.function(destroy), self._as_parameter_)
        self._finalizer.atexit = False


class CProgram(Program):
    def __init__(self, binding: CBinding, handle: Handle, compiled: bool) -> None:
        self._binding = binding
        self._handle = handle
        self._run_results = c_void_p()
        """The results of the latest run, or a null pointer."""
        super().__init__(compiled)

    def _read_parameters(self) -> Sequence[ProgramTensor]:
        found = self._binding.new("program_get_parameter_shapes", "program_parameter_shapes_destroy", self._handle)
        names = (ctypes.c_char_p * self._binding.number("program_parameter_shapes_size", found))()
        self._binding.call("program_parameter_shapes_names", names, found)
        return [
            self._binding.tensor(
                name.decode(errors="replace"), self._binding.borrowed("program_parameter_shapes_get", found, name)
            )
            for name in sorted(filter(None, names))
        ]

    def _read_outputs(self) -> Sequence[ProgramTensor]:
        found = self._binding.new("program_get_output_shapes", "shapes_destroy", self._handle)
        count = self._binding.number("shapes_size", found)
        return [self._binding.tensor("", self._binding.borrowed("shapes_get", found, index)) for index in range(count)]

    def _quantize(self, kind: str, target: str, calibration: Sequence[Mapping[str, Array]]) -> None:
        """The caller keeps the samples' arrays alive until this method returns."""
        if not calibration:
            self._binding.call(f"quantize_{kind}", self._handle)
            return
        options = self._binding.new(f"quantize_{kind}_options_create", f"quantize_{kind}_options_destroy")
        for sample in calibration:
            arguments = _Arguments(self._binding, self.parameters)
            arguments.bind(sample)
            self._binding.call(f"quantize_{kind}_options_add_calibration_data", options, arguments.handle)
        self._binding.call(f"quantize_{kind}", self._handle, self._target(target), options)

    def _compile(self, target: str, fast_math: bool, exhaustive_tune: bool) -> None:
        options = self._binding.new("compile_options_create", "compile_options_destroy")
        self._binding.call("compile_options_set_offload_copy", options, True)
        self._binding.call("compile_options_set_fast_math", options, fast_math)
        if exhaustive_tune:
            self._binding.call("compile_options_set_exhaustive_tune_flag", options, True)
        self._binding.call("program_compile", self._handle, self._target(target), options)

    def _save(self, path: Path) -> None:
        options = self._binding.new("file_options_create", "file_options_destroy")
        self._binding.call("save", self._handle, os.fsencode(path), options)

    def _run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        self._arguments.bind(inputs)
        self._binding.call("program_run", byref(self._run_results), self._handle, self._arguments.handle)
        return self._results.views(self._run_results)

    def _drop_results(self) -> None:
        if self._run_results:
            self._results.destroy(self._run_results)
            self._run_results = c_void_p()

    @functools.cached_property
    def _arguments(self) -> _Arguments:
        return _Arguments(self._binding, {**self.parameters, **self.output_buffers})

    @functools.cached_property
    def _results(self) -> _Results:
        return _Results(self._binding, self.outputs)

    def _text(self) -> str:
        """The C API prints to standard output."""
        flush = ctypes.CDLL(None).fflush
        flush(None)
        with self._binding.output.captured() as output:
            try:
                self._binding.call("program_print", self._handle)
            finally:
                flush(None)
        return output.text

    def _target(self, name: str) -> Handle:
        return self._binding.new("target_create", "target_destroy", name.encode())


class _Arguments:
    """Holds a program's arguments, which share the arrays' memory. An array of the same address and shape as in the
    call before is not bound again. Neither MIGraphX nor this class keeps the arrays alive: they must live until the
    call that takes `handle` returns."""

    def __init__(self, binding: CBinding, tensors: Mapping[str, ProgramTensor]) -> None:
        self._binding = binding
        self._tensors = tensors
        self._bound: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._shapes: dict[str, tuple[tuple[int, ...], Handle]] = {}
        """Argument's name -> its latest lengths, and the handle of that shape."""
        # These functions fail only for bad handles, or without memory.
        self._create = binding.function("argument_create")
        self._add = binding.function("program_parameters_add")
        self._destroy = binding.function("argument_destroy")
        self.handle = binding.new("program_parameters_create", "program_parameters_destroy")

    def bind(self, arrays: Mapping[str, Array]) -> None:
        for name, array in arrays.items():
            lengths = array.shape
            location = (array.__array_interface__["data"][0], lengths)
            if self._bound.get(name) == location:
                continue
            made = self._shapes.get(name)
            if made is None or made[0] != lengths:
                made = self._shapes[name] = (lengths, self._binding.create(self._tensors[name].datatype, lengths))
            argument = c_void_p()
            # The argument copies the shape; the parameters copy the argument, and drop the earlier one of this name.
            status = self._create(byref(argument), made[1], c_void_p(location[0]))
            if not status:
                status = self._add(self.handle, name.encode(), argument)
                self._destroy(argument)
            if status:
                raise MigraphxError(f"MIGraphX does not take input '{name}'")
            self._bound[name] = location


class _Results:
    """Makes arrays on MIGraphX's memory from the results of a program's runs."""

    def __init__(self, binding: CBinding, outputs: Sequence[ProgramTensor]) -> None:
        self._binding = binding
        self._fixed = [all(isinstance(size, int) for size in output.shape) for output in outputs]
        self._views: list[Callable[[int], Array] | None] = [None] * len(outputs)
        """The function from an output's address to its array; used again if the output's shape is fixed."""
        # These functions fail only for bad handles.
        self._get = binding.function("arguments_get")
        self._buffer = binding.function("argument_buffer")
        self._shape = binding.function("argument_shape")
        self.destroy = binding.function("arguments_destroy")
        self._argument, self._place = c_void_p(), c_void_p()

    def views(self, arguments: c_void_p) -> Sequence[Array]:
        """Return arrays on the results, valid as long as `arguments`, the handle from a run."""
        argument, buffer = self._argument, self._place
        found = []
        for index, view in enumerate(self._views):
            self._get(byref(argument), arguments, ctypes.c_size_t(index))
            self._buffer(byref(buffer), argument)
            if view is None or not self._fixed[index]:
                view = self._views[index] = self._view_at(argument)
            found.append(view(buffer.value or 0))
        return found

    def _view_at(self, argument: c_void_p) -> Callable[[int], Array]:
        """Return the function that makes an array at an address, for an output of this layout."""
        shape = c_void_p()
        self._shape(byref(shape), argument)
        tensor = self._binding.tensor("", shape.value or 0)
        dtype = NUMPY_DTYPES.get(tensor.datatype)
        if dtype is None:
            raise MigraphxError(f"an output has MIGraphX's type {tensor.datatype}, which arrays cannot hold")
        sizes = tuple(size for size in tensor.shape if isinstance(size, int))  # After a run every dimension is fixed.
        strides = self._binding.strides(shape.value or 0)[: len(sizes)]
        extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        memory: Any = ctypes.c_char * (extent * dtype.itemsize if all(sizes) else 0)
        byte_strides = tuple(stride * dtype.itemsize for stride in strides)
        return lambda address: np.ndarray(sizes, dtype, memory.from_address(address), strides=byte_strides)


def _size_array(sizes: Sequence[int]) -> ctypes.Array[ctypes.c_size_t]:
    return (ctypes.c_size_t * len(sizes))(*sizes)
