"""The load check of one instance: whether the rows of its program depend on each other, and whether an engine that
compiles the program computes what PyTorch does. Verdicts are kept in the cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from rocserve.backends.base import ModelSource
from rocserve.backends.check_samples import sample_feeds, samples_digest
from rocserve.backends.checked_verdicts import checked_padding, checked_rows
from rocserve.backends.parameters import load_check_mode
from rocserve.backends.pytorch.binding import BoundProgram
from rocserve.backends.pytorch.checked_tensors import checked_inputs, fixed_rows, run_of
from rocserve.backends.pytorch.comparison import COMPARING, COMPARISON_FILE, Comparison, EagerReference
from rocserve.backends.pytorch.job_files import machine_parts, written_folder
from rocserve.backends.pytorch.program import Program, coarsest
from rocserve.backends.written_sizes import has_rows, padding_report, written_values
from rocserve.cache.folders import cache_directory
from rocserve.core.load_check import NOT_CHECKED, REFERENCE, LoadCheckFailed, LoadCheckMode, LoadCheckReport
from rocserve.core.padding import Padding
from rocserve.core.plain import from_json
from rocserve.jobs.messages import Job, JobError
from rocserve.jobs.runner import JobEngine, JobRunner
from rocserve.load_check.budget import Budget
from rocserve.load_check.length_trials import LengthTrials
from rocserve.load_check.made_inputs import seed_of
from rocserve.load_check.padding import check_padding
from rocserve.load_check.padding_verdict import PaddingVerdict, undecided
from rocserve.load_check.rows import Independence, RowsVerdict, check_rows, couples, doubt_of
from rocserve.load_check.tensors import CheckedInput, Feed
from rocserve.load_check.verdict_cache import VerdictCache, verdict_key

Result = TypeVar("Result")

PaddingJob = Callable[[tuple[CheckedInput, ...], int, float, Padding, tuple[str, ...], bool], Job]
"""Takes inputs, a seed, seconds, the padding, the inputs whose value for it is written, and whether requests share
batches. Its job gives a PaddingVerdict."""

_ZEROS = 1
"""End of integers without known limits, where another value might end the process."""


class ModelCheck:
    """Checks one instance during its load, and has the report. For one thread."""

    def __init__(self, source: ModelSource, device: Any, precision: str) -> None:
        """`device`, `precision`: of the computation. Raises ServeError (INVALID_ARGUMENT) if the parameter
        `load_check` is wrong."""
        self.report: LoadCheckReport = NOT_CHECKED
        self.rows: RowsVerdict | None = None
        """None = the rows were not checked."""
        self.padding_job: PaddingJob | None = None
        """None = the padding is checked in this process."""
        self.child_end: int | None = _ZEROS
        """Exclusive end of integers without known limits in a child process; None = any may be tried."""
        self._source = source
        self._device = device
        self._precision = precision
        self._mode = load_check_mode(source.config, source.settings)
        self._verdicts = VerdictCache(cache_directory(source.settings))

    @property
    def allows_padding(self) -> bool:
        """Whether batches may be padded and cut: their rows are independent, or the configuration vouches for rows that
        no check could decide on."""
        return not doubt_of(self.rows) or not (couples(self.rows) or self._source.config.has_open_batch)

    def asks_for_rows(self, bound: BoundProgram) -> bool:
        """Return whether requests may be joined, so that dependent rows matter."""
        return self._mode is not LoadCheckMode.OFF and bound.signature.supports_batching and self._joins

    @property
    def _joins(self) -> bool:
        return self._source.config.max_batch_size > 1 or self._source.config.has_open_batch

    def check_rows_here(self, bound: BoundProgram, program: Program, call: Callable[[Any], Any]) -> None:
        """Find in this process whether rows depend on each other. `call` runs the program on the inputs in its
        order."""
        is_gpu = self._device.type != "cpu"
        inputs = checked_inputs(bound, program.signature.inputs, _ZEROS if is_gpu else None)
        samples = sample_feeds(self._source, bound.signature)

        def check() -> RowsVerdict:
            budget = Budget(self.seconds)
            outputs, most_rows = tuple(bound.outputs), fixed_rows(program.signature.most_rows)
            return check_rows(
                run_of(bound, call), inputs, outputs, program.facts, budget, self._seed, samples, is_gpu, most_rows,
                self._source.config.max_batch_size,
            )  # fmt: skip

        self._judge_rows(self._key("eager", inputs, samples), check)

    def length_trials(
        self,
        bound: BoundProgram,
        program: Program,
        call: Callable[[Any], Any],
        padding: Padding,
        zeros_only: bool,
        budget: Budget | None = None,
    ) -> LengthTrials:
        """Return runs with the padding's dimensions open. `call`: see `check_rows_here`. `zeros_only`: integers without
        known limits are 0. `budget`: None = the time of the check, whatever its mode."""
        return LengthTrials(
            run_of(bound, call),
            checked_inputs(bound, program.signature.inputs, _ZEROS if zeros_only else None, padding),
            tuple(bound.outputs),
            replace(program.facts, precision=coarsest(program.signature.precision)),
            budget or Budget(self._source.settings.load_check_seconds),
            self._seed,
            sample_feeds(self._source, bound.signature),
            self._has_company(bound),
            fixed_rows(program.signature.most_rows) if bound.signature.supports_batching else None,
        )

    def _has_company(self, bound: BoundProgram) -> bool:
        return has_rows(self._source.config, bound.signature) and not bound.signature.dependent_rows

    def check_padding(
        self, bound: BoundProgram, program: Program, call: Callable[[Any], Any], padding: Padding, zeros_only: bool
    ) -> PaddingVerdict | None:
        """Find whether a short input has the same answer when it is padded, in the time that the rows have left: in a
        child process if `padding_job` is given, and the inputs are made up. `call`, `zeros_only`: see `length_trials`.
        None = the load check is off."""
        if self._mode is LoadCheckMode.OFF:
            return None
        seconds = max(self.seconds - self.report.seconds, 0.0)
        written, has_company = written_values(self._source.config), self._has_company(bound)
        samples = sample_feeds(self._source, bound.signature)
        new_job = None if samples else self.padding_job
        end = self.child_end if new_job else _ZEROS if zeros_only else None
        inputs = checked_inputs(bound, program.signature.inputs, end, padding)

        def check() -> PaddingVerdict:
            if new_job is None:
                trials = self.length_trials(bound, program, call, padding, zeros_only, Budget(seconds))
                return check_padding(trials, padding, written)
            try:
                job = new_job(inputs, self._seed, seconds, padding, tuple(sorted(written)), has_company)
                return self._run(job, PaddingVerdict)
            except JobError as error:
                return undecided(padding, error.text, is_lasting=error.is_crash)

        parts = (self._precision, repr(inputs), repr(has_company), samples_digest(samples))
        key = (self._digest, "eager", *machine_parts(self._device), *parts)
        verdict, took = checked_padding(self._source, padding, seconds, key, check)
        self._add(LoadCheckReport(seconds=took))
        return verdict

    def report_padding(self, verdict: PaddingVerdict) -> None:
        """Report the verdict on sizes that are written. Raises LoadCheckFailed if the check is strict, and answers
        change."""
        self._add(padding_report(verdict, self._mode))

    def check_rows_in_child(
        self, bound: BoundProgram, program: Program, job: Callable[[tuple[CheckedInput, ...], int], Job]
    ) -> None:
        """As `check_rows_here`, for compiled code, which may end its process. `job` takes the inputs and the seed, and
        gives a RowsVerdict."""
        inputs = checked_inputs(bound, program.signature.inputs, self.child_end)

        def check() -> RowsVerdict:
            try:
                return self._run(job(inputs, self._seed), RowsVerdict)
            except JobError as error:
                return RowsVerdict(Independence.UNDECIDED, f"not checked: {error.text}", is_lasting=error.is_crash)

        self._judge_rows(self._key("compiled", inputs, ()), check)

    def compiled_folder(self, kind: str, engine: str, parts: tuple[str, ...], job: Callable[[Path], Job]) -> Path:
        """Return the folder of compiled programs, as `written_folder` does, after checking the job's comparison.
        `engine`: its name in texts. Raises also LoadCheckFailed if the engine's answers differ from PyTorch's."""
        made = []

        def new_job(folder: Path) -> Job:
            made.append(folder)
            return job(folder)

        try:
            folder = written_folder(self._source, kind, (*parts, self._mode_part), new_job)
        except JobError as error:
            if error.is_crash and COMPARING in error.text:
                raise LoadCheckFailed(REFERENCE, error.text, error.code) from None
            raise
        if self._mode is not LoadCheckMode.OFF:
            self._take(engine, from_json(Comparison, (folder / COMPARISON_FILE).read_bytes()), bool(made))
        return folder

    @property
    def seconds(self) -> float:
        """The time for checks; 0 = none."""
        return 0.0 if self._mode is LoadCheckMode.OFF else self._source.settings.load_check_seconds

    @property
    def _mode_part(self) -> str:
        return "unchecked" if self._mode is LoadCheckMode.OFF else "checked"

    def _take(self, engine: str, found: Comparison, is_new: bool) -> None:
        """Report a comparison. Raises LoadCheckFailed if a program is wrong, unless such programs serve with a
        warning."""
        wrong = next((verdict for verdict in found.verdicts if not verdict.right), None)
        if wrong is not None and self._mode is not LoadCheckMode.WARN:
            raise LoadCheckFailed(
                REFERENCE,
                f"{engine} does not compute what PyTorch {torch.__version__} computes: {wrong.reason}; run the program"
                " with parameter 'engine' \"eager\", or set parameter 'load_check' to \"warn\" to serve it"
                " the same",
            )
        if found.rows is not None and self._joins:
            self._report_lasting_rows(found.rows)
        cases = sum(verdict.cases for verdict in found.verdicts)
        largest = max((verdict.largest_error for verdict in found.verdicts), default=0.0)
        parts = [f"{cases} inputs on {engine} and PyTorch, largest error {largest:.0e}"] if cases else []
        parts += [f"not compared: {found.reason}"] if found.reason else []
        remarks = [verdict.remark for verdict in found.verdicts if verdict.remark]
        if wrong is not None:
            parts, remarks = [wrong.reason], [f"{engine}'s answers differ from PyTorch's: {wrong.reason}"]
        self._add(
            LoadCheckReport(
                tuple(parts),
                "; ".join(dict.fromkeys(remarks)),
                (REFERENCE,) if wrong is not None else (),
                found.seconds if is_new else 0.0,
            )
        )

    def _report_lasting_rows(self, found: RowsVerdict) -> None:
        """Report a verdict that is kept with compiled programs. If only the time ended it, check again."""
        if found.is_lasting:
            self._report_rows(found)
            return
        key = verdict_key("rows", self._digest, "program", torch.__version__)
        self._judge_rows(key, lambda: EagerReference(self._source.model_file, self.seconds).rows())

    def note(self, text: str) -> None:
        """Add a clause to the report, if there is one."""
        if self._mode is not LoadCheckMode.OFF:
            self._add(LoadCheckReport((text,)))

    def _judge_rows(self, key: str, check: Callable[[], RowsVerdict]) -> None:
        # A child process also imports PyTorch.
        found, took = checked_rows(self._source, key, self.seconds + 60, check)
        self._add(LoadCheckReport(seconds=took))
        self._report_rows(found)

    def _report_rows(self, found: RowsVerdict) -> None:
        self.rows = found
        self._add(found.report(self._source.config.max_batch_size > 0, self._mode is LoadCheckMode.STRICT))

    def _run(self, job: Job, kind: type[Result]) -> Result:
        return JobRunner(JobEngine("PyTorch"), self._source.report_check, logging.getLogger(__name__)).run_check(
            job, kind, self.seconds
        )

    @cached_property
    def _digest(self) -> str:
        return self._verdicts.digest(self._source.model_file)

    @property
    def _seed(self) -> int:
        return seed_of(self._digest)

    def _key(self, engine: str, inputs: Sequence[CheckedInput], samples: Sequence[Feed]) -> str:
        parts = (engine, *machine_parts(self._device), self._precision, repr(inputs), samples_digest(samples))
        return verdict_key("rows", self._digest, str(self._source.config.max_batch_size), *parts)

    def _add(self, found: LoadCheckReport) -> None:
        self.report = self.report.then(found)
