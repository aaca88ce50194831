"""What rocserve needs of MIGraphX. Two classes implement it; one suite of tests runs over both.

An implementation prevents what would end the process or give wrong numbers (a second compile, an empty program, int8
without calibration, arrays that are gone, inputs of another shape) before it calls MIGraphX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


class MigraphxError(Exception):
    """MIGraphX refused, or was kept from what it does not survive; the text is MIGraphX's own where it has one."""


@dataclass(frozen=True, slots=True)
class DimensionRange:
    """A dimension that may vary from run to run, bounds included."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class ProgramTensor:
    """A parameter or an output of a program."""

    name: str
    """"" for outputs: a program does not know their names."""
    datatype: str
    """MIGraphX's name without "_type": float, half, double, bool, int8 ... uint64, bf16, fp8e4m3fn, ..."""
    shape: tuple[int | DimensionRange, ...]


@dataclass(frozen=True, slots=True)
class OnnxOptions:
    input_shapes: Mapping[str, tuple[int | DimensionRange, ...]] = field(default_factory=dict)
    """By input; an input that the graph lacks is an error."""
    default_dimension: int = 1
    """What symbolic dimensions without a shape above become."""


@dataclass(frozen=True, slots=True)
class TensorflowOptions:
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """As the program takes them (NCHW where the graph is NHWC), batch included; taken instead of the graph's own."""
    batch_size: int = 1
    nhwc: bool = True
    """The graph is NHWC (TensorFlow's default). Its 4-d inputs then are NCHW to the program."""
    output_names: tuple[str, ...] = ()
    """Empty: the graph's last node."""


@dataclass(frozen=True, slots=True)
class CompileFlags:
    """What MIGraphX's compile takes."""

    offload_copy: bool = True
    """Inputs and outputs are in host memory; MIGraphX copies."""
    fast_math: bool = True
    exhaustive_tune: bool = False


class Program(Protocol):
    """A MIGraphX program. One call at a time. Every method may raise MigraphxError."""

    @property
    def is_compiled(self) -> bool: ...

    @property
    def parameters(self) -> Mapping[str, ProgramTensor]:
        """The inputs, without what a program compiled with offload_copy=False has beside them: `extra_parameters`."""

    @property
    def outputs(self) -> Sequence[ProgramTensor]: ...

    @property
    def extra_parameters(self) -> Sequence[str]:
        """Parameters that are buffers for outputs ("main:#output_0"): the program was compiled without offload_copy."""

    def quantize_fp16(self) -> None: ...

    def quantize_bf16(self) -> None: ...

    def quantize_int8(self, target: str, calibration: Sequence[Mapping[str, Array]]) -> None:
        """`calibration`: one mapping a run, of all inputs in their exact shapes; at least one."""

    def quantize_fp8(self, target: str, calibration: Sequence[Mapping[str, Array]]) -> None:
        """As `quantize_int8`."""

    def compile(self, target: str, flags: CompileFlags) -> None:
        """`target`: gpu, cpu or ref."""

    def save(self, path: Path) -> None: ...

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Inputs C-contiguous in the exact shape and datatype (bf16 as uint16, the fp8s as uint8: their bits).

        The outputs are the caller's own: copied, never views on MIGraphX's memory or on the inputs.
        """

    def run_into(self, inputs: Mapping[str, Array], outputs: Sequence[Array | None]) -> None:
        """The same, into C-contiguous arrays of the caller's, which must have the outputs' shapes and datatypes.

        An array with fewer rows (of the first dimension) than its output gets the first of them; one that is None gets
        nothing.
        """

    def text(self) -> str:
        """The program as MIGraphX prints it: an instruction a line; compiled, with its fused kernels."""


class Binding(Protocol):
    """One way to MIGraphX. Made by `binding/choice.py`. Every method may raise MigraphxError."""

    @property
    def name(self) -> str:
        """c_api or module."""

    @property
    def migraphx_version(self) -> str:
        """E.g. "2.14.0", of the library itself; "" where it cannot be told."""

    @property
    def library(self) -> str:
        """The file that it is loaded from."""

    @property
    def releases_gil(self) -> bool: ...

    def check_target(self, target: str) -> None:
        """Raises: MigraphxError: the target's library cannot be loaded."""

    def parse_onnx(self, path: Path, options: OnnxOptions) -> Program: ...

    def parse_tensorflow(self, path: Path, options: TensorflowOptions) -> Program: ...

    def load(self, path: Path) -> Program:
        """A program from a .mxr file."""

    def take_messages(self) -> Sequence[str]:
        """What MIGraphX has written meanwhile that was no error (warnings, progress), line by line."""
