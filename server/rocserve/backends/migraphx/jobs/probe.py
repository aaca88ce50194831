"""Tries a compiled program: loads it from its file and runs it once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rocserve.backends.migraphx.binding.interface import (
    NUMPY_DTYPES,
    Array,
    Binding,
    DimensionRange,
    Program,
    ProgramTensor,
)
from rocserve.core.errors import internal, invalid_argument
from rocserve.jobs.messages import Report

_FLOATS = ("half", "float", "double")
_HALF_TO_ONE: Mapping[str, tuple[int, int]] = {
    "fp8e4m3fn": (0x30, 0x38),
    "fp8e4m3fnuz": (0x38, 0x40),
    "fp8e5m2": (0x38, 0x3C),
    "fp8e5m2fnuz": (0x3C, 0x40),
}
"""The bits of 0.5 and 1: those between are numbers between."""


class Samples:
    """Makes inputs to try a program with, other ones each time; with one seed the same in each process.

    Of such values as graphs take: floats between 0 and 1 (logarithms and roots exist, images are like this), integers
    0 or 1 (they may be indices, masks or counts).
    """

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


@dataclass(frozen=True, slots=True)
class ProbeResult:
    inputs: tuple[ProgramTensor, ...]
    """By name."""
    outputs: tuple[ProgramTensor, ...]


@dataclass(frozen=True, slots=True)
class ProbeJob:
    """Try a .mxr that rocserve has not compiled itself."""

    model_name: str
    path: str

    @property
    def title(self) -> str:
        return f"trying {Path(self.path).name} of model '{self.model_name}'"

    def perform(self, binding: Binding, report: Report) -> ProbeResult:
        """Raises: MigraphxError: MIGraphX refuses the file, or to run it. ServeError: it cannot be served."""
        name = Path(self.path).name
        report("loading it")
        program = binding.load(Path(self.path))
        if program.extra_parameters:
            raise invalid_argument(
                f"{name} was compiled with offload_copy off (it has the parameters"
                f" {', '.join(program.extra_parameters)}): it wants its inputs and outputs in the GPU's memory, where"
                " requests' tensors are not; compile it with offload_copy on (`rocserve compile`; `migraphx-driver"
                " compile --enable-offload-copy`)"
            )
        if not program.outputs:
            raise invalid_argument(f"{name} has no outputs")
        report("running it")
        program.run(Samples().inputs(program.parameters))
        return ProbeResult(tuple(program.parameters.values()), program.outputs)


def try_saved(binding: Binding, program: Program, path: Path) -> None:
    """Load a saved program; it must give the results of the program itself, bit for bit. Raises: MigraphxError: it
    cannot be loaded or run. ServeError: INTERNAL, it is another program."""
    inputs = Samples().inputs(program.parameters)
    expected = program.run(inputs)
    loaded = binding.load(path)
    if dict(loaded.parameters) != dict(program.parameters) or list(loaded.outputs) != list(program.outputs):
        raise internal(
            f"the program that was saved has other inputs or outputs when it is loaded: {_described(loaded)} instead"
            f" of {_described(program)}"
        )
    if _same(loaded.run(inputs), expected):
        return
    # Some of a GPU's kernels add up in any order. Whose results differ by themselves cannot be compared by their bits.
    if _same(program.run(inputs), expected):
        raise internal("the program that was saved gives other results when it is loaded")


def _same(some: Sequence[Array], others: Sequence[Array]) -> bool:
    return [values.tobytes() for values in some] == [values.tobytes() for values in others]


def _described(program: Program) -> str:
    tensors = [*program.parameters.values(), *program.outputs]
    return ", ".join(f"{tensor.name or 'output'} {tensor.datatype} {list(tensor.shape)}" for tensor in tensors)
