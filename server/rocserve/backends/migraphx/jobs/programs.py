"""The jobs with MIGraphX: compiling (reading the model, quantising, compiling, saving, trying what was saved), trying a
program that a user has brought, having one printed; and asking MIGraphX what it is itself."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rocserve.backends.migraphx.binding.interface import (
    NUMPY_DTYPES,
    Array,
    Binding,
    CompileFlags,
    DimensionRange,
    MigraphxError,
    OnnxOptions,
    Program,
    ProgramTensor,
    TensorflowOptions,
)
from rocserve.backends.migraphx.binding.program_text import allocated_bytes, read_program_text
from rocserve.backends.migraphx.calibration import calibration_digest, read_calibration
from rocserve.backends.migraphx.configuration.options import Precision, Target
from rocserve.backends.migraphx.model_files.onnx_graph import read_onnx_graph
from rocserve.backends.migraphx.model_files.tensorflow_graph import read_tensorflow_graph
from rocserve.backends.migraphx.planning.recipe import ProgramRecipe, SourceKind
from rocserve.backends.migraphx.program_cache import ProgramAbout
from rocserve.cache.digests import file_digest
from rocserve.core.errors import ServeError, internal, invalid_argument, unavailable
from rocserve.core.printable import printable
from rocserve.jobs.messages import Report


@dataclass(frozen=True, slots=True)
class ProgramFile:
    output_names: tuple[str, ...]
    """In the program's order."""
    own_batch: int
    """The batch size that it has baked in; 0 = it is left open."""
    more_files: tuple[Path, ...]
    """That belong to it: external data."""


def read_program_file(recipe: ProgramRecipe, model_folder: Path) -> ProgramFile:
    """Raises: ServeError: INVALID_ARGUMENT; it cannot be read or is no model."""
    path = Path(recipe.source.path)
    files: tuple[Path, ...] = ()
    if recipe.source.kind is SourceKind.TENSORFLOW:
        inputs, names = read_tensorflow_graph(path).inputs, recipe.output_names
    else:
        graph = read_onnx_graph(path, (model_folder,))
        inputs, names = graph.inputs, tuple(output.name for output in graph.outputs)
        files = graph.external_files
    first = {tensor.dims[0] for tensor in inputs if tensor.dims}
    size = first.pop() if len(first) == 1 else 0
    return ProgramFile(names, size if isinstance(size, int) else 0, files)


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
        program = binding.parse_onnx(source, OnnxOptions(input_shapes=shapes))
    elif recipe.largest_batch:
        raise invalid_argument(
            "MIGraphX takes no TensorFlow graph with a batch size that varies; leave out dynamic_batch, and there is a"
            " program for each of batch_sizes"
        )
    else:
        options = TensorflowOptions(recipe.input_shapes, recipe.batch_size or 1, output_names=recipe.output_names)
        program = binding.parse_tensorflow(source, options)
    if not program.outputs:
        raise invalid_argument(f"MIGraphX finds no outputs in {source.name}; it is empty or damaged, copy it again")
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


_MOST_MESSAGES = 100
_LONGEST_MESSAGE = 500


@dataclass(frozen=True, slots=True)
class CompileJob:
    model_name: str
    model_folder: str
    recipe: ProgramRecipe
    program_file: str
    """Where the program is saved."""
    own_program: str = ""
    """For a re-batched model: the program of the file's own batch size, where there is one already."""

    @property
    def title(self) -> str:
        return f"compiling {self.recipe.title} of model '{self.model_name}'"

    def perform(self, binding: Binding, report: Report) -> ProgramAbout:
        """Raises: MigraphxError: MIGraphX refuses the model. ServeError: the program is not what the model asks for."""
        recipe, file, folder = self.recipe, Path(self.program_file), Path(self.model_folder)
        report("reading the model")
        binding.check_target(recipe.options.target.value)
        path = Path(recipe.source.path)
        source = read_program_file(recipe, folder)
        if file_digest(path, source.more_files) != recipe.source.digest:
            raise unavailable(f"file {path.name} has been changed meanwhile")
        own_size = source.own_batch if recipe.rebatched else 0
        try:
            program = parse_recipe(binding, recipe)
        except MigraphxError as error:
            if not own_size:
                raise
            # Raises where MIGraphX does not take the model in its own batch size either.
            parse_recipe(binding, own_recipe(recipe, own_size))
            raise refusal(self.model_name, recipe, own_size, f"MIGraphX says: {error}") from error
        started = time.monotonic()
        self._quantise(program, report)
        report("compiling")
        self._compile(program)
        seconds = time.monotonic() - started
        report("saving")
        program.save(file)
        report("trying the saved program")
        try_saved(binding, program, file)
        if own_size:
            report(f"checking it against the model's own batch size, {own_size}")
            if self.own_program:
                own = binding.load(Path(self.own_program))
            else:
                # The model in the batch size of its file, which it is meant to be right in.
                own = parse_recipe(binding, own_recipe(recipe, own_size))
                if not recipe.options.precision.needs_calibration:
                    # Unlike these, whose errors the calibration decides.
                    self._quantise(own, report)
                self._compile(own)
            fault = row_fault(program, own, own_size, source.output_names, recipe.options.precision)
            if fault:
                raise refusal(self.model_name, recipe, own_size, fault)
        lines = binding.take_messages()[:_MOST_MESSAGES]
        return ProgramAbout(
            self.model_name,
            path.name,
            recipe,
            seconds,
            inputs=tuple(program.parameters.values()),
            outputs=program.outputs,
            # What it allocates once; other targets say nothing of that.
            scratch_bytes=allocated_bytes(read_program_text(program.text())) or None,
            messages=tuple(printable(line[:_LONGEST_MESSAGE]) for line in lines),
        )

    def _quantise(self, program: Program, report: Report) -> None:
        options, folder = self.recipe.options, Path(self.model_folder)
        if options.precision is Precision.FP32:
            return
        calibration: Sequence[Mapping[str, Array]] = ()
        if options.precision.needs_calibration:
            report("reading the calibration data")
            calibration = read_calibration(folder, self.recipe, program.parameters)
            if calibration_digest(options, folder) != self.recipe.calibration_digest:
                raise unavailable("the calibration data have been changed meanwhile")
        report(f"quantising to {options.precision.value}")
        program.quantize(options.precision.value, options.target.value, calibration)

    def _compile(self, program: Program) -> None:
        options = self.recipe.options
        flags = CompileFlags(self.recipe.offload_copy, options.fast_math, options.exhaustive_tune)
        program.compile(options.target.value, flags)


