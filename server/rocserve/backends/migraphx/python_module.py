"""Calls MIGraphX's Python module, and opens one of the two bindings. The module holds the GIL through every call."""

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

from rocserve.backends.migraphx.binding import (
    BIT_DATATYPES,
    NUMPY_DTYPES,
    Array,
    Binding,
    DimensionRange,
    MigraphxError,
    Program,
    ProgramTensor,
    Shapes,
    bounds,
    loaded_version,
)
from rocserve.backends.migraphx.c_api import CBinding
from rocserve.backends.migraphx.installation import QUIET, MigraphxInstallation
from rocserve.backends.output_capture import CapturedText, OutputCapture
from rocserve.core.printable import without_colours

Result = TypeVar("Result")


class ModuleBinding(Binding):
    """Parses and loads programs through the Python module."""

    name = "module"

    def __init__(self, folder: str) -> None:
        """`folder`: contains the module. Raises MigraphxError if the module cannot be imported into this process."""
        super().__init__()
        sys.path.insert(0, folder)
        try:
            self.module: Any = importlib.import_module("migraphx")
        except ImportError as error:
            raise MigraphxError(f"MIGraphX's Python module in {folder!r} cannot be imported: {error}") from None
        finally:
            sys.path.remove(folder)
        self._errors = OutputCapture()
        self.library = str(self.module.__file__)
        # The version of 2.14.0.dev+abc is 2.14.0.
        leading = re.match(r"\d+(\.\d+)*", str(getattr(self.module, "__version__", "")))
        self.migraphx_version = loaded_version() or (leading[0] if leading else "")

    def check_target(self, target: str) -> None:
        self.call(self.module.get_target, target)

    def call(self, function: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
        """Call a function of the module. Errors become MigraphxError, and other output of MIGraphX becomes messages."""
        messages = CapturedText()
        try:
            with self._errors.captured() as messages:
                return call_uncaptured(function, *arguments, **keywords)
        finally:
            self.add_message(messages.text)

    def _parse_onnx(self, path: Path, shapes: Shapes) -> ModuleProgram:
        keywords: dict[str, Any] = {}
        if any(isinstance(size, DimensionRange) for shape in shapes.values() for size in shape):
            keywords["map_dyn_input_dims"] = {
                name: [self.module.shape.dynamic_dimension(*bounds(size)) for size in shape]
                for name, shape in shapes.items()
            }
        else:
            keywords["map_input_dims"] = {name: list(shape) for name, shape in shapes.items()}
        return ModuleProgram(self, self.call(self.module.parse_onnx, os.fspath(path), **keywords), compiled=False)

    def _parse_tensorflow(
        self, path: Path, shapes: Mapping[str, tuple[int, ...]], batch_size: int, output_names: Sequence[str]
    ) -> ModuleProgram:
        program = self.call(
            self.module.parse_tf,
            os.fspath(path),
            is_nhwc=True,
            batch_size=batch_size,
            map_input_dims={name: list(shape) for name, shape in shapes.items()},
            output_names=list(output_names),
        )
        return ModuleProgram(self, program, compiled=False)

    def load(self, path: Path) -> ModuleProgram:
        return ModuleProgram(self, self.call(self.module.load, os.fspath(path)), compiled=True)


class ModuleProgram(Program):
    def __init__(self, binding: ModuleBinding, program: Any, compiled: bool) -> None:
        self._binding = binding
        self._program = program
        self._results: Sequence[Any] = ()
        super().__init__(compiled)

    def _read_parameters(self) -> Sequence[ProgramTensor]:
        shapes = self._binding.call(self._program.get_parameter_shapes)
        return [_tensor(name, shapes[name]) for name in sorted(shapes)]

    def _read_outputs(self) -> Sequence[ProgramTensor]:
        return [_tensor("", shape) for shape in self._binding.call(self._program.get_output_shapes)]

    def _quantize(self, kind: str, target: str, calibration: Sequence[Mapping[str, Array]]) -> None:
        """The arguments share the arrays' memory. The caller keeps the arrays alive until this returns."""
        module = self._binding.module
        function = getattr(module, f"quantize_{kind}", None)
        if function is None:
            raise MigraphxError(f"this version of MIGraphX is too old: its module has no quantize_{kind}")
        if not calibration:
            self._binding.call(function, self._program)
            return
        samples = [{name: module.argument(array) for name, array in sample.items()} for sample in calibration]
        self._binding.call(function, self._program, self._target(target), samples)

    def _compile(self, target: str, fast_math: bool, exhaustive_tune: bool) -> None:
        self._binding.call(
            self._program.compile,
            self._target(target),
            offload_copy=True,
            fast_math=fast_math,
            exhaustive_tune=exhaustive_tune,
        )

    def _save(self, path: Path) -> None:
        self._binding.call(self._binding.module.save, self._program, os.fspath(path))

    def _run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        for tensor in self.parameters.values():
            if tensor.datatype in BIT_DATATYPES:
                raise MigraphxError(
                    f"input '{tensor.name}' is {tensor.datatype}, which MIGraphX's Python module does not take; its C "
                    "API does (binding: c_api)"
                )
        self._results = call_uncaptured(self._program.run, dict(inputs))
        return [_view(result) for result in self._results]

    def _drop_results(self) -> None:
        self._results = ()

    def _text(self) -> str:
        return str(self._program)

    def _target(self, name: str) -> Any:
        return self._binding.call(self._binding.module.get_target, name)


def call_uncaptured(function: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
    """Call a function like `ModuleBinding.call`, but without capturing standard error, so that output reaches the log
    even if the call kills the process."""
    try:
        return function(*arguments, **keywords)
    except (RuntimeError, MemoryError, ValueError, IndexError, TypeError) as error:
        # pybind11 turns C++ exceptions into these.
        raise MigraphxError(without_colours(str(error)) or type(error).__name__) from None


def _tensor(name: str, shape: Any) -> ProgramTensor:
    datatype = str(shape.type_string()).removesuffix("_type")
    if shape.dynamic():
        ranges = [(int(dimension.min), int(dimension.max)) for dimension in shape.dyn_dims()]
        sizes = tuple(least if least == most else DimensionRange(least, most) for least, most in ranges)
        return ProgramTensor(name, datatype, sizes)
    return ProgramTensor(name, datatype, _sizes(shape))


def _sizes(shape: Any) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in shape.lens())
    # MIGraphX's shape of a scalar is {1} with the stride 0.
    return () if sizes == (1,) and list(shape.strides()) == [0] else sizes


def _view(result: Any) -> Array:
    """Return an array on an output's memory, which may be an input's."""
    shape = result.get_shape()
    sizes = _sizes(shape)
    datatype = str(shape.type_string()).removesuffix("_type")
    dtype = NUMPY_DTYPES.get(datatype)
    if dtype is None:
        raise MigraphxError(f"an output has MIGraphX's type {datatype}, which arrays cannot hold")
    if datatype not in BIT_DATATYPES:
        view: Array = np.asarray(result)
        return view.reshape(sizes)
    memory = (ctypes.c_char * int(shape.bytes())).from_address(int(result.data_ptr()))
    return np.ndarray(sizes, dtype, memoryview(memory))


def open_binding(installation: MigraphxInstallation, wanted: str = "auto") -> Binding:
    """Load MIGraphX into this process, which `python_command` started. `auto` takes the C API if its library is
    installed (the C API releases the GIL and works with any Python), else the Python module; if the library cannot be
    loaded, the module is not tried. Raises MigraphxError if MIGraphX cannot be loaded, or is not installed."""
    missing = ""
    if wanted == "c_api" and not installation.library:
        missing = "MIGraphX's C library (libmigraphx_c.so.3) was not found"
    if wanted == "module" and not installation.module_folder:
        missing = "no Python module migraphx that fits this Python was found"
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if missing:
        raise MigraphxError(f"binding {wanted} is configured, but {missing}; remove 'binding' to use the other one")
    if wanted == "c_api" or (wanted == "auto" and installation.library):
        return CBinding(installation.library)
    return ModuleBinding(installation.module_folder)
