"""Compiles one program in a child process: reads the model, quantises, compiles, saves, and checks the saved
program."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rocserve.backends.migraphx.binding import (
    Array,
    Binding,
    MigraphxError,
    Program,
)
from rocserve.backends.migraphx.compiling.calibration import calibration_digest, read_calibration
from rocserve.backends.migraphx.compiling.check_jobs import COMPARING, ReferenceTrial
from rocserve.backends.migraphx.compiling.plan import batch_dimension, read_graph
from rocserve.backends.migraphx.compiling.probe_jobs import (
    Samples,
    largest_shape,
    load_saved,
    original_size_recipe,
    parse_recipe,
    try_saved,
)
from rocserve.backends.migraphx.compiling.program_cache import ProgramAbout
from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe
from rocserve.backends.migraphx.options import Precision
from rocserve.backends.migraphx.program_text import allocated_bytes, read_program_text
from rocserve.cache.digests import file_digest
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.printable import printable
from rocserve.core.tensors import bfloat16_values
from rocserve.jobs.messages import Report
from rocserve.load_check.reference import ReferenceVerdict


@dataclass(frozen=True, slots=True)
class CompileResult:
    about: ProgramAbout
    verdict: ReferenceVerdict | None = None
    """None = the program was not compared with a reference."""


@dataclass(frozen=True, slots=True)
class CompileJob:
    model_name: str
    model_folder: str
    recipe: ProgramRecipe
    program_file: str
    """The path to save the program to."""
    own_program: str = ""
    """The cached program of the file's own batch size, if the recipe changes the batch size; "" = not cached."""
    trial: ReferenceTrial | None = None
    """The program's expected answers; None = there is no reference."""

    @property
    def title(self) -> str:
        return f"compiling {self.recipe.title} of model '{self.model_name}'"

    def perform(self, binding: Binding, report: Report) -> CompileResult:
        """Compile, save and try the program. Raises MigraphxError if MIGraphX refuses the model, ServeError if a file
        has changed, or the program at another batch size than the file's does not compute what the model does."""
        recipe, file, folder = self.recipe, Path(self.program_file), Path(self.model_folder)
        report("reading the model")
        binding.check_target(recipe.options.target.value)
        path = Path(recipe.source.path)
        graph = read_graph(recipe.source.kind, path, folder, recipe.output_names)
        if file_digest(path, graph.external_files) != recipe.source.digest:
            raise unavailable(f"file {path.name} changed during the compile")
        own_size = (batch_dimension(graph) or 0) if recipe.rebatched else 0
        try:
            program = parse_recipe(binding, recipe)
        except MigraphxError as error:
            if not own_size:
                raise
            # Raises MigraphxError if MIGraphX refuses the model at its own batch size, too.
            parse_recipe(binding, original_size_recipe(recipe, own_size))
            raise refusal(self.model_name, recipe, own_size, f"MIGraphX says: {error}") from error
        started = time.monotonic()
        self._quantise(program, report)
        report("compiling")
        self._compile(program)
        seconds = time.monotonic() - started
        report("saving")
        program.save(file)
        report("trying the saved program")
        loaded, verdict = load_saved(binding, program, file), None
        if self.trial is None:
            try_saved(loaded, program)
        else:
            report(COMPARING)
            verdict = self.trial.verdict(loaded)
        if own_size:
            report(f"checking it against the model's own batch size, {own_size}")
            if self.own_program:
                own = binding.load(Path(self.own_program))
            else:
                # The model is assumed to be right at the batch size of its file.
                own = parse_recipe(binding, original_size_recipe(recipe, own_size))
                if not recipe.options.precision.needs_calibration:
                    # Calibrated precisions are compared with the unquantised model; their error depends on the
                    # calibration.
                    self._quantise(own, report)
                self._compile(own)
            names = [output.name for output in graph.outputs]
            fault = row_fault(program, own, own_size, names, recipe.options.precision)
            if fault:
                raise refusal(self.model_name, recipe, own_size, fault)
        lines = binding.take_messages()[:100]
        about = ProgramAbout(
            self.model_name,
            path.name,
            recipe,
            seconds,
            inputs=tuple(program.parameters.values()),
            outputs=program.outputs,
            # Only GPU programs print what they allocate once.
            scratch_bytes=allocated_bytes(read_program_text(program.text())) or None,
            messages=tuple(printable(line[:500]) for line in lines),
        )
        return CompileResult(about, verdict)

    def _quantise(self, program: Program, report: Report) -> None:
        options, folder = self.recipe.options, Path(self.model_folder)
        if options.precision is Precision.FP32:
            return
        calibration: Sequence[Mapping[str, Array]] = ()
        if options.precision.needs_calibration:
            report("reading the calibration data")
            calibration = read_calibration(folder, self.recipe, program.parameters)
            if calibration_digest(options, folder) != self.recipe.calibration_digest:
                raise unavailable("the calibration data changed during the compile")
        report(f"quantising to {options.precision.value}")
        program.quantize(options.precision.value, options.target.value, calibration)

    def _compile(self, program: Program) -> None:
        options = self.recipe.options
        program.compile(
            options.target.value,
            fast_math=options.fast_math,
            exhaustive_tune=options.exhaustive_tune,
        )


