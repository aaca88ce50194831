"""Declares the calls of MIGraphX that rocserve needs. Two bindings implement them, and one test suite runs over both.

Calls that would end the process or give wrong numbers (a second compile, an empty program, int8 without calibration,
inputs of another shape) are refused here, before a binding calls MIGraphX.
"""

from __future__ import annotations

import abc
import collections
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from rocserve.backends.migraphx.gpu_memory import GpuBuffers, GpuMemoryError, loaded_hip
from rocserve.core.printable import without_colours

Array = np.ndarray[Any, Any]

NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "bool": np.bool_,
        "half": np.float16,
        "float": np.float32,
        "double": np.float64,
        "uint8": np.uint8,
        "int8": np.int8,
        "uint16": np.uint16,
        "int16": np.int16,
        "int32": np.int32,
        "int64": np.int64,
        "uint32": np.uint32,
        "uint64": np.uint64,
        # numpy has no such types: arrays hold the values' bits.
        "fp8e4m3fnuz": np.uint8,
        "fp8e4m3fn": np.uint8,
        "fp8e5m2": np.uint8,
        "bf16": np.uint16,
        "fp8e5m2fnuz": np.uint8,
    }.items()
}
"""The numpy types of MIGraphX's datatypes, in the order of MIGraphX's numbers from bool on. Keys are the names that
MIGraphX prints, without "_type". Tuples and four-bit numbers are missing because arrays cannot hold them."""
BIT_DATATYPES = frozenset({"fp8e4m3fnuz", "fp8e4m3fn", "fp8e5m2", "bf16", "fp8e5m2fnuz"})

_OUTPUT_BUFFER = "#output_"
"""Part of the names of output buffers: the parameters into which a program without offload_copy writes its outputs."""


class MigraphxError(Exception):
    """MIGraphX refused a call, or would have crashed. The text is MIGraphX's own if it has one."""


class ModelRefused(MigraphxError):
    """MIGraphX cannot parse a model's file: it always refuses the same file."""


@dataclass(frozen=True, slots=True)
class DimensionRange:
    """The bounds of a dimension that may vary from run to run, both included."""

    least: int
    most: int


ANY = (1 << 64) - 1
"""The upper bound of an unbounded dimension."""

Dimension = int | DimensionRange


@dataclass(frozen=True, slots=True)
class ProgramTensor:
    name: str
    """"" for outputs, because a program does not know the names of its outputs."""
    datatype: str
    """MIGraphX's name without "_type": float, half, double, bool, int8 ... uint64, bf16, fp8e4m3fn, ..."""
    shape: tuple[Dimension, ...]


Shapes = Mapping[str, tuple[Dimension, ...]]
"""Input's name -> shape, with the batch. A shape for an input that the graph lacks is an error."""


