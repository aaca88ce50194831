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
from rocserve.backends.pytorch.package_source import package_name, smallest_table
from rocserve.backends.pytorch.program import Program
from rocserve.core.padding import Padding
from rocserve.jobs.messages import Report
from rocserve.load_check.budget import Budget
from rocserve.load_check.facts import NO_FACTS
from rocserve.load_check.length_trials import LengthTrials
from rocserve.load_check.padding import check_padding
from rocserve.load_check.padding_verdict import PaddingVerdict
from rocserve.load_check.rows import RowsVerdict, check_rows
from rocserve.load_check.tensors import CheckedInput, Run


def check_package(source: ModelSource, program: Program, device: Any, bound: BoundProgram) -> ModelCheck:
    """Check whether the rows of a package depend on each other, if requests may be joined."""
    check, most_rows = ModelCheck(source, device, ""), program.signature.most_rows
    check.note("not compared: a package of AOTInductor has no other form of its program")

    def rows_job(inputs: tuple[CheckedInput, ...], seed: int, seconds: float) -> PackageRowsJob:
        return PackageRowsJob(source.name, str(source.model_file), str(device), bound, inputs, most_rows, seconds, seed)

    if device.type == "cpu":
        table = smallest_table(source.model_file, package_name(source.model_file))
        # An input may be a mask, in which small integers become 0, or index the smallest table. The check
        # divides some indices by 8: a table of 32 rows leaves enough of them.
        check.child_end = table if table is None or table >= 32 else check.child_end
    if check.asks_for_rows(bound):
        check.check_rows_in_child(bound, program, lambda inputs, seed: rows_job(inputs, seed, check.seconds))
    check.padding_job = lambda inputs, seed, seconds, *padding: PackagePaddingJob(
        rows_job(inputs, seed, seconds), *padding
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
        run = self.opened(report)
        report("running batches of different rows")
        return check_rows(
            run, self.inputs, tuple(self.bound.outputs), NO_FACTS, Budget(self.seconds), self.seed, (),
            torch.device(self.device).type != "cpu", fixed_rows(self.most_rows),
        )  # fmt: skip

    def opened(self, report: Report) -> Run:
        """Raises ServeError as `open_package`."""
        report("opening the package")
        device = torch.device(self.device)
        return program_run(self.bound, open_package(Path(self.model_file), device), device)


@dataclass(frozen=True, slots=True)
class PackagePaddingJob:
    rows: PackageRowsJob
    """Of the same package."""
    padding: Padding
    written_values: tuple[str, ...]
    """Inputs whose pad value the user has chosen."""
    has_company: bool
    """Whether requests share batches."""

    @property
    def title(self) -> str:
        return self.rows.title

    def perform(self, report: Report) -> PaddingVerdict:
        """Find whether short inputs may be padded. Raises ServeError as `open_package`."""
        rows = self.rows
        run = rows.opened(report)
        report("padding short inputs")
        trials = LengthTrials(
            run, rows.inputs, tuple(rows.bound.outputs), NO_FACTS, Budget(rows.seconds), rows.seed, (),
            self.has_company, fixed_rows(rows.most_rows) if rows.bound.signature.supports_batching else None,
        )  # fmt: skip
        return check_padding(trials, self.padding, frozenset(self.written_values))
