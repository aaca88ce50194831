"""The binding that rocserve uses: MIGraphX's calls with the guards that are the same whichever way leads there."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from rocserve.backends.migraphx.binding import checks
from rocserve.backends.migraphx.binding.datatypes import numpy_dtype
from rocserve.backends.migraphx.binding.interface import (
    Array,
    CompileFlags,
    DimensionRange,
    MigraphxError,
    OnnxOptions,
    Program,
    ProgramTensor,
    TensorflowOptions,
)

Result = TypeVar("Result")


class BareProgram(Protocol):
    """Every method may raise MigraphxError, and trusts its caller to have checked what it is given."""

    def parameters(self) -> Sequence[ProgramTensor]:
        """All of them, buffers for outputs too."""

    def outputs(self) -> Sequence[ProgramTensor]: ...

    def quantize_fp16(self) -> None: ...

    def quantize_bf16(self) -> None: ...

    def quantize_int8(self, target: str, calibration: Sequence[Mapping[str, Array]]) -> None: ...

    def quantize_fp8(self, target: str, calibration: Sequence[Mapping[str, Array]]) -> None: ...

    def compile(self, target: str, flags: CompileFlags) -> None: ...

    def save(self, path: Path) -> None: ...

    def run(self, inputs: Mapping[str, Array], use: Callable[[Sequence[Array]], Result]) -> Result:
        """Runs a compiled program and gives what `use` makes of its outputs.

        `use` is given views on MIGraphX's own memory, which may be an input's too; they are good during its call only.
        """

    def text(self) -> str: ...


class BareBinding(Protocol):
    """As `interface.Binding`, but with bare programs."""

    @property
    def name(self) -> str: ...

    @property
    def migraphx_version(self) -> str: ...

    @property
    def library(self) -> str: ...

    @property
    def releases_gil(self) -> bool: ...

    def check_target(self, target: str) -> None: ...

    def parse_onnx(self, path: Path, options: OnnxOptions) -> BareProgram: ...

    def parse_tensorflow(self, path: Path, options: TensorflowOptions) -> BareProgram: ...

    def load(self, path: Path) -> BareProgram: ...

    def take_messages(self) -> Sequence[str]: ...


_OUTPUT_BUFFER = "#output_"
"""Is in the names of the parameters that a program compiled without offload_copy has for its outputs."""


class GuardedBinding:
    """`interface.Binding` on a bare one."""

    def __init__(self, bare: BareBinding) -> None:
        self._bare = bare

    @property
    def name(self) -> str:
        return self._bare.name

    @property
    def migraphx_version(self) -> str:
        return self._bare.migraphx_version

    @property
    def library(self) -> str:
        return self._bare.library

    @property
    def releases_gil(self) -> bool:
        return self._bare.releases_gil

    def check_target(self, target: str) -> None:
        self._bare.check_target(target)

    def parse_onnx(self, path: Path, options: OnnxOptions) -> Program:
        checks.check_file(path)
        checks.check_shapes(options.input_shapes)
        if options.default_dimension < 1:
            raise MigraphxError(f"dimensions without a shape must be 1 or more, not {options.default_dimension}")
        return self._parsed(self._bare.parse_onnx(path, options), options.input_shapes)

    def parse_tensorflow(self, path: Path, options: TensorflowOptions) -> Program:
        checks.check_file(path)
        checks.check_shapes(options.input_shapes)
        if options.batch_size < 1:
            raise MigraphxError(f"the batch size must be 1 or more, not {options.batch_size}")
        return self._parsed(self._bare.parse_tensorflow(path, options), options.input_shapes)

    def load(self, path: Path) -> Program:
        checks.check_file(path)
        compiled = is_compiled(path)
        return GuardedProgram(self._bare.load(path), compiled=compiled)

    def take_messages(self) -> Sequence[str]:
        return self._bare.take_messages()

    def _parsed(self, program: BareProgram, shapes: Mapping[str, object]) -> Program:
        checks.check_names(shapes, program.parameters())
        return GuardedProgram(program, compiled=False)


class GuardedProgram:
    """`interface.Program` on a bare one. Calls on several threads wait for each other."""

    def __init__(self, bare: BareProgram, *, compiled: bool) -> None:
        self._bare = bare
        self._compiled = compiled
        self._lock = threading.Lock()
        self._read_tensors()

    def _read_tensors(self) -> None:
        """Reads what the program takes and gives; compiling changes it."""
        tensors = self._bare.parameters()
        self._inputs = [tensor for tensor in tensors if _OUTPUT_BUFFER not in tensor.name]
        self._extra = tuple(tensor.name for tensor in tensors if _OUTPUT_BUFFER in tensor.name)
        self._outputs = tuple(self._bare.outputs())
        self._parameters = {tensor.name: tensor for tensor in self._inputs}
        self._quick = [(tensor.name, numpy_dtype(tensor.datatype), tensor.shape) for tensor in self._inputs]
        self._quick_outputs = [(numpy_dtype(tensor.datatype), tensor.shape) for tensor in self._outputs]

    @property
    def is_compiled(self) -> bool:
        return self._compiled

    @property
    def parameters(self) -> Mapping[str, ProgramTensor]:
        return self._parameters

    @property
    def outputs(self) -> Sequence[ProgramTensor]:
        return self._outputs

    @property
    def extra_parameters(self) -> Sequence[str]:
        return self._extra

    def quantize_fp16(self) -> None:
        with self._lock:
            self._require_uncompiled("quantised any more")
            self._bare.quantize_fp16()

    def quantize_bf16(self) -> None:
        with self._lock:
            self._require_uncompiled("quantised any more")
            self._bare.quantize_bf16()

    def quantize_int8(self, target: str, calibration: Sequence[Mapping[str, Array]]) -> None:
        with self._lock:
            self._require_uncompiled("quantised any more")
            checks.check_calibration("int8", calibration, self._inputs)
            self._bare.quantize_int8(target, calibration)

    def quantize_fp8(self, target: str, calibration: Sequence[Mapping[str, Array]]) -> None:
        with self._lock:
            self._require_uncompiled("quantised any more")
            checks.check_calibration("fp8", calibration, self._inputs)
            self._bare.quantize_fp8(target, calibration)

    def compile(self, target: str, flags: CompileFlags) -> None:
        with self._lock:
            self._require_uncompiled("compiled again")
            self._bare.compile(target, flags)
            self._compiled = True
            self._read_tensors()

    def save(self, path: Path) -> None:
        checks.check_folder_of(path)
        with self._lock:
            self._bare.save(path)

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        with self._lock:
            self._require_ready(inputs)
            return self._bare.run(inputs, _copies)

    def run_into(self, inputs: Mapping[str, Array], outputs: Sequence[Array | None]) -> None:
        with self._lock:
            self._require_ready(inputs)
            if not self._fit_quickly(outputs):
                checks.check_outputs(outputs, self._outputs)
            self._bare.run(inputs, functools.partial(_copy_into, outputs))

    def text(self) -> str:
        with self._lock:
            return self._bare.text()

    def _require_uncompiled(self, what: str) -> None:
        if self._compiled:
            raise MigraphxError(f"the program is compiled already: it cannot be {what}; parse the model anew")
        if not self._outputs:
            raise MigraphxError("the program is empty: the model has no outputs")

    def _require_ready(self, inputs: Mapping[str, Array]) -> None:
        if not self._compiled:
            raise MigraphxError("the program must be compiled before it runs")
        if self._extra:
            raise MigraphxError(
                "the program was compiled with offload_copy off: it wants its inputs and outputs in the GPU's memory, "
                "which rocserve does not give it; compile it with offload_copy on"
            )
        if not self._are_quickly_right(inputs):
            checks.check_inputs(inputs, self._inputs)

    def _are_quickly_right(self, inputs: Mapping[str, Array]) -> bool:
        """Of fixed shapes all that `check_inputs` looks at, in a microsecond; False is no verdict."""
        if len(inputs) != len(self._quick):
            return False
        for name, dtype, shape in self._quick:
            array: np.ndarray[Any, Any] | None = inputs.get(name)
            if type(array) is not np.ndarray or array.dtype != dtype or array.shape != shape:
                return False
            if not array.flags.c_contiguous:
                return False
        return True

    def _fit_quickly(self, outputs: Sequence[Array | None]) -> bool:
        """The same for `check_outputs`, where the outputs have fixed shapes."""
        if len(outputs) != len(self._quick_outputs):
            return False
        for array, (dtype, shape) in zip(outputs, self._quick_outputs, strict=True):
            if array is None:
                continue
            if type(array) is not np.ndarray or array.dtype != dtype:
                return False
            if array.shape != shape and not _has_fewer_rows(array.shape, shape):
                return False
            flags = array.flags
            if not flags.c_contiguous or not flags.writeable:
                return False
        return True


def _has_fewer_rows(shape: Sequence[int], full: Sequence[int | DimensionRange]) -> bool:
    if not shape or not full or shape[1:] != full[1:]:
        return False
    rows = full[0]
    return isinstance(rows, int) and shape[0] < rows


def _copies(views: Sequence[Array]) -> Sequence[Array]:
    return [view.copy() for view in views]


def _copy_into(arrays: Sequence[Array | None], views: Sequence[Array]) -> None:
    for number, (array, view) in enumerate(zip(arrays, views, strict=True)):
        if array is None:
            continue
        if _has_fewer_rows(array.shape, view.shape):
            view = view[: len(array)]
        if array.shape != view.shape:
            raise MigraphxError(
                f"output {number} has the shape {checks.shape_text(view.shape)}, but the array given for it "
                f"{checks.shape_text(array.shape)}"
            )
        np.copyto(array, view)


_HEAD = 1 << 20
"""Bytes. The file begins with its version and targets; the contexts of the targets come before the program."""
_KEY = b"\xa8contexts"
"""As msgpack writes the key (8 letters)."""
_EMPTY_ARRAY = 0x90


def is_compiled(path: Path) -> bool:
    """Whether the program has contexts, which compiling gives it. True where the file does not tell.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD)
    found = head.find(_KEY)
    after = found + len(_KEY)
    return found < 0 or after >= len(head) or head[after] != _EMPTY_ARRAY
