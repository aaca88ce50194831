"""Runs `rocserve compare MODEL`: compiles it with MIGraphX in several precisions, and compares errors and speeds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rocserve.backends.migraphx.binding import ProgramTensor
from rocserve.backends.migraphx.compiling.calibration import read_calibration
from rocserve.backends.migraphx.compiling.plan import ProgramPlan
from rocserve.backends.migraphx.compiling.program_cache import CachedProgram
from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe, SourceKind
from rocserve.backends.migraphx.options import Precision, accelerator_parameters, compile_options
from rocserve.backends.migraphx.tensors import client_view, migraphx_name
from rocserve.core.errors import ServeError, unavailable
from rocserve.core.printable import readable_size as size
from rocserve.settings.flag import part
from rocserve.verbs.engines import on_migraphx
from rocserve.verbs.model_choice import ModelOptions, ToolModel, find_model, with_batch_sizes
from rocserve.verbs.printing import ToolProgress, complain, console_on, say, show, table
from rocserve.verbs.tool_context import ToolContext, usable_targets
from rocserve.verbs.verb import Verb
from rocserve.verbs.workers import ToolWorkers
from rocserve_tools.measuring.candidates import Candidate, MeasuredInput, random_inputs
from rocserve_tools.measuring.comparing import Compared, Comparison
from rocserve_tools.measuring.figures import LatencySummary, Timing
from rocserve_tools.measuring.timed_runs import Sample

_REFERENCE = Precision.FP32.value
_MOST_RUNS = 64
"""Runs of calibration data that are compared at most."""
_COMPARED_COLUMNS = (
    "precision", "output", "largest", "mean", "relative", "cosine", "top-1", "p50 ms", "speed", ".mxr file",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Compiled:
    context: ToolContext
    plan: ProgramPlan
    program: CachedProgram
    """The program of the plan's first recipe."""

    def candidate(self, precision: str) -> Candidate:
        model, size = self.context.model, self.plan.recipes[0].batch_size
        return Candidate(on_migraphx(with_batch_sizes(model, (size,)) if size else model, precision))

    def rows(self, precision: str, compared: Compared, reference: LatencySummary) -> Iterator[Sequence[str]]:
        assert compared.latency is not None
        p50 = compared.latency.p50
        speed = (f"{p50:.3f}", f"{reference.p50 / p50:.3g} x", size(self.program.size_bytes))
        for output, error in zip(self.plan.outputs, compared.differences, strict=True):
            errors = (f"{error.largest:.3g}", f"{error.mean:.3g}", f"{error.relative:.3g}", f"{error.cosine:.6f}")
            top1 = "-" if error.top1 is None else f"{error.top1:.1%}"
            yield (precision, output.name, *errors, top1, *speed)


@dataclass(frozen=True, slots=True)
class CompareOptions:
    model: ModelOptions = part(ModelOptions, "model")
    timing: Timing = part(lambda: Timing(seconds=1.0), "timing")


def compare(options: CompareOptions) -> int:
    """Compile the model in each precision, fp32 first, print errors and speeds, and return the exit status: 1 if a
    precision failed. Raises ServeError if fp32 cannot be compiled or run, or if the samples cannot be read."""
    model, out = find_model(replace(options.model, precision=())), console_on()
    config = model.source.config
    has_data = "calibration_data" in config.parameters or "calibration_data" in accelerator_parameters(config)
    named = options.model.precision or ("fp16", "bf16", *(("int8", "fp8") if has_data else ()))
    compiled: dict[str, _Compiled] = {}
    failures: dict[str, str] = {}
    with ToolProgress() as progress:
        precisions = tuple(dict.fromkeys((_REFERENCE, *named)))
        progress.steps(len(precisions))
        for precision in precisions:
            progress.report(f"{precision}: compiling")
            library = compiled[_REFERENCE].context.library if compiled else None
            try:
                context = ToolContext(model.with_precision(precision), progress.report, library)
                compiled[precision] = _compile(context, model if has_data and precision == _REFERENCE else None)
            except ServeError as error:
                if precision == _REFERENCE:
                    raise
                failures[precision] = f"{precision}: {error.text}"
            progress.done()
        measured = asyncio.run(_measure(compiled, model if has_data else None, options.timing, progress))
    comparison, compared, data = measured
    reference = compiled[_REFERENCE]
    if (fp32 := compared[_REFERENCE].latency) is None:
        raise unavailable(compared[_REFERENCE].failure)
    failures |= comparison.failures | {name: one.failure for name, one in compared.items() if one.failure}
    rows: list[Sequence[str]] = []
    for name in (*compared, *(name for name in failures if name not in compared)):
        if name in failures:
            rows.append((name, "failed", *["-"] * (len(_COMPARED_COLUMNS) - 2)))
        else:
            rows += compiled[name].rows(name, compared[name], fp32)
    title = f"{model.source.name}, {reference.plan.recipes[0].title}, {reference.context.place}"
    show(out, table(title, _COMPARED_COLUMNS, rows, left=2))
    say(out, f"errors against fp32, on {data}")
    say(out, "top-1: the share of rows whose largest element is at the same place; speed: fp32's p50 over its own")
    for failure in failures.values():
        complain(f"rocserve compare: {failure}")
    return 1 if failures else 0


