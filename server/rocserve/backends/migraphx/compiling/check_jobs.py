"""Checks programs before they are served: compares them with a reference, and finds whether rows depend on each
other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rocserve.backends.migraphx.binding import Array, Binding, DimensionRange, Program
from rocserve.backends.migraphx.compiling.probe_jobs import original_size_recipe, parse_recipe
from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe
from rocserve.backends.migraphx.program_runner import ProgramRunner, ProgramTensors
from rocserve.core.datatypes import DataType
from rocserve.core.tensors import bfloat16_values
from rocserve.jobs.messages import Report
from rocserve.load_check.budget import Budget
from rocserve.load_check.facts import NO_FACTS, GraphFacts
from rocserve.load_check.reference import Case, ReferenceVerdict, compare, load_cases
from rocserve.load_check.rows import RowsVerdict, check_rows
from rocserve.load_check.tensors import ROWS, CheckedInput, Feed, Run


@dataclass(frozen=True, slots=True)
class ReferenceTrial:
    """The expected answers of a program."""

    model_name: str
    cases_file: str
    """The reference's cases."""
    tensors: ProgramTensors
    precision: str
    """See `load_check.reference.compare`; "" = read it from the program's instructions."""
    seconds: float

    def verdict(self, program: Program) -> ReferenceVerdict:
        """Run the program on the cases as it will be served: batches are padded and cut."""
        cases = load_cases(Path(self.cases_file))
        if self.tensors.rows is not None:
            cases = [_filled(case, self.tensors.rows.least) for case in cases]
        precision = self.precision or _precision_of(program)
        return compare(cases, program_run(program, self.tensors, self.model_name), precision, Budget(self.seconds))


def _precision_of(program: Program) -> str:
    text = program.text()
    # The marks in a program's text, the coarsest first.
    marks = {"int8_type": "int8", "fp8": "fp8", "bf16_type": "bf16", "half_type": "fp16"}
    return next((precision for mark, precision in marks.items() if mark in text), "fp32")


def program_run(program: Program, tensors: ProgramTensors, model_name: str) -> Run:
    """Return a function that runs a program on clients' tensors. Raises ServeError if they cannot be served, or are not
    a batch."""
    loaded = tensors.open(program)
    if loaded.rows is not None:
        loaded.layout.check_batch(loaded.rows.least, model_name)
    runner = ProgramRunner(model_name, loaded)
    outputs = {tensor.name: tensor.datatype for tensor in loaded.layout.outputs}

    def run(feed: Feed) -> Feed:
        found = runner.run(feed, tuple(outputs))
        return {name: _values(array, outputs[name]) for name, array in found.items()}

    return run


def _values(array: Array, datatype: DataType) -> Array:
    """Return the values of an output; programs give BF16 as bits."""
    return bfloat16_values(array) if datatype is DataType.BF16 else array


def _filled(case: Case, rows: int) -> Case:
    """Repeat the case's rows until they fill a batch; rows are independent."""

    def filled(arrays: Feed) -> Feed:
        return {name: array[np.arange(max(rows, len(array))) % len(array)] for name, array in arrays.items()}

    return replace(case, feed=filled(case.feed), outputs=filled(case.outputs))


@dataclass(frozen=True, slots=True)
class CheckJob:
    """Compares a compiled program with a reference."""

    program_file: str
    trial: ReferenceTrial

    @property
    def title(self) -> str:
        return f"checking {Path(self.program_file).name} of model '{self.trial.model_name}'"

    def perform(self, binding: Binding, report: Report) -> ReferenceVerdict:
        """Raises MigraphxError if MIGraphX refuses the file."""
        report("loading it")
        program = binding.load(Path(self.program_file))
        report(COMPARING)
        return self.trial.verdict(program)


COMPARING = "comparing its answers with the reference's"
"""The phase of a job that runs a program on the reference's cases."""


@dataclass(frozen=True, slots=True)
class RowsJob:
    """Finds on MIGraphX itself whether rows depend on each other, for models without a reference."""

    model_name: str
    tensors: ProgramTensors
    rows: int | None
    """The size of each batch; None = any."""
    seconds: float
    seed: int
    recipe: ProgramRecipe | None = None
    """The model, which is compiled for `rows` rows; None = `program_file` is compiled."""
    program_file: str = ""
    is_noisy: bool = False
    facts: GraphFacts = NO_FACTS

    @property
    def title(self) -> str:
        return f"checking the rows of model '{self.model_name}'"

    def perform(self, binding: Binding, report: Report) -> RowsVerdict:
        """Raises MigraphxError if MIGraphX refuses the model or the file."""
        if self.recipe is None:
            report("loading the program")
            program = binding.load(Path(self.program_file))
        else:
            report(f"compiling a batch of {self.rows}")
            program = parse_recipe(binding, original_size_recipe(self.recipe, self.rows or 1))
            program.compile(self.recipe.options.target.value, fast_math=self.recipe.options.fast_math)
        tensors = (
            self.tensors if self.rows is None else replace(self.tensors, rows=DimensionRange(self.rows, self.rows))
        )
        run = program_run(program, tensors, self.model_name)
        report("running batches of different rows")
        return check_rows(
            run,
            [
                CheckedInput(spec.name, spec.datatype, (ROWS, *spec.shape[1:]))
                for spec in tensors.layout(program).inputs
            ],
            tensors.outputs,
            self.facts,
            Budget(self.seconds),
            self.seed,
            is_noisy=self.is_noisy,
            fixed_rows=self.rows,
        )
