"""Compiles one program, in a child: reads the model, quantises, compiles, saves, loads what was saved and runs it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocserve.backends.migraphx.binding.interface import (
    Array,
    Binding,
    CompileFlags,
    MigraphxError,
    Program,
    ProgramTensor,
)
from rocserve.backends.migraphx.binding.program_text import allocated_bytes, read_program_text
from rocserve.backends.migraphx.calibration import calibration_digest, read_calibration
from rocserve.backends.migraphx.configuration.options import Precision
from rocserve.backends.migraphx.jobs.probe import try_saved
from rocserve.backends.migraphx.jobs.rebatching import refusal, row_fault
from rocserve.backends.migraphx.jobs.sources import ProgramFile, own_recipe, parse_recipe, read_program_file
from rocserve.backends.migraphx.planning.recipe import ProgramRecipe
from rocserve.cache.digests import file_digest
from rocserve.core.errors import unavailable
from rocserve.core.printable import printable
from rocserve.jobs.messages import Report

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


@dataclass(frozen=True, slots=True)
class CompileResult:
    inputs: tuple[ProgramTensor, ...]
    """By name. Not among them: inputs of the model on which no output depends."""
    outputs: tuple[ProgramTensor, ...]
    compile_seconds: float
    """Quantising and compiling."""
    scratch_bytes: int | None
    """The memory on the GPU that the program works in; None where that is not known."""
    messages: tuple[str, ...]
    """What MIGraphX wrote meanwhile; cut where that is much."""


def perform(job: CompileJob, binding: Binding, report: Report) -> CompileResult:
    """
    Raises:
        MigraphxError: MIGraphX refuses the model.
        ServeError: what comes out is not what the model asks for.
    """
    return _Compilation(job, binding, report).run()


class _Compilation:
    def __init__(self, job: CompileJob, binding: Binding, report: Report) -> None:
        self._job = job
        self._recipe = job.recipe
        self._precision = job.recipe.options.precision
        self._target = job.recipe.options.target.value
        self._binding = binding
        self._report = report

    def run(self) -> CompileResult:
        self._report("reading the model")
        self._binding.check_target(self._target)
        source = self._read_source()
        own_size = source.own_batch if self._recipe.rebatched else 0
        program = self._parse(own_size)
        started = time.monotonic()
        self._quantise(program)
        self._report("compiling")
        self._compile(program)
        seconds = time.monotonic() - started
        self._report("saving")
        program.save(Path(self._job.program_file))
        self._report("trying the saved program")
        try_saved(self._binding, program, Path(self._job.program_file))
        if own_size:
            self._report(f"checking it against the model's own batch size, {own_size}")
            fault = row_fault(program, self._own_program(own_size), own_size, source.output_names, self._precision)
            if fault:
                raise refusal(self._job.model_name, self._recipe, own_size, fault)
        lines = self._binding.take_messages()[:_MOST_MESSAGES]
        return CompileResult(
            inputs=tuple(program.parameters.values()),
            outputs=program.outputs,
            compile_seconds=seconds,
            # What it allocates once; other targets say nothing of that.
            scratch_bytes=allocated_bytes(read_program_text(program.text())) or None,
            messages=tuple(printable(line[:_LONGEST_MESSAGE]) for line in lines),
        )

    def _read_source(self) -> ProgramFile:
        """Raises: ServeError: UNAVAILABLE, it is not the file any more that the program is to be of."""
        path = Path(self._recipe.source.path)
        source = read_program_file(self._recipe, Path(self._job.model_folder))
        if file_digest(path, source.more_files) != self._recipe.source.digest:
            raise unavailable(f"file {path.name} has been changed meanwhile")
        return source

    def _parse(self, own_size: int) -> Program:
        """`own_size`: above 0 for a program that is re-batched."""
        try:
            return parse_recipe(self._binding, self._recipe)
        except MigraphxError as error:
            if not own_size:
                raise
            # Raises where MIGraphX does not take the model in its own batch size either.
            parse_recipe(self._binding, own_recipe(self._recipe, own_size))
            raise refusal(self._job.model_name, self._recipe, own_size, f"MIGraphX says: {error}") from error

    def _quantise(self, program: Program) -> None:
        if self._precision is Precision.FP32:
            return
        calibration: Sequence[Mapping[str, Array]] = ()
        if self._precision.needs_calibration:
            self._report("reading the calibration data")
            folder = Path(self._job.model_folder)
            calibration = read_calibration(folder, self._recipe, program.parameters)
            if calibration_digest(self._recipe.options, folder) != self._recipe.calibration_digest:
                raise unavailable("the calibration data have been changed meanwhile")
        self._report(f"quantising to {self._precision.value}")
        program.quantize(self._precision.value, self._target, calibration)

    def _compile(self, program: Program) -> None:
        options = self._recipe.options
        program.compile(
            self._target, CompileFlags(self._recipe.offload_copy, options.fast_math, options.exhaustive_tune)
        )

    def _own_program(self, own_size: int) -> Program:
        """The model in the batch size of its file, which it is meant to be right in."""
        if self._job.own_program:
            return self._binding.load(Path(self._job.own_program))
        program = parse_recipe(self._binding, own_recipe(self._recipe, own_size))
        if not self._precision.needs_calibration:
            # Unlike these, whose errors the calibration decides.
            self._quantise(program)
        self._compile(program)
        return program