async def _measure(
    compiled: Mapping[str, _Compiled],
    calibration_model: ToolModel | None,
    timing: Timing,
    progress: ToolProgress,
) -> tuple[Comparison, dict[str, Compared], str]:
    """Return the opened precisions, their figures, and a text that describes the inputs."""
    comparison, reference = Comparison(), compiled[_REFERENCE]
    async with ToolWorkers(reference.context.model.source.settings, progress.report) as workers:
        for precision, one in compiled.items():
            progress.report(f"opening {precision}")
            await comparison.add(precision, partial(one.candidate, precision), workers)
        recipe = reference.plan.recipes[0]
        batch_size = recipe.batch_size
        progress.report("reading the calibration data")
        samples, data = _samples(reference, calibration_model, comparison.inputs[batch_size])
        progress.report(f"running {len(samples)} samples, and timing")
        return comparison, await comparison.compare(batch_size, samples, timing), data


def _compile(context: ToolContext, calibration_model: ToolModel | None) -> _Compiled:
    """Plan and compile the model. The calibration data of `calibration_model`, if given, are read before, because a
    compile may take an hour."""
    plan = context.plan()
    recipe = plan.recipes[0]
    # The inputs of a TensorFlow graph are known only when its program exists.
    if calibration_model is not None and recipe.source.kind is SourceKind.ONNX:
        datatypes = {entry.name: entry.datatype for entry in plan.inputs}
        tensors = {
            name: ProgramTensor(name, migraphx_name(datatype), shape)
            for name, shape in recipe.input_shapes.items()
            if (datatype := datatypes[name]) is not None
        }
        _read_data(calibration_model, context, recipe, tensors)
    return _Compiled(context, plan, context.program(recipe)[0])


def _samples(
    reference: _Compiled, calibration_model: ToolModel | None, inputs: Sequence[MeasuredInput]
) -> tuple[Sequence[Sample], str]:
    """Return the inputs of each run, and a text that describes them."""
    if calibration_model is None:
        runs: Sequence[Sample] = [random_inputs(inputs, seed) for seed in range(8)]
        return runs, f"{len(runs)} runs of RANDOM inputs: name real ones with --calibration-data for errors that count"
    tensors = {tensor.name: tensor for tensor in reference.program.about.inputs}
    recipe = reference.plan.recipes[0]
    read, name = _read_data(calibration_model, reference.context, recipe, tensors)
    runs = read[:_MOST_RUNS]
    if recipe.source.kind is SourceKind.TENSORFLOW:
        # Calibration data have the program's layout, but the model's inputs have the client's.
        runs = [{key: client_view(array) for key, array in run.items()} for run in runs]
    return runs, f"{len(runs)} of {len(read)} runs of {name}"


def _read_data(
    model: ToolModel, context: ToolContext, recipe: ProgramRecipe, tensors: Mapping[str, ProgramTensor]
) -> tuple[Sequence[Sample], str]:
    """Return the runs that the calibration data contain, and the data's name in error texts, as on the command line."""
    source = model.with_precision(Precision.INT8.value).source
    options = compile_options(source.config, source.instance_kind, usable_targets(context.library, context.device))
    name = f"the calibration data {model.calibration_data or options.calibration_data}"
    try:
        return read_calibration(source.model_folder, replace(recipe, options=options), tensors), name
    except ServeError as error:
        inner = f"calibration_data '{options.calibration_data}'"
        raise ServeError(error.code, error.text.replace(inner, name)) from None


VERB = Verb(
    "Compile a model with MIGraphX in each precision of --precision (default fp32, fp16 and bf16, with calibration data"
    " int8 and fp8 too), and report the errors against fp32 and the speed.",
    CompareOptions(),
    compare,
    lambda options: options.model.model,
)
