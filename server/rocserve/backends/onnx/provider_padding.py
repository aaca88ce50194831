"""Chooses the sizes to which open dimensions are padded for a model that an execution provider runs. A child process
checks on ONNX Runtime's CPU provider whether they may be padded: on a GPU a wrong input could end the process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from rocserve.backends.base import ModelSource
from rocserve.backends.migraphx.compiling.recipe import ProgramSource, SourceKind
from rocserve.backends.migraphx.compiling.wanted_sizes import MOST, WantedSizes
from rocserve.backends.onnx.checked_session import configured_sizes
from rocserve.backends.onnx.checked_sizes import checked_sizes, default_sizes, equal_dimensions
from rocserve.backends.onnx.external_weights import ExternalWeights
from rocserve.backends.onnx.rows_check import model_digest
from rocserve.backends.padding_runs import PaddingRuns, Shapes
from rocserve.backends.parameters import load_check_mode
from rocserve.backends.written_sizes import (
    half_steps,
    has_rows,
    is_written,
    open_dimensions,
    padding_report,
    padding_values,
    text_inputs,
    written_padding,
)
from rocserve.core.errors import ServeError
from rocserve.core.load_check import NOT_CHECKED, LoadCheckMode, LoadCheckReport
from rocserve.core.padding import NO_PADDING, PaddedDimension, Padding
from rocserve.core.requests import Signature
from rocserve.jobs.runner import JobEngine, JobRunner


class ProviderPadding:
    """The padding of one model."""

    def __init__(self, model: ModelSource, weights: ExternalWeights, signature: Signature, zeros: Shapes) -> None:
        """`signature`: completed with the rows' verdict. `zeros`: runs the model on zeros."""
        self._model = model
        self._weights = weights
        self._signature = signature
        self._runs = PaddingRuns(model.config, zeros, None)
        self._mode = load_check_mode(model.config, model.settings)
        self._jobs = JobRunner(JobEngine("ONNX Runtime"), model.report_check, logging.getLogger(__name__))
        self._has_rows = has_rows(model.config, signature)

    def chosen(self, by_default: bool) -> tuple[Padding, LoadCheckReport]:
        """Return the written sizes, or with `by_default` those that the check allows, and what the check says of them.
        Raises ServeError (INVALID_ARGUMENT) if the written dimensions cannot be padded, LoadCheckFailed if the check is
        strict, and answers change."""
        if is_written(self._model.config):
            return self._written()
        return self._default() if by_default else (NO_PADDING, NOT_CHECKED)

    def _written(self) -> tuple[Padding, LoadCheckReport]:
        model = self._model
        padding = self._runs.with_outputs(written_padding(model.config, self._signature, self._groups))
        if self._mode is LoadCheckMode.OFF or not padding.dimensions:
            return padding, NOT_CHECKED
        has_company = self._has_rows and not self._signature.dependent_rows
        verdict, took = checked_sizes(model, self._jobs, self._wanted(padding), has_company)
        return replace(padding, values=verdict.values), replace(padding_report(verdict, self._mode), seconds=took)

    def _default(self) -> tuple[Padding, LoadCheckReport]:
        """Return sizes up to the longest that the model takes, if the check shows that all open dimensions may be
        padded; else no dimensions, and the reason."""
        config, signature = self._model.config, self._signature
        found = open_dimensions(config, signature)
        names = {name for dimension in found for name in dimension.inputs}
        if self._mode is LoadCheckMode.OFF or not found or names & (text_inputs(signature) | signature.optional_inputs):
            return NO_PADDING, NOT_CHECKED
        sized = tuple(replace(one, sizes=half_steps(MOST), takes_others=True) for one in found)
        wanted = self._wanted(Padding(sized, padding_values(config, signature, sized)))
        sizes, took = default_sizes(self._model, self._jobs, wanted)
        reasons = tuple(dict.fromkeys(one.reason for one in sizes.verdict.dimensions))
        if not sizes.verdict.allows_all:
            return NO_PADDING, LoadCheckReport(reasons, seconds=took)
        try:
            return self._runs.with_outputs(sizes.padding), LoadCheckReport(reasons, seconds=took)
        except ServeError as error:
            return NO_PADDING, LoadCheckReport((f"not padded: {error.text}",), seconds=took)

    def _groups(self, dimensions: Sequence[PaddedDimension]) -> Sequence[Sequence[int]]:
        return equal_dimensions(self._model, self._jobs, self._wanted(Padding((*dimensions,))))

    def _wanted(self, padding: Padding) -> WantedSizes:
        source = ProgramSource(SourceKind.ONNX, str(self._model.model_file), model_digest(self._model, self._weights))
        shapes = configured_sizes(self._model.config, self._has_rows)
        return WantedSizes(source, padding, {name: tuple(dims) for name, dims in shapes.items()}, self._has_rows)
