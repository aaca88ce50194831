"""Compares a compiled program with PyTorch's own run of it, in the child process that has compiled it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rocserve.backends.pytorch.binding import BoundProgram, bind, given_names, no_trial
from rocserve.backends.pytorch.checked_tensors import checked_inputs, fixed_rows, run_of
from rocserve.backends.pytorch.datatypes import to_torch
from rocserve.backends.pytorch.exported_file import read_exported
from rocserve.backends.pytorch.program import DTYPES, Program, coarsest, open_exported
from rocserve.cache.digests import file_digest
from rocserve.core.model_config import ModelConfig
from rocserve.core.tensors import Tensor
from rocserve.jobs.messages import Report
from rocserve.load_check.budget import Budget
from rocserve.load_check.made_inputs import seed_of
from rocserve.load_check.reference import Case, ReferenceVerdict, compare, reference_cases
from rocserve.load_check.rows import RowsVerdict, check_rows
from rocserve.load_check.tensors import ROWS, Run

COMPARING = "comparing it with PyTorch"
"""The phase of a job in which the compiled program runs on made-up inputs."""
COMPARISON_FILE = "comparison.json"
"""The file with a Comparison, beside the compiled programs."""
NO_INPUTS = "PyTorch takes no made-up input; give check.npz"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdicts on compiled programs."""

    rows: RowsVerdict | None
    """None = the first dimension counts no rows."""
    verdicts: tuple[ReferenceVerdict, ...]
    """One for each program, in their order, up to the first wrong one."""
    reason: str
    """Why a program was not compared; "" = each was."""
    seconds: float


class EagerReference:
    """A program of torch.export, unchanged, run operator by operator on the CPU."""

    def __init__(
        self, model_file: Path, seconds: float, inputs: Sequence[str] = (), outputs: Sequence[str] = ()
    ) -> None:
        """`inputs`, `outputs`: the configuration's names, as `given_names` takes them. Raises ServeError as
        `open_exported`."""
        self._program = open_exported(read_exported(model_file))
        self.bound = _named(bind(self._program, ModelConfig(""), no_trial), self._program, inputs, outputs)
        self.inputs = checked_inputs(self.bound, self._program.signature.inputs)
        self.budget = Budget(seconds)
        self._seed = seed_of(file_digest(model_file))
        self._run = program_run(self.bound, self._program, torch.device("cpu"))
        self._outputs = tuple(self.bound.outputs)

    @property
    def batches(self) -> bool:
        return self.bound.signature.supports_batching

    def with_sizes(self, shapes: Mapping[str, Sequence[int]], has_rows: bool) -> None:
        """Use these sizes of the inputs, by name. `has_rows`: a first dimension of rows is in front of them."""
        lead = (ROWS,) if has_rows else ()
        self.inputs = tuple(
            replace(given, shape=(*lead, *shapes[given.name])) if given.name in shapes else given
            for given in self.inputs
        )

    def rows(self) -> RowsVerdict:
        """Find whether the program's rows depend on each other."""
        first = self.bound.inputs[0].shape[:1]
        only = fixed_rows(self._program.signature.most_rows) if self.batches else next(iter(first), None)
        return check_rows(
            self._run, self.inputs, self._outputs, self._program.facts, self.budget, self._seed, (), False, only
        )

    def rows_of_case(self, most: int) -> int:
        """Return how many rows a case may have, at most `most`; 0 = the program does not batch."""
        return min(most, self._program.signature.most_rows or most) if self.batches else 0

    def cases(self, rows: int) -> Sequence[Case]:
        """Return cases of so many rows; 0 = inputs have none."""
        return reference_cases(
            self._run, self.inputs, self._outputs, self._program.facts, self.budget, self._seed, rows
        )

    def precision(self, asked: str) -> str:
        """Return the precision, in the words of `compare`, that a program compiled in the precision `asked` has."""
        return asked if asked in DTYPES else coarsest(self._program.signature.precision)


def compared(
    reference: EagerReference,
    candidates: Iterable[tuple[int, Callable[[], Program]]],
    device: Any,
    precision: str,
    report: Report,
    checks_rows: bool,
) -> Comparison:
    """Compare programs with the reference. `candidates`: the rows of each one's cases, and the function that opens
    it."""
    started = time.monotonic()
    report("running batches of different rows")
    rows = reference.rows() if checks_rows and reference.batches else None
    verdicts: list[ReferenceVerdict] = []
    reason = ""
    for case_rows, opened in candidates:
        report("running it on PyTorch")
        cases = reference.cases(reference.rows_of_case(case_rows))
        if precision in DTYPES:
            cases = [_without_labels(case) for case in cases]
        report(COMPARING)
        run = program_run(reference.bound, opened(), device)
        verdict = compare(cases, run, reference.precision(precision), reference.budget)
        if verdict.right and not verdict.cases:
            reason = "the time ended" if cases or reference.budget.left <= 0 else NO_INPUTS
            continue
        verdicts.append(verdict)
        if not verdict.right:
            break
    return Comparison(rows, tuple(verdicts), reason, time.monotonic() - started)


def _without_labels(case: Case) -> Case:
    """Leave out whole numbers: in fewer bits, another class may be the likeliest."""
    return replace(case, outputs={name: values for name, values in case.outputs.items() if values.dtype.kind == "f"})


def program_run(bound: BoundProgram, program: Program, device: Any) -> Run:
    """Return a program as the load check runs it, in a process that serves no requests."""
    return run_of(bound, program_call(program, device))


def program_call(program: Program, device: Any) -> Callable[[Sequence[Tensor]], Any]:
    """Return a function that runs a program on the device with inputs in the program's order."""

    def call(inputs: Sequence[Tensor]) -> Any:
        values = [to_torch(tensor, copies=True) for tensor in inputs]
        # Weights become constants of a program that torch_migraphx lowers only without gradients.
        with torch.no_grad():
            return program.call([value.to(device) if isinstance(value, torch.Tensor) else value for value in values])

    return call


def _named(bound: BoundProgram, program: Program, inputs: Sequence[str], outputs: Sequence[str]) -> BoundProgram:
    own_inputs = given_names(program.signature.inputs, inputs)
    own_outputs = given_names(program.signature.outputs or (), outputs)
    specs = tuple(replace(spec, name=name) for spec, name in zip(bound.signature.outputs, own_outputs, strict=True))
    return replace(
        bound,
        signature=replace(bound.signature, outputs=specs),
        inputs=tuple(replace(spec, name=name) for spec, name in zip(bound.inputs, own_inputs, strict=True)),
        outputs={name: index for index, name in enumerate(own_outputs)},
    )
