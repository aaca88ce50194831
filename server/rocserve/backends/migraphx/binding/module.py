"""MIGraphX's official Python module as a binding. It holds the GIL through every call, compiles included."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rocserve.backends.migraphx.binding.datatypes import AS_BITS, numpy_dtype
from rocserve.backends.migraphx.binding.interface import (
    Array,
    CompileFlags,
    DimensionRange,
    MigraphxError,
    OnnxOptions,
    ProgramTensor,
    TensorflowOptions,
)
from rocserve.backends.migraphx.binding.loaded_library import loaded_core
from rocserve.backends.migraphx.binding.messages import Messages
from rocserve.backends.standard_error import StandardErrorCapture

Result = TypeVar("Result")


class ModuleBinding:
    """`bare.BareBinding` on the module `migraphx`."""

    name = "module"
    releases_gil = False

    def __init__(self, folder: str) -> None:
        """`folder`: where the module lies.

        Raises:
            MigraphxError: the module cannot be imported into this process.
        """
        self._module = _import_from(folder)
        self._calls = ModuleCalls()
        self.library = str(self._module.__file__)
        _, loaded = loaded_core()
        self.migraphx_version = loaded or _leading_numbers(str(getattr(self._module, "__version__", "")))

    def check_target(self, target: str) -> None:
        self._calls.call(self._module.get_target, target)

    def parse_onnx(self, path: Path, options: OnnxOptions) -> ModuleProgram:
        keywords: dict[str, Any] = {"default_dim_value": options.default_dimension}
        if any(isinstance(size, DimensionRange) for shape in options.input_shapes.values() for size in shape):
            keywords["map_dyn_input_dims"] = {
                name: [self._dynamic(size) for size in shape] for name, shape in options.input_shapes.items()
            }
        else:
            keywords["map_input_dims"] = {name: list(shape) for name, shape in options.input_shapes.items()}
        return self._program(self._module.parse_onnx, os.fspath(path), **keywords)

    def parse_tensorflow(self, path: Path, options: TensorflowOptions) -> ModuleProgram:
        return self._program(
            self._module.parse_tf,
            os.fspath(path),
            is_nhwc=options.nhwc,
            batch_size=options.batch_size,
            map_input_dims={name: list(shape) for name, shape in options.input_shapes.items()},
            output_names=list(options.output_names),
        )

    def load(self, path: Path) -> ModuleProgram:
        return self._program(self._module.load, os.fspath(path))

    def take_messages(self) -> Sequence[str]:
        return self._calls.messages.take()

    def _program(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> ModuleProgram:
        return ModuleProgram(self._module, self._calls, self._calls.call(function, *arguments, **keywords))

    def _dynamic(self, size: int | DimensionRange) -> Any:
        bounds = (size, size) if isinstance(size, int) else (size.least, size.most)
        return self._module.shape.dynamic_dimension(*bounds)


class ModuleCalls:
    """Calls into the module: its errors as ours, and what MIGraphX writes beside them."""

    def __init__(self) -> None:
        self.messages = Messages()
        self._written = StandardErrorCapture()

    def call(self, function: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
        start = self._written.begin()
        try:
            return self.call_often(function, *arguments, **keywords)
        finally:
            self.messages.add(self._written.end(start))

    def call_often(self, function: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
        """As `call`, but what is written goes where standard error leads, also when the process dies of the call."""
        try:
            return function(*arguments, **keywords)
        except (RuntimeError, MemoryError, ValueError, IndexError, TypeError) as error:
            # What pybind11 makes of C++'s exceptions.
            raise MigraphxError(str(error) or type(error).__name__) from None


class ModuleProgram:
    """`bare.BareProgram`. One call at a time."""

    def __init__(self, module: Any, calls: ModuleCalls, program: Any) -> None:
        self._module = module
        self._calls = calls
        self._program = program
        self._not_for_arrays: Sequence[ProgramTensor] | None = None

    def parameters(self) -> Sequence[ProgramTensor]:
        shapes = self._calls.call(self._program.get_parameter_shapes)
        return [_tensor(name, shapes[name]) for name in sorted(shapes)]

    def outputs(self) -> Sequence[ProgramTensor]:
        return [_tensor("", shape) for shape in self._calls.call(self._program.get_output_shapes)]

    def quantize_fp16(self) -> None:
        self._calls.call(self._module.quantize_fp16, self._program)

    def quantize_bf16(self) -> None:
        self._calls.call(self._function("quantize_bf16"), self._program)

    def quantize_int8(self, target: str, calibration: Sequence[Mapping[str, Array]]) -> None:
        self._quantize(self._module.quantize_int8, target, calibration)

    def quantize_fp8(self, target: str, calibration: Sequence[Mapping[str, Array]]) -> None:
        self._quantize(self._function("quantize_fp8"), target, calibration)

    def compile(self, target: str, flags: CompileFlags) -> None:
        self._calls.call(
            self._program.compile,
            self._target(target),
            offload_copy=flags.offload_copy,
            fast_math=flags.fast_math,
            exhaustive_tune=flags.exhaustive_tune,
        )

    def save(self, path: Path) -> None:
        self._calls.call(self._module.save, self._program, os.fspath(path))

    def run(self, inputs: Mapping[str, Array], use: Callable[[Sequence[Array]], Result]) -> Result:
        self._require_feedable()
        results = self._calls.call_often(self._program.run, dict(inputs))
        return use([_view(result) for result in results])

    def text(self) -> str:
        return str(self._program)

    def _quantize(self, function: Any, target: str, calibration: Sequence[Mapping[str, Array]]) -> None:
        """Arguments share the arrays' memory, which is in the caller's hands, and so alive, until this returns."""
        samples = [{name: self._module.argument(array) for name, array in sample.items()} for sample in calibration]
        self._calls.call(function, self._program, self._target(target), samples)

    def _require_feedable(self) -> None:
        if self._not_for_arrays is None:
            self._not_for_arrays = [tensor for tensor in self.parameters() if tensor.datatype in AS_BITS]
        for tensor in self._not_for_arrays:
            raise MigraphxError(
                f"input '{tensor.name}' is {tensor.datatype}, which MIGraphX's Python module cannot be given; "
                "its C API can (binding: c_api)"
            )

    def _target(self, name: str) -> Any:
        return self._calls.call(self._module.get_target, name)

    def _function(self, name: str) -> Any:
        function = getattr(self._module, name, None)
        if function is None:
            raise MigraphxError(f"this version of MIGraphX cannot do it: its module has no {name}")
        return function


def _tensor(name: str, shape: Any) -> ProgramTensor:
    datatype = str(shape.type_string()).removesuffix("_type")
    if shape.dynamic():
        ranges = [(int(dimension.min), int(dimension.max)) for dimension in shape.dyn_dims()]
        sizes = tuple(least if least == most else DimensionRange(least, most) for least, most in ranges)
        return ProgramTensor(name, datatype, sizes)
    return ProgramTensor(name, datatype, _sizes(shape))


def _sizes(shape: Any) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in shape.lens())
    # A single value without a dimension is {1} with the stride 0 to MIGraphX.
    return () if sizes == (1,) and list(shape.strides()) == [0] else sizes


def _view(result: Any) -> Array:
    """The memory of an output, which may be an input's."""
    shape = result.get_shape()
    sizes = _sizes(shape)
    datatype = str(shape.type_string()).removesuffix("_type")
    dtype = numpy_dtype(datatype)
    if dtype is None:
        raise MigraphxError(f"an output is of MIGraphX's type {datatype}, which no array can hold")
    if datatype not in AS_BITS:
        view: Array = np.asarray(result)
        return view.reshape(sizes)
    memory = (ctypes.c_char * int(shape.bytes())).from_address(int(result.data_ptr()))
    return np.ndarray(sizes, dtype, memoryview(memory))


def _import_from(folder: str) -> Any:
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("migraphx")
    except ImportError as error:
        raise MigraphxError(f"MIGraphX's Python module in {folder!r} cannot be imported: {error}") from None
    finally:
        sys.path.remove(folder)


def _leading_numbers(version: str) -> str:
    """2.14.0 of 2.14.0.dev+abc."""
    match = re.match(r"\d+(\.\d+)*", version)
    return match[0] if match else ""
