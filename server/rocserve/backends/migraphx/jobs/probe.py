"""Tries a compiled program, which it loads from its file and runs once; has MIGraphX print a program, and say what it
is itself; and what a program is made of: MIGraphX reads the file of a recipe, in its own batch size or another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rocserve.backends.migraphx.binding.interface import (
    NUMPY_DTYPES,
    Array,
    Binding,
    DimensionRange,
    MigraphxError,
    Program,
    ProgramTensor,
)
from rocserve.backends.migraphx.configuration.options import Target
from rocserve.backends.migraphx.planning.recipe import ProgramRecipe, SourceKind
from rocserve.core.errors import internal, invalid_argument
from rocserve.jobs.messages import Report


def own_recipe(recipe: ProgramRecipe, own_batch: int) -> ProgramRecipe:
    """Of the same model in the batch size that its file has baked in."""
    shapes = {name: (own_batch, *shape[1:]) for name, shape in recipe.input_shapes.items()}
    return replace(recipe, batch_size=own_batch, largest_batch=0, rebatched=False, input_shapes=shapes)


def parse_recipe(binding: Binding, recipe: ProgramRecipe) -> Program:
    """The program, neither quantised nor compiled. Raises: MigraphxError: MIGraphX refuses the file. ServeError: it
    reads something else than was planned."""
    source = Path(recipe.source.path)
    varying = (DimensionRange(1, recipe.largest_batch),) if recipe.largest_batch else ()
    shapes = {name: (*varying, *shape[len(varying) :]) for name, shape in recipe.input_shapes.items()}
    if recipe.source.kind is SourceKind.ONNX:
        program = binding.parse_onnx(source, shapes)
    else:
        program = binding.parse_tensorflow(source, recipe.input_shapes, recipe.batch_size or 1, recipe.output_names)
    for name, tensor in program.parameters.items():
        if name not in shapes:
            raise internal(f"MIGraphX finds an input '{name}' in {source.name}, expected {', '.join(shapes)}")
        if tensor.shape != shapes[name]:
            raise internal(
                f"MIGraphX finds input '{name}' of {source.name} to be of shape {list(tensor.shape)}, expected"
                f" {list(shapes[name])}"
            )
    return program


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
        """By name; dimensions that may vary are as large as they may be. `rows`: in place of the first dimension; 0 =
        as it is. Raises: ServeError: INVALID_ARGUMENT, arrays cannot hold an input's datatype."""
        made = {}
        for name, tensor in tensors.items():
            shape, datatype = largest_shape(tensor), tensor.datatype
            shape = (rows, *shape[1:]) if rows else shape
            dtype = NUMPY_DTYPES.get(datatype)
            if dtype is None:
                raise invalid_argument(f"an input is of MIGraphX's type {datatype}, which no request can bring")
            if datatype == "bf16":
                bits: Array = self._generator.random(shape, np.float32).view(np.uint32) >> 16
                made[name] = bits.astype(np.uint16)
            elif datatype in _HALF_TO_ONE:
                made[name] = self._generator.integers(*_HALF_TO_ONE[datatype], shape, np.uint8, endpoint=True)
            elif datatype in _FLOATS:
                made[name] = self._generator.random(shape).astype(dtype)
            else:
                made[name] = self._generator.integers(0, 2, shape).astype(dtype)
        return made


def largest_shape(tensor: ProgramTensor) -> tuple[int, ...]:
    """With the upper bound in place of a dimension that varies."""
    return tuple(dim.most if isinstance(dim, DimensionRange) else dim for dim in tensor.shape)


@dataclass(frozen=True, slots=True)
class ProbeJob:
    """Try a .mxr that rocserve has not compiled itself."""

    model_name: str
    path: str

    @property
    def title(self) -> str:
        return f"trying {Path(self.path).name} of model '{self.model_name}'"

    def perform(self, binding: Binding, report: Report) -> InspectResult:
        """Raises: MigraphxError: MIGraphX refuses the file, or to run it. ServeError: it cannot be served."""
        name = Path(self.path).name
        report("loading it")
        program = binding.load(Path(self.path))
        if not program.outputs:
            raise invalid_argument(f"{name} has no outputs")
        report("running it")
        program.run(Samples().inputs(program.parameters))
        return InspectResult(tuple(program.parameters.values()), program.outputs)


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


@dataclass(frozen=True, slots=True)
class InspectResult:
    parameters: tuple[ProgramTensor, ...]
    """By name."""
    outputs: tuple[ProgramTensor, ...]
    text: str = ""
    """MIGraphX's print."""


@dataclass(frozen=True, slots=True)
class InspectJob:
    """Of the two, one is given."""

    name: str
    """The model or file, for people."""
    recipe: ProgramRecipe | None = None
    """A model to be read, and not compiled."""
    program_file: str = ""
    """A .mxr to be loaded."""

    @property
    def title(self) -> str:
        return f"inspecting {self.name}"

    def perform(self, binding: Binding, report: Report) -> InspectResult:
        """Raises: MigraphxError: MIGraphX cannot read it."""
        report("reading the compiled program" if self.recipe is None else "reading the model")
        program = parse_recipe(binding, self.recipe) if self.recipe else binding.load(Path(self.program_file))
        return InspectResult(tuple(program.parameters.values()), program.outputs, program.text())


@dataclass(frozen=True, slots=True)
class LibraryResult:
    version: str
    """E.g. "2.14.0"; "" where it is not known."""
    binding: str
    """c_api or module."""
    library: str
    """The file."""
    targets: Mapping[str, str]
    """Why a target cannot be used, in MIGraphX's words; "" where its library can be loaded."""


@dataclass(frozen=True, slots=True)
class LibraryJob:
    """Load MIGraphX and ask it what only a process that has loaded it knows."""

    title = "loading MIGraphX"

    def perform(self, binding: Binding, report: Report) -> LibraryResult:
        report("trying its targets")
        targets = dict.fromkeys((target.value for target in Target), "")
        for target in targets:
            try:
                binding.check_target(target)
            except MigraphxError as error:
                targets[target] = str(error)
        return LibraryResult(binding.migraphx_version, binding.name, binding.library, targets)