class Program(abc.ABC):
    """A MIGraphX program. Calls on several threads wait for each other. Every method may raise MigraphxError."""

    def __init__(self, compiled: bool) -> None:
        """Subclasses call `__init__` last because it reads the program through their methods."""
        self.is_compiled = compiled
        self._lock = threading.Lock()
        self._gpu_buffers: GpuBuffers | None = None
        self._read_tensors()

    def _read_tensors(self) -> None:
        """Read the parameters and the outputs, which compiling changes."""
        tensors: Mapping[str, ProgramTensor] = {tensor.name: tensor for tensor in self._read_parameters()}
        self.parameters = {name: tensor for name, tensor in tensors.items() if _OUTPUT_BUFFER not in name}
        self.output_buffers = {name: tensor for name, tensor in tensors.items() if _OUTPUT_BUFFER in name}
        """Empty unless the program was compiled without offload_copy. Names are like "main:#output_0"."""
        self.outputs = tuple(self._read_outputs())

    def quantize(self, kind: str, target: str = "", calibration: Sequence[Mapping[str, Array]] = ()) -> None:
        """Quantise to `kind`: fp16, bf16, int8 or fp8; int8 and fp8 need a target and calibration (inputs of runs)."""
        with self._lock:
            self._require_uncompiled("quantised")
            # MIGraphX gives wrong numbers without samples or with a wrong name, and aborts on a wrong shape.
            if kind in ("int8", "fp8") and not calibration:
                raise MigraphxError(f"{kind} needs calibration data: give it at least one sample of the model's inputs")
            for number, sample in enumerate(calibration):
                try:
                    _check_inputs(sample, self.parameters)
                except MigraphxError as error:
                    raise MigraphxError(f"calibration sample {number}: {error}") from None
            self._quantize(kind, target, calibration)

    def compile(self, target: str, *, fast_math: bool = True, exhaustive_tune: bool = False) -> None:
        """Compile for gpu, cpu or ref. Inputs and outputs lie in host memory; MIGraphX copies."""
        with self._lock:
            self._require_uncompiled("compiled again")
            self._compile(target, fast_math, exhaustive_tune)
            self.is_compiled = True
            self._read_tensors()

    def save(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise MigraphxError(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}")
        with self._lock:
            self._save(path)

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Run the program. Inputs are C-contiguous and have the exact shape and datatype (bf16 as uint16 and fp8 as
        uint8: their bits). The outputs are copies, never views on MIGraphX's memory or on the inputs."""
        with self._lock:
            self._require_ready(inputs)
            try:
                return [view.copy() for view in self._results_of(inputs)]
            finally:
                self._drop_results()

    def run_into(self, inputs: Mapping[str, Array], outputs: Sequence[Array | None]) -> None:
        """Run the program into C-contiguous arrays of the outputs' shapes and datatypes. An array with fewer rows
        (first dimension) than its output gets the output's first rows. None discards the output."""
        with self._lock:
            self._require_ready(inputs)
            if len(outputs) != len(self.outputs):
                raise MigraphxError(
                    f"the program has {len(self.outputs)} outputs, but {len(outputs)} arrays are given for them"
                )
            for number, (array, output) in enumerate(zip(outputs, self.outputs, strict=True)):
                if array is None:
                    continue
                # Only the fixed dimensions are checked if an output's shape varies.
                shape = output.shape
                if isinstance(array, np.ndarray) and array.ndim and shape and len(array) < bounds(shape[0])[1]:
                    shape = (len(array), *shape[1:])
                _check_array("the array for output {}", number, array, output.datatype, shape)
                if not array.flags.writeable:
                    raise MigraphxError(f"the array for output {number} cannot be written")
            try:
                for number, (array, view) in enumerate(zip(outputs, self._results_of(inputs), strict=True)):
                    if array is None:
                        continue
                    if array.shape != view.shape and array.shape[1:] == view.shape[1:] and array.ndim:
                        view = view[: len(array)]
                    if array.shape != view.shape:
                        raise MigraphxError(
                            f"output {number} has the shape {shape_text(view.shape)}, but the array given for it "
                            f"{shape_text(array.shape)}"
                        )
                    np.copyto(array, view)
            finally:
                self._drop_results()

    def text(self) -> str:
        """Return the program as MIGraphX prints it: one instruction per line; if compiled, with its fused kernels."""
        with self._lock:
            return self._text()

    def _require_uncompiled(self, what: str) -> None:
        if self.is_compiled:
            raise MigraphxError(f"the program is compiled already: it cannot be {what}; parse the model again")
        if not self.outputs:
            raise MigraphxError("the program is empty: the model has no outputs")

    def _require_ready(self, inputs: Mapping[str, Array]) -> None:
        if not self.is_compiled:
            raise MigraphxError("the program must be compiled before it runs")
        _check_inputs(inputs, self.parameters)

    def _results_of(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Run the program and return views of its outputs, valid until `_drop_results`."""
        if not self.output_buffers:
            return self._run(inputs)
        try:
            if self._gpu_buffers is None:
                self._gpu_buffers = self._new_gpu_buffers()
            self._gpu_buffers.fill(inputs)
            results = self._run(self._gpu_buffers.arrays)
            self._gpu_buffers.wait()
            return [self._gpu_buffers.copied_to_host(result) for result in results]
        except GpuMemoryError as error:
            raise MigraphxError(str(error)) from None

    def _new_gpu_buffers(self) -> GpuBuffers:
        hip = loaded_hip()
        if hip is None:
            raise MigraphxError(
                "the program was compiled with offload_copy off: it expects inputs and outputs in GPU memory, but no"
                " HIP library is loaded; compile it with offload_copy on"
            )
        shapes = {}
        for name, tensor in {**self.parameters, **self.output_buffers}.items():
            shape = tuple(size for size in tensor.shape if isinstance(size, int))
            dtype = NUMPY_DTYPES.get(tensor.datatype)
            if dtype is None or len(shape) < len(tensor.shape):
                raise MigraphxError(
                    f"the program was compiled with offload_copy off, and its parameter '{name}', {tensor.datatype}"
                    f" {shape_text(tensor.shape)}, has no fixed size on the GPU; compile it with offload_copy on"
                )
            shapes[name] = (shape, dtype)
        return GpuBuffers(hip, shapes)

    @abc.abstractmethod
    def _read_parameters(self) -> Sequence[ProgramTensor]:
        """Return all parameters, sorted by name, output buffers included."""

    @abc.abstractmethod
    def _read_outputs(self) -> Sequence[ProgramTensor]: ...

    @abc.abstractmethod
    def _quantize(self, kind: str, target: str, calibration: Sequence[Mapping[str, Array]]) -> None: ...

    @abc.abstractmethod
    def _compile(self, target: str, fast_math: bool, exhaustive_tune: bool) -> None: ...

    @abc.abstractmethod
    def _save(self, path: Path) -> None: ...

    @abc.abstractmethod
    def _run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Run the program and return views of its outputs on MIGraphX's memory or on an input's, valid until
        `_drop_results`. If the program has output buffers, arrays and views only hold addresses on the GPU."""

    @abc.abstractmethod
    def _drop_results(self) -> None: ...

    @abc.abstractmethod
    def _text(self) -> str: ...


@contextmanager
def _parsing() -> Iterator[None]:
    """Raise ModelRefused in place of MIGraphX's errors."""
    try:
        yield
    except MigraphxError as error:
        raise ModelRefused(str(error)) from error


class Binding(abc.ABC):
    """Parses and loads programs through the C API or the Python module. Every method may raise MigraphxError."""

    name: ClassVar[str]
    """c_api or module."""
    library: str
    """Path of the loaded file."""
    migraphx_version: str
    """The library's version, e.g. "2.14.0"; "" = unknown."""

    def __init__(self) -> None:
        # Lines that wait for `take_messages`.
        self._messages: collections.deque[str] = collections.deque(maxlen=1000)

    def parse_onnx(self, path: Path, shapes: Shapes = MappingProxyType({})) -> Program:
        """Parse an ONNX file. Symbolic dimensions that `shapes` does not set are 1."""
        _check_shapes(shapes)
        with _parsing():
            return _with_inputs(self._parse_onnx(path, shapes), shapes)

    def parse_tensorflow(
        self,
        path: Path,
        shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
        batch_size: int = 1,
        output_names: Sequence[str] = (),
    ) -> Program:
        """Parse a graph whose images are NHWC, TensorFlow's default. The graph's 4-d inputs are NCHW in the program and
        in `shapes`, which replace the graph's own shapes. `output_names`: empty = the graph's last node."""
        if batch_size < 1:
            raise MigraphxError(f"dimensions without a shape must be 1 or more, not {batch_size}")
        _check_shapes(shapes)
        with _parsing():
            return _with_inputs(self._parse_tensorflow(path, shapes, batch_size, output_names), shapes)

    @abc.abstractmethod
    def load(self, path: Path) -> Program:
        """Load a compiled program from a .mxr file, which the caller has checked with `mxr_file.py`."""

    def take_messages(self) -> Sequence[str]:
        """Return MIGraphX's output other than errors (warnings, progress) since the last call, line by line."""
        taken = []
        while self._messages:
            taken.append(self._messages.popleft())
        return taken

    def add_message(self, text: str) -> None:
        """Keep MIGraphX's output. May be called on any thread."""
        self._messages.extend(line for line in without_colours(text).splitlines() if line.strip())

    @abc.abstractmethod
    def check_target(self, target: str) -> None:
        """Raises MigraphxError if the target's library cannot be loaded."""

    @abc.abstractmethod
    def _parse_onnx(self, path: Path, shapes: Shapes) -> Program: ...

    @abc.abstractmethod
    def _parse_tensorflow(
        self, path: Path, shapes: Mapping[str, tuple[int, ...]], batch_size: int, output_names: Sequence[str]
    ) -> Program: ...


def _check_shapes(shapes: Shapes) -> None:
    for name, shape in shapes.items():
        # A dimension of 0 aborts the process in a run.
        if not all(1 <= least <= most for least, most in map(bounds, shape)):
            raise MigraphxError(
                f"input '{name}' cannot have the shape {shape_text(shape)}: dimensions are 1 or more, "
                "the most not below the least"
            )


def _with_inputs(program: Program, shapes: Shapes) -> Program:
    """Check that the program has these inputs, because MIGraphX silently ignores shapes for unknown inputs."""
    for name in shapes:
        if name not in program.parameters:
            inputs = names_text(program.parameters)
            raise MigraphxError(f"a shape is given for input '{name}', but the model's inputs are {inputs}")
    return program


def _check_inputs(inputs: Mapping[str, Array], parameters: Mapping[str, ProgramTensor]) -> None:
    if inputs.keys() != parameters.keys():
        known = f"the program's inputs are {names_text(parameters)}"
        for name in inputs:
            if name not in parameters:
                raise MigraphxError(f"unexpected input '{name}': {known}")
        missing = next(name for name in parameters if inputs.get(name) is None)
        raise MigraphxError(f"input '{missing}' is missing: {known}")
    for name, parameter in parameters.items():
        _check_array("input '{}'", name, inputs[name], parameter.datatype, parameter.shape)


def _check_array(title: str, name: object, array: Array, datatype: str, shape: Sequence[Dimension]) -> None:
    """`title`: the array's description in errors, with a placeholder for its name."""
    dtype = NUMPY_DTYPES.get(datatype)
    if (
        isinstance(array, np.ndarray)
        and array.dtype == dtype
        and (array.shape == shape or _fits(array.shape, shape))
        and array.flags.c_contiguous
    ):
        return
    what = title.format(name)
    if not isinstance(array, np.ndarray):
        raise MigraphxError(f"{what} must be a numpy array, not {type(array).__name__}")
    if dtype is None:
        raise MigraphxError(f"{what} has MIGraphX's type {datatype}, which arrays cannot hold")
    if array.dtype != dtype:
        bits = f", the bits of {datatype}" if datatype in BIT_DATATYPES else ""
        raise MigraphxError(f"{what} must be of dtype {dtype.name}{bits}; it is of {array.dtype}")
    if not _fits(array.shape, shape):
        raise MigraphxError(f"{what} must have the shape {shape_text(shape)}; it has {shape_text(array.shape)}")
    raise MigraphxError(f"{what} must be C-contiguous (numpy.ascontiguousarray makes it so)")


def _fits(shape: Sequence[int], wanted: Sequence[Dimension]) -> bool:
    if len(shape) != len(wanted):
        return False
    return all(least <= size <= most for size, (least, most) in zip(shape, map(bounds, wanted), strict=True))


def bounds(dimension: Dimension) -> tuple[int, int]:
    return (dimension, dimension) if isinstance(dimension, int) else (dimension.least, dimension.most)


def shape_text(shape: Sequence[Dimension]) -> str:
    return "[" + ", ".join(str(d) if isinstance(d, int) else f"{d.least}..{d.most}" for d in shape) + "]"


def names_text(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


_MAPS = Path("/proc/self/maps")
_MAJOR, _MINOR = 1_000_000, 1_000
"""libmigraphx.so.2014000 has the version 2.14.0."""


def loaded_version() -> str:
    """Return the version of the mapped libmigraphx.so.*, e.g. "2.14.0"; "" = none, or a file name without a version."""
    match = re.search(r"/libmigraphx\.so\.(\d+)", _MAPS.read_text(errors="surrogateescape"))
    number = int(match[1]) if match else 0
    return f"{number // _MAJOR}.{number % _MAJOR // _MINOR}.{number % _MINOR}" if number >= _MAJOR else ""
