"""What a parsed pipeline becomes in rocAL, decided before anything is built: its nodes, and what cannot be done."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from rocserve.backends.rocal.amd.binding import Binding
from rocserve.backends.rocal.amd.expressions import expression_for
from rocserve.backends.rocal.amd.node import Expression
from rocserve.backends.rocal.engine import EngineSetup, OutputFormat
from rocserve.backends.rocal.image import Extent, ResultExtent
from rocserve.backends.rocal.operations.base import Measurement, Operation, PairOperation, PipelineOperation
from rocserve.backends.rocal.pipeline import DECODED, Step
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument

_MOST_FLAGS = 2
"""Inputs that give a flag for each image. Each doubles the rocAL pipelines: one has the same flags for all images, and
its parameters cannot be changed once it is built (rocAL 2.3 takes the change and keeps the old value)."""

Flags = tuple[bool, ...]
"""The values of the pipeline's flag inputs for an image, in the order of `Plan.flag_inputs`."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    index: int
    operation: PipelineOperation
    sources: tuple[int, ...]
    """The steps whose images it reads; DECODED = what is fed."""
    flags: Mapping[str, int]
    """Keys that inputs give, each with its place among the flags."""
    expression: Expression
    source: ResultExtent
    """What is known of its (first) source."""
    result: ResultExtent
    """What is known of its result."""
    is_read: bool
    """Whether a later step reads its image."""
    output: int | None
    """Its place among the outputs."""
    format: OutputFormat | None

    def operation_for(self, flags: Flags) -> PipelineOperation:
        changes: dict[str, Any] = {key: flags[place] for key, place in self.flags.items()}
        if not changes:
            return self.operation
        return cast(PipelineOperation, dataclasses.replace(cast(Any, self.operation), **changes))


@dataclass(frozen=True, slots=True)
class PlannedMeasurement:
    output: int
    operation: Measurement


@dataclass(frozen=True, slots=True)
class Plan:
    steps: tuple[PlannedStep, ...]
    """Those that outputs depend on, in the order of the pipeline."""
    measurements: tuple[PlannedMeasurement, ...]
    """Outputs that rocAL has no part in."""
    flag_inputs: tuple[str, ...]

    @property
    def image_outputs(self) -> list[PlannedStep]:
        return [step for step in self.steps if step.output is not None]

    def variants(self) -> list[Flags]:
        return list(itertools.product((False, True), repeat=len(self.flag_inputs)))

    def misfit(self, height: int, width: int) -> str | None:
        """Why an image whose decoded pixels are so many cannot go through rocAL; None = it can."""
        decoded = Extent(height, width)
        results = {DECODED: ResultExtent(decoded, decoded)}
        for step in self.steps:
            sources = [results[source].valid for source in step.sources]
            text = step.expression.misfit(step.operation, step.source.valid, sources[0])
            if text is not None:
                return f"{step.operation.name}: {text}"
            try:
                results[step.index] = _result(step.operation, [results[source] for source in step.sources])
            except ValueError as error:
                return f"{step.operation.name}: {error}"
        return None


def make_plan(setup: EngineSetup, binding: Binding) -> Plan:
    """
    Raises:
        ServeError: INVALID_ARGUMENT, rocAL cannot do what the pipeline says; the text tells what and why.
    """
    flag_inputs = _flag_inputs(setup)
    unknown = Extent(None, None)
    results = {DECODED: ResultExtent(unknown, unknown)}
    needed = _needed(setup.pipeline.steps)
    steps: list[PlannedStep] = []
    measurements: list[PlannedMeasurement] = []
    output = 0
    for index, step in enumerate(setup.pipeline.steps):
        place = None
        if step.is_output:
            place, output = output, output + 1
        if isinstance(step.operation, Measurement):
            measurements.append(PlannedMeasurement(cast(int, place), step.operation))
            continue
        try:
            results[index] = _result(step.operation, [results[source] for source in step.sources])
            if index not in needed:
                continue
            expression = expression_for(step.operation, results[step.sources[0]], binding)
        except ValueError as error:
            raise _refused(setup, index, step, str(error)) from None
        steps.append(
            PlannedStep(
                index=index,
                operation=step.operation,
                sources=step.sources,
                flags={entry.key: flag_inputs.index(entry.input) for entry in step.bindings},
                expression=expression,
                source=results[step.sources[0]],
                result=results[index],
                is_read=needed[index],
                output=place,
                format=None if place is None else setup.formats[place],
            )
        )
    return Plan(tuple(steps), tuple(measurements), tuple(flag_inputs))


def _flag_inputs(setup: EngineSetup) -> list[str]:
    names: list[str] = []
    for index, step in enumerate(setup.pipeline.steps):
        for entry in step.bindings:
            if entry.datatype is not DataType.BOOL:
                raise _refused(
                    setup,
                    index,
                    step,
                    f"input '{entry.input}' gives '{entry.key}' for each image, but rocAL takes one number for all"
                    " images; write the number into the pipeline, or use the CPU engine",
                )
            if entry.input not in names:
                names.append(entry.input)
            if len(names) > _MOST_FLAGS:
                raise _refused(
                    setup,
                    index,
                    step,
                    f"input '{entry.input}' is one flag too many: each image may have {_MOST_FLAGS} with rocAL,"
                    " any number with the CPU engine",
                )
    return names


def _needed(steps: tuple[Step, ...]) -> dict[int, bool]:
    """The steps that outputs depend on; the value says whether a needed step reads the image."""
    needed: dict[int, bool] = {}
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        if step.is_output:
            needed.setdefault(index, False)
        if index in needed:
            needed.update(dict.fromkeys(step.sources, True))
    return needed


def _result(operation: PipelineOperation, sources: list[ResultExtent]) -> ResultExtent:
    if isinstance(operation, PairOperation):
        return operation.extent_of_pair(sources[0].valid, sources[1].valid)
    return cast(Operation, operation).result_extent(sources[0])


def _refused(setup: EngineSetup, index: int, step: Step, text: str) -> ServeError:
    return invalid_argument(
        f"model '{setup.model_name}' cannot run on rocAL: pipeline[{index}] ({step.operation.name}): {text}"
    )
