"""The load check of one instance: whether the rows of its program depend on each other, and whether an engine that
compiles the program computes what PyTorch does. Verdicts are kept in the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from rocserve.backends.base import ModelSource
from rocserve.backends.parameters import load_check_mode
from rocserve.backends.pytorch.binding import BoundProgram
from rocserve.backends.pytorch.checked_tensors import checked_inputs, fixed_rows, run_of, unchanged
from rocserve.backends.pytorch.job_files import machine_parts
from rocserve.backends.pytorch.program import Program
from rocserve.cache.digests import file_digest
from rocserve.cache.folders import cache_directory
from rocserve.core.load_check import NOT_CHECKED, ROWS, LoadCheckMode, LoadCheckReport
from rocserve.load_check.budget import Budget
from rocserve.load_check.rows import Independence, RowsVerdict, check_rows
from rocserve.load_check.verdict_cache import VerdictCache, verdict_key

_TIME_ENDED = "the time ended"
"""Part of a verdict of which another load may know more."""


class ModelCheck:
    """Checks one instance during its load, and has the report. For one thread."""

    def __init__(self, source: ModelSource, device: Any, precision: str) -> None:
        """`device`, `precision`: of the computation. Raises ServeError (INVALID_ARGUMENT) if the parameter
        `load_check` is wrong."""
        self.report: LoadCheckReport = NOT_CHECKED
        self.rows: RowsVerdict | None = None
        """None = the rows were not checked."""
        self._source = source
        self._device = device
        self._precision = precision
        self._mode = load_check_mode(source.config, source.settings)
        self._verdicts = VerdictCache(cache_directory(source.settings))

    @property
    def couples_rows(self) -> bool:
        """Whether a row's answer changes with its neighbours."""
        return self.rows is not None and self.rows.state is Independence.DEPENDENT

    @property
    def allows_padding(self) -> bool:
        """Whether batches may be padded and cut: their rows are independent, or the configuration vouches for rows that
        no check could decide on."""
        return not self.dependent_rows or not (self.couples_rows or self._source.config.has_open_batch)

    @property
    def dependent_rows(self) -> str:
        """Why the rows of requests may depend on each other; "" = they do not, or were not checked."""
        return "" if self.rows is None or self.rows.state is Independence.INDEPENDENT else self.rows.reason

    def asks_for_rows(self, bound: BoundProgram) -> bool:
        """Return whether requests may be joined, so that it matters what their rows do to each other."""
        config = self._source.config
        is_joined = config.max_batch_size > 1 or config.has_open_batch
        return self._mode is not LoadCheckMode.OFF and bound.signature.supports_batching and is_joined

    def check_rows_here(self, bound: BoundProgram, program: Program, call: Callable[[Any], Any]) -> None:
        """Find in this process whether rows depend on each other. `call` runs the program on the inputs in its
        order."""
        is_gpu = self._device.type != "cpu"
        inputs = checked_inputs(bound, program.signature.inputs, zeros_only=is_gpu)

        def check() -> RowsVerdict:
            budget = Budget(self._source.settings.load_check_seconds)
            outputs, most_rows = tuple(bound.outputs), fixed_rows(program.signature.most_rows)
            with unchanged(program):
                return check_rows(
                    run_of(bound, call), inputs, outputs, program.facts, budget, self._seed, (), is_gpu, most_rows
                )

        self._judge_rows(self._key("rows", "eager", repr(inputs)), check)

    def _judge_rows(self, key: str, check: Callable[[], RowsVerdict]) -> None:
        self.rows = self._verdicts.find(key, RowsVerdict)
        if self.rows is None:
            with self._checking("running batches of different rows"):
                self.rows = check()
            if _TIME_ENDED not in self.rows.reason:
                self._verdicts.remember(key, self.rows)
        self._add(LoadCheckReport((self.rows.reason,)))
        if self.dependent_rows and self._source.config.max_batch_size > 0:
            failures = (ROWS,) if self.couples_rows else ()
            self._add(LoadCheckReport(warning=f"batched as configured, but {self.rows.reason}", failures=failures))

    @cached_property
    def _digest(self) -> str:
        return file_digest(self._source.model_file)

    @property
    def _seed(self) -> int:
        return int(self._digest[:8], 16)

    def _key(self, check: str, engine: str, tensors: str) -> str:
        return verdict_key(check, self._digest, engine, *machine_parts(self._device), self._precision, tensors)

    def _add(self, found: LoadCheckReport) -> None:
        self.report = self.report.then(found)

    @contextmanager
    def _checking(self, what: str) -> Iterator[None]:
        """Show the model as being checked, and count the time."""
        started = time.monotonic()
        self._source.report_check(what)
        try:
            yield
        finally:
            self._source.report_check("")
            self._add(LoadCheckReport(seconds=time.monotonic() - started))
