"""Tries compiled programs, and inspects models and programs.

A trial loads a program from its file and runs it once. An inspection returns the text that MIGraphX prints of a program
or of a recipe's model, at the file's own batch size or another. A library job returns MIGraphX's version and targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rocserve.backends.migraphx.binding import (
    NUMPY_DTYPES,
    Array,
    Binding,
    DimensionRange,
    MigraphxError,
    Program,
    ProgramTensor,
)
from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe, SourceKind
from rocserve.backends.migraphx.options import Target
from rocserve.core.errors import internal, invalid_argument
from rocserve.jobs.messages import Report


def original_size_recipe(recipe: ProgramRecipe, own_batch: int) -> ProgramRecipe:
    """Return the recipe of the same model at the batch size that its file fixes."""
    shapes = {name: (own_batch, *shape[1:]) for name, shape in recipe.input_shapes.items()}
    return replace(recipe, batch_size=own_batch, rebatched=False, input_shapes=shapes)


def parse_recipe(binding: Binding, recipe: ProgramRecipe) -> Program:
    """Return the program, neither quantised nor compiled. Raises MigraphxError if MIGraphX refuses the file, ServeError
    if the inputs differ from the plan."""
    source = Path(recipe.source.path)
    shapes = recipe.input_shapes
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


class Samples:
    """Makes random inputs that try a program: each call makes other inputs, and the same seed makes the same series in
    every process. Graphs accept the values: floats lie between 0 and 1 (logarithms and roots exist, and images look
    like this), integers are 0 or 1 (they may be indices, masks or counts)."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)

    def inputs(self, tensors: Mapping[str, ProgramTensor], rows: int = 0) -> dict[str, Array]:
        """Make an input per tensor. A varying dimension gets its upper bound. `rows` replaces the first dimension; 0 =
        unchanged. Raises ServeError (INVALID_ARGUMENT) if no array can hold an input's datatype."""
        made = {}
        # The bits of 0.5 and 1; all bit patterns between are numbers between.
        half_to_one = {
            "fp8e4m3fn": (0x30, 0x38),
            "fp8e4m3fnuz": (0x38, 0x40),
            "fp8e5m2": (0x38, 0x3C),
            "fp8e5m2fnuz": (0x3C, 0x40),
        }
        for name, tensor in tensors.items():
            shape, datatype = largest_shape(tensor), tensor.datatype
            shape = (rows, *shape[1:]) if rows else shape
            dtype = NUMPY_DTYPES.get(datatype)
            if dtype is None:
                raise invalid_argument(f"an input has MIGraphX's type {datatype}, which requests cannot carry")
            if datatype == "bf16":
                bits: Array = self._generator.random(shape, np.float32).view(np.uint32) >> 16
                made[name] = bits.astype(np.uint16)
            elif datatype in half_to_one:
                made[name] = self._generator.integers(*half_to_one[datatype], shape, np.uint8, endpoint=True)
            elif datatype in ("half", "float", "double"):
                made[name] = self._generator.random(shape).astype(dtype)
            else:
                made[name] = self._generator.integers(0, 2, shape).astype(dtype)
        return made


def largest_shape(tensor: ProgramTensor) -> tuple[int, ...]:
    """Return the shape with the upper bound of each varying dimension."""
    return tuple(dim.most if isinstance(dim, DimensionRange) else dim for dim in tensor.shape)


@dataclass(frozen=True, slots=True)
class ProbeJob:
    """Tries a .mxr file that rocserve has not compiled."""

    model_name: str
    path: str

    @property
    def title(self) -> str:
        return f"trying {Path(self.path).name} of model '{self.model_name}'"

    def perform(self, binding: Binding, report: Report) -> InspectResult:
        """Load the program and run it once. Raises MigraphxError if MIGraphX refuses the file or the run, ServeError if
        the program cannot be served."""
        name = Path(self.path).name
        report("loading it")
        program = binding.load(Path(self.path))
        if not program.outputs:
            raise invalid_argument(f"{name} has no outputs")
        report("running it")
        program.run(Samples().inputs(program.parameters))
        return InspectResult(tuple(program.parameters.values()), program.outputs)


def load_saved(binding: Binding, program: Program, path: Path) -> Program:
    """Load a saved program and return it. Raises MigraphxError if it cannot be loaded, ServeError (INTERNAL) if its
    inputs or outputs have changed."""
    try:
        loaded = binding.load(path)
    except MigraphxError as error:
        raise MigraphxError(f"it cannot load what it has saved: {error}") from error
    if dict(loaded.parameters) != dict(program.parameters) or list(loaded.outputs) != list(program.outputs):
        raise internal(
            f"the saved program has other inputs or outputs after loading: {_described(loaded)} instead of"
            f" {_described(program)}"
        )
    return loaded


def try_saved(loaded: Program, program: Program) -> None:
    """Run a program that was saved and loaded: its results must equal the original's bit for bit, unless two runs of
    the original differ. Raises MigraphxError if it cannot be run, ServeError (INTERNAL) if it differs."""
    inputs = Samples().inputs(program.parameters)
    found, expected = loaded.run(inputs), program.run(inputs)
    if _same(found, expected):
        return
    # Some GPU kernels add in any order, so two runs of one program may differ.
    if _same(program.run(inputs), expected):
        raise internal("the saved program gives other results after loading")


def _same(some: Sequence[Array], others: Sequence[Array]) -> bool:
    return [values.tobytes() for values in some] == [values.tobytes() for values in others]


def _described(program: Program) -> str:
    tensors = [*program.parameters.values(), *program.outputs]
    return ", ".join(f"{tensor.name or 'output'} {tensor.datatype} {list(tensor.shape)}" for tensor in tensors)


@dataclass(frozen=True, slots=True)
class InspectResult:
    parameters: tuple[ProgramTensor, ...]
    outputs: tuple[ProgramTensor, ...]
    text: str = ""
    """The text that MIGraphX prints."""


@dataclass(frozen=True, slots=True)
class InspectJob:
    """Inspects the model of `recipe`, without compiling it, or the compiled program in `program_file` (.mxr)."""

    name: str
    """The model's or file's name, as users read it."""
    recipe: ProgramRecipe | None = None
    program_file: str = ""

    @property
    def title(self) -> str:
        return f"inspecting {self.name}"

    def perform(self, binding: Binding, report: Report) -> InspectResult:
        """Read the model or program. Raises MigraphxError if MIGraphX cannot read it."""
        report("reading the compiled program" if self.recipe is None else "reading the model")
        program = parse_recipe(binding, self.recipe) if self.recipe else binding.load(Path(self.program_file))
        return InspectResult(tuple(program.parameters.values()), program.outputs, program.text())


@dataclass(frozen=True, slots=True)
class LibraryResult:
    version: str
    """E.g. "2.14.0"; "" = unknown."""
    binding: str
    library: str
    """Path of the loaded file."""
    targets: Mapping[str, str]
    """Target -> why it cannot be used, in MIGraphX's words; "" = the target's library can be loaded."""


@dataclass(frozen=True, slots=True)
class LibraryJob:
    """Asks a loaded MIGraphX for its version and its targets."""

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