def refusal(model_name: str, recipe: ProgramRecipe, own_size: int, reason: str) -> ServeError:
    """Return the error for a graph that does not work at another batch size."""
    return invalid_argument(
        f"model '{model_name}' cannot run at batch size {recipe.batch_size}: its graph fixes batch size {own_size} (for"
        f" example by a Reshape to a constant shape, or a sum over the batch): {reason}; export it with an open batch"
        f" dimension, or set max_batch_size to {own_size} and parameter 'batch_sizes' to \"{own_size}\""
    )


def row_fault(program: Program, own: Program, own_size: int, names: Sequence[str], precision: Precision) -> str:
    """Return which output differs from the output at the file's own batch size, and how; "" = none. `own`: the program
    of that size. MIGraphX accepts any batch size for any graph, even if the graph then computes something else: a
    Reshape to a constant shape or a sum over the batch gives other numbers, or none. So each row of random input must
    give the same result as in a batch of the file's own size, next to other rows."""
    samples = Samples(1)
    inputs = samples.inputs(program.parameters)
    found = program.run(inputs)
    size = max((largest_shape(tensor)[0] for tensor in program.parameters.values()), default=0)
    for name, output in zip(names, found, strict=True):
        if output.shape[:1] != (size,):
            return f"output '{name}' has shape {list(output.shape)}, whose first dimension should be {size}"
    worst = dict.fromkeys(names, 0.0)
    # A small batch is compared in all rows, a large one in rows that span it.
    for row in sorted({round(index) for index in np.linspace(0, size - 1, min(size, 8))}):
        # The other rows differ from those in the program's batch, so an output that depends on them differs, too.
        alone = samples.inputs(own.parameters, own_size)
        for name in alone.keys() & inputs.keys():
            alone[name][0] = inputs[name][row]
        for name, tensor, output, expected in zip(names, program.outputs, found, own.run(alone), strict=True):
            worst[name] = max(worst[name], distance(output[row], expected[0], tensor.datatype))
    # The `distance` up to which equal rows in batches of different sizes are taken as equal. The limits are generous
    # because kernels for other sizes round differently, while mixed-up rows are about 1 apart.
    limits = {
        Precision.FP32: 0.01,
        Precision.FP16: 0.05,
        Precision.BF16: 0.25,
        Precision.INT8: 0.25,
        Precision.FP8: 0.4,
    }
    limit = limits[precision]
    for name, far in worst.items():
        if not far <= limit:
            return (
                f"output '{name}' of random rows differs from that in a batch of {own_size} (relative error {far:.3g},"
                f" rounding explains at most {limit:g})"
            )
    return ""


def distance(found: Array, expected: Array, datatype: str) -> float:
    """Return the relative error: for floats the norm of the difference divided by the norm of `expected`, for other
    types the share of different elements. `datatype` is MIGraphX's name. The result is infinite if shapes differ, or
    NaN and infinite elements are not the same as in `expected`; it is never NaN."""
    if found.shape != expected.shape:
        return float("inf")
    if found.size == 0 or found.tobytes() == expected.tobytes():
        return 0.0
    if datatype == "bf16":
        # Arrays hold the bits of bf16.
        found, expected = map(bfloat16_values, (found, expected))
    if not np.issubdtype(expected.dtype, np.floating):
        return float(np.mean(found != expected))
    # The square of a large FP64 overflows FP64, and infinity divided by infinity is NaN.
    found, expected = found.astype(np.longdouble), expected.astype(np.longdouble)
    finite = np.isfinite(expected)
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=True) or not np.isfinite(found[finite]).all():
        return float("inf")
    error = np.linalg.norm(found[finite] - expected[finite])
    # The small term keeps the divisor above 0.
    return float(error / (np.linalg.norm(expected[finite]) + 1e-6 * np.sqrt(max(finite.sum(), 1))))