_TOLERANCES: Mapping[Precision, float] = {
    Precision.FP32: 0.01,
    Precision.FP16: 0.05,
    Precision.BF16: 0.25,
    Precision.INT8: 0.25,
    Precision.FP8: 0.4,
}
"""The `distance` up to which results of the same rows in batches of other sizes count as equal. Generous: kernels for
other sizes round otherwise, while rows that are mixed up are about 1 apart."""
_NOTHING = 1e-6
"""Per element; errors of what should be 0 are measured against it."""
_MOST_ROWS = 8
_SEED = 1


def refusal(model_name: str, recipe: ProgramRecipe, own_size: int, reason: str) -> ServeError:
    """For a graph that cannot be had in another batch size."""
    return invalid_argument(
        f"model '{model_name}' cannot be had at batch size {recipe.batch_size or recipe.largest_batch}: its graph holds"
        f" its own batch size, {own_size}, in it (for example a Reshape to a constant shape, or a sum over the batch):"
        f" {reason}; export it with a batch dimension that is left open, or set max_batch_size to {own_size} and"
        f" parameter 'batch_sizes' to \"{own_size}\""
    )


def row_fault(program: Program, own: Program, own_size: int, names: Sequence[str], precision: Precision) -> str:
    """Which output is another one than in the file's own batch size, whose program is `own`, and how; "" where none is.

    MIGraphX takes any batch size for any graph, whether the graph means the same then or not: a Reshape to a constant
    shape or a sum over the batch gives other numbers, or none. So each row of random input must give what it gives in
    the file's own batch, whatever the rows beside it.
    """
    samples = Samples(_SEED)
    inputs = samples.inputs(program.parameters)
    found = program.run(inputs)
    size = max((largest_shape(tensor)[0] for tensor in program.parameters.values()), default=0)
    for name, output in zip(names, found, strict=True):
        if output.shape[:1] != (size,):
            return f"output '{name}' has shape {list(output.shape)}, whose first dimension should be {size}"
    worst = dict.fromkeys(names, 0.0)
    # All rows of a small batch, else some from the first to the last.
    for row in sorted({round(place) for place in np.linspace(0, size - 1, min(size, _MOST_ROWS))}):
        # The rows beside it are others than in the program's batch, so that nothing may depend on them.
        alone = samples.inputs(own.parameters, own_size)
        for name in alone.keys() & inputs.keys():
            alone[name][0] = inputs[name][row]
        for name, tensor, output, expected in zip(names, program.outputs, found, own.run(alone), strict=True):
            worst[name] = max(worst[name], distance(output[row], expected[0], tensor.datatype))
    limit = _TOLERANCES[precision]
    for name, far in worst.items():
        if not far <= limit:
            return (
                f"rows of random input give another output '{name}' than in a batch of {own_size} (relative error"
                f" {far:.3g}, at most {limit:g} is rounding)"
            )
    return ""


def distance(found: Array, expected: Array, datatype: str) -> float:
    """Of floats the length of the difference against that of `expected`; of others the share that differs.

    `datatype` is MIGraphX's name. Infinite where shapes differ, or not the same elements are numbers.
    """
    if found.shape != expected.shape:
        return float("inf")
    if found.size == 0 or found.tobytes() == expected.tobytes():
        return 0.0
    if datatype == "bf16":
        # As their bits.
        found, expected = ((values.astype(np.uint32) << 16).view(np.float32) for values in (found, expected))
    if not np.issubdtype(expected.dtype, np.floating):
        return float(np.mean(found != expected))
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=True) or not np.isfinite(found[finite]).all():
        return float("inf")
    error = np.linalg.norm(found[finite] - expected[finite])
    return float(error / (np.linalg.norm(expected[finite]) + _NOTHING * np.sqrt(finite.sum())))
