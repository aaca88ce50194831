"""Compares a model's precisions: the errors of each against fp32, on samples of its inputs, and the speed of each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rocserve.backends.migraphx.binding.interface import ProgramTensor
from rocserve.backends.migraphx.calibration import read_calibration
from rocserve.backends.migraphx.configuration.accelerator import accelerator_parameters
from rocserve.backends.migraphx.configuration.options import Precision, compile_options
from rocserve.backends.migraphx.installation import python_command
from rocserve.backends.migraphx.planning.recipe import ProgramRecipe, SourceKind
from rocserve.backends.migraphx.program_cache import CachedProgram
from rocserve.backends.migraphx.serving.layout import migraphx_name
from rocserve.core.errors import ServeError, unavailable
from rocserve.tools.measuring.comparing import Array, Candidate, Compared, Comparison, Difference
from rocserve.tools.measuring.files import random_inputs, save_inputs
from rocserve.tools.measuring.messages import MigraphxPrograms
from rocserve.tools.measuring.rounds import LatencySummary, Timing
from rocserve.tools.model_choice import ToolModel
from rocserve.tools.progress import ToolProgress
from rocserve.tools.tool_context import ToolContext, program_input, usable_targets

_REFERENCE = Precision.FP32.value
_RANDOM_RUNS = 8
_MOST_RUNS = 64
"""Of the calibration data; the differences are of this many runs at most."""


@dataclass(frozen=True, slots=True)
class PrecisionResult:
    precision: str
    outputs: Mapping[str, Difference]
    """By output, against fp32."""
    latency: LatencySummary | None
    """Of a run; None where it failed."""
    speed: float
    """fp32's median time over its own."""
    size_bytes: int
    """Of the program."""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class PrecisionComparison:
    title: str
    """"batch size 1"."""
    place: str
    data: str
    """What the samples were: "8 random inputs"."""
    results: tuple[PrecisionResult, ...]


@dataclass(frozen=True, slots=True)
class _Compiled:
    """The model in one precision."""

    context: ToolContext
    recipe: ProgramRecipe
    program: CachedProgram

    def candidate(self, precision: str) -> Candidate:
        installation, binding = self.context.installation, self.context.serving.binding
        size = self.recipe.batch_size
        return Candidate(
            precision,
            MigraphxPrograms(installation, binding, {size: str(self.program.path)}),
            {size: tuple(program_input(tensor) for tensor in self.program.about.inputs)},
            python_command(installation),
        )


def compare_precisions(
    model: ToolModel, precisions: Sequence[str], timing: Timing, log: logging.Logger
) -> PrecisionComparison:
    """fp32 is always among them, and first. Empty = those that can be had without being named.

    Raises:
        ServeError: fp32 cannot be compiled or run, or the samples cannot be read.
    """
    has_data = _has_calibration_data(model)
    named = precisions or ("fp16", "bf16", *(("int8", "fp8") if has_data else ()))
    compiled: dict[str, _Compiled] = {}
    failures: dict[str, str] = {}
    with ToolProgress() as progress, TemporaryDirectory(prefix="rocserve-compare-") as folder, ExitStack() as stack:
        precisions = tuple(dict.fromkeys((_REFERENCE, *named)))
        progress.steps(len(precisions))
        for precision in precisions:
            progress.report(f"{precision}: compiling")
            library = compiled[_REFERENCE].context.library if compiled else None
            try:
                context = ToolContext(model.with_precision(precision), progress.report, log, library)
                compiled[precision] = _compile(context, model if has_data and precision == _REFERENCE else None)
            except ServeError as error:
                if precision == _REFERENCE:
                    raise
                failures[precision] = f"{precision}: {error.text}"
            progress.done()
        reference = compiled[_REFERENCE]
        progress.report("reading the calibration data")
        files, data = _samples(reference, model if has_data else None, Path(folder))
        comparison = Comparison([one.candidate(name) for name, one in compiled.items()], stack, progress.report)
        progress.report(f"running {len(files)} samples, and timing")
        compared = comparison.compare(reference.recipe.batch_size, files, timing)
    failures |= comparison.failures
    if compared[_REFERENCE].failure:
        raise unavailable(compared[_REFERENCE].failure)
    compared |= {name: Compared(failure=failure) for name, failure in failures.items()}
    results = tuple(_result(name, compared[name], compared[_REFERENCE], compiled) for name in compared)
    return PrecisionComparison(reference.recipe.title, reference.context.place, data, results)


def _result(name: str, one: Compared, reference: Compared, compiled: Mapping[str, _Compiled]) -> PrecisionResult:
    if one.latency is None or reference.latency is None:
        return PrecisionResult(name, {}, None, 0.0, 0, one.failure)
    made = compiled[name]
    outputs = [output.name for output in made.context.plan().outputs]
    return PrecisionResult(
        precision=name,
        outputs=dict(zip(outputs, one.differences, strict=True)),
        latency=one.latency,
        speed=reference.latency.p50 / one.latency.p50,
        size_bytes=made.program.size_bytes,
    )


def _compile(context: ToolContext, calibrated: ToolModel | None) -> _Compiled:
    """`calibrated`: its calibration data are read before, as a compile may take an hour."""
    plan = context.plan()
    recipe = plan.recipes[0]
    # Of a TensorFlow graph only the program tells the inputs.
    if calibrated is not None and recipe.source.kind is SourceKind.ONNX:
        datatypes = {entry.name: entry.datatype for entry in plan.inputs}
        tensors = {
            name: ProgramTensor(name, migraphx_name(datatype), shape)
            for name, shape in recipe.input_shapes.items()
            if (datatype := datatypes[name]) is not None
        }
        _read_data(calibrated, context, recipe, tensors)
    return _Compiled(context, recipe, context.program(recipe).program)


def _samples(reference: _Compiled, calibrated: ToolModel | None, folder: Path) -> tuple[list[str], str]:
    """Files with the inputs of a run each, and what they are."""
    tensors = {tensor.name: tensor for tensor in reference.program.about.inputs}
    runs: Sequence[Mapping[str, Array]]
    if calibrated is not None:
        read, name = _read_data(calibrated, reference.context, reference.recipe, tensors)
        runs = read[:_MOST_RUNS]
        data = f"{len(runs)} of {len(read)} runs of {name}"
    else:
        inputs = [program_input(tensor) for tensor in tensors.values()]
        runs = [random_inputs(inputs, seed) for seed in range(_RANDOM_RUNS)]
        data = f"{len(runs)} runs of RANDOM inputs: name real ones with --calibration-data for errors that count"
    files = [folder / f"inputs-{number}.npz" for number in range(len(runs))]
    for file, run in zip(files, runs, strict=True):
        save_inputs(file, run)
    return [str(file) for file in files], data


def _read_data(
    model: ToolModel, context: ToolContext, recipe: ProgramRecipe, tensors: Mapping[str, ProgramTensor]
) -> tuple[Sequence[Mapping[str, Array]], str]:
    """The runs that the calibration data make, and what these are called on the command line, as in errors."""
    source = model.with_precision(Precision.INT8.value).source
    options = compile_options(source.config, source.instance_kind, usable_targets(context.library, context.device))
    name = f"the calibration data {model.calibration_data or options.calibration_data}"
    try:
        return read_calibration(source.model_folder, replace(recipe, options=options), tensors), name
    except ServeError as error:
        inner = f"calibration_data '{options.calibration_data}'"
        raise ServeError(error.code, error.text.replace(inner, name)) from None


def _has_calibration_data(model: ToolModel) -> bool:
    config = model.source.config
    return "calibration_data" in config.parameters or "calibration_data" in accelerator_parameters(config)
