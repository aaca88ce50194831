"""The load check of a package of AOTInductor. Its compiled code may end the process on inputs that the program does not
take, so it runs in a child process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rocserve.backends.base import ModelSource
from rocserve.backends.pytorch.binding import BoundProgram
from rocserve.backends.pytorch.checked_tensors import fixed_rows
from rocserve.backends.pytorch.comparison import program_run
from rocserve.backends.pytorch.model_check import ModelCheck
from rocserve.backends.pytorch.package import open_package
from rocserve.backends.pytorch.program import Program
from rocserve.jobs.messages import Report
from rocserve.load_check.budget import Budget
from rocserve.load_check.facts import NO_FACTS
from rocserve.load_check.rows import RowsVerdict, check_rows
from rocserve.load_check.tensors import CheckedInput


def check_package(source: ModelSource, program: Program, device: Any, bound: BoundProgram) -> ModelCheck:
    """Check what the rows of a package do to each other, if requests may be joined."""
    check, most_rows = ModelCheck(source, device, ""), program.signature.most_rows
    check.note("not compared: a package of AOTInductor has no other form of its program")
    if check.asks_for_rows(bound):
        check.check_rows_in_child(
            bound,
            program,
            lambda inputs, seed: PackageRowsJob(
                source.name, str(source.model_file), str(device), bound, inputs, most_rows, check.seconds, seed
            ),
        )
    return check


@dataclass(frozen=True, slots=True)
class PackageRowsJob:
    model_name: str
    model_file: str
    device: str
    """PyTorch's name, e.g. "cuda:0"."""
    bound: BoundProgram
    inputs: tuple[CheckedInput, ...]
    most_rows: int | None
    seconds: float
    seed: int

    @property
    def title(self) -> str:
        return f"checking model '{self.model_name}'"

    def perform(self, report: Report) -> RowsVerdict:
        """Find whether rows depend on each other. Raises ServeError as `open_package`."""
        report("opening the package")
        device = torch.device(self.device)
        run = program_run(self.bound, open_package(Path(self.model_file), device), device)
        report("running batches of different rows")
        return check_rows(
            run, self.inputs, tuple(self.bound.outputs), NO_FACTS, Budget(self.seconds), self.seed, (),
            device.type != "cpu", fixed_rows(self.most_rows),
        )  # fmt: skip
