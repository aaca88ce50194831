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
from rocserve.backends.migraphx.configuration.options import CompileOptions, Precision, compile_options
from rocserve.backends.migraphx.installation import python_command
from rocserve.backends.migraphx.planning.recipe import ProgramRecipe, SourceKind
from rocserve.backends.migraphx.program_cache import CachedProgram
from rocserve.backends.migraphx.serving.layout import migraphx_name
from rocserve.core.errors import ServeError
from rocserve.tools.differences import Array, Difference, difference
from rocserve.tools.measuring.files import random_inputs, read_outputs, save_inputs
from rocserve.tools.measuring.messages import Measure, MigraphxPrograms
from rocserve.tools.measuring.process import MeasuringProcess
from rocserve.tools.measuring.rounds import LatencySummary, Timing, summarise, time_interleaved
from rocserve.tools.model_choice import ToolModel
from rocserve.tools.progress import ToolProgress
from rocserve.tools.tool_context import ToolContext, program_input, usable_targets

_REFERENCE = Precision.FP32
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
class Comparison:
    title: str
    """"batch size 1"."""
    place: str
    data: str
    """What the samples were: "8 random inputs"."""
    results: tuple[PrecisionResult, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A precision that has been compiled."""

    context: ToolContext
    recipe: ProgramRecipe
    program: CachedProgram


def compare_precisions(model: ToolModel, precisions: Sequence[str], timing: Timing, log: logging.Logger) -> Comparison:
    """fp32 is always among them, and first. Empty = those that can be had without being named.

    Raises:
        ServeError: fp32 cannot be compiled or run, or the samples cannot be read.
    """
    has_data = _has_calibration_data(model)
    named = precisions or ("fp16", "bf16", *(("int8", "fp8") if has_data else ()))
    with ToolProgress() as progress, TemporaryDirectory(prefix="rocserve-compare-") as folder, ExitStack() as stack:
        comparer = _Comparer(model, timing, Path(folder), progress, log, stack, has_data=has_data)
        comparer.compile(dict.fromkeys((_REFERENCE.value, *named)))
        return comparer.compare()


class _Comparer:
    def __init__(
        self,
        model: ToolModel,
        timing: Timing,
        folder: Path,
        progress: ToolProgress,
        log: logging.Logger,
        stack: ExitStack,
        *,
        has_data: bool,
    ) -> None:
        self._model = model
        self._timing = timing
        self._folder = folder
        self._progress = progress
        self._log = log
        self._stack = stack
        self._has_data = has_data
        self._candidates: dict[str, _Candidate] = {}
        self._failures: dict[str, str] = {}

    def compile(self, precisions: Mapping[str, None]) -> None:
        self._progress.steps(len(precisions))
        for precision in precisions:
            self._progress.report(f"{precision}: compiling")
            try:
                self._candidates[precision] = self._compiled(precision)
            except ServeError as error:
                self._fail(precision, error)
            self._progress.done()

    def compare(self) -> Comparison:
        reference = self._candidates[_REFERENCE.value]
        files, data = self._samples(reference)
        processes = self._open()
        outputs = {name: self._outputs(name, process, files) for name, process in processes.items()}
        orders = {name: self._order(name, files[0]) for name in outputs if outputs[name]}
        self._progress.report("timing")
        latencies = time_interleaved(processes, orders, self._timing)
        names = dict.fromkeys((*self._candidates, *self._failures))
        results = tuple(self._result(name, outputs, latencies) for name in names)
        return Comparison(reference.recipe.title, reference.context.place, data, results)

    def _compiled(self, precision: str) -> _Candidate:
        library = next((candidate.context.library for candidate in self._candidates.values()), None)
        context = ToolContext(self._model.with_precision(precision), self._progress.report, self._log, library)
        plan = context.plan()
        recipe = plan.recipes[0]
        if precision == _REFERENCE.value and self._has_data and recipe.source.kind is SourceKind.ONNX:
            # Before anything is compiled, which may take an hour. Of a TensorFlow graph only the program tells.
            datatypes = {entry.name: entry.datatype for entry in plan.inputs}
            self._read_data(
                context,
                recipe,
                {
                    name: ProgramTensor(name, migraphx_name(datatype), shape)
                    for name, shape in recipe.input_shapes.items()
                    if (datatype := datatypes[name]) is not None
                },
            )
        return _Candidate(context, recipe, context.program(recipe).program)

    def _open(self) -> dict[str, MeasuringProcess]:
        processes = {}
        for name, candidate in self._candidates.items():
            context = candidate.context
            self._progress.report(f"{name}: opening")
            process = self._stack.enter_context(MeasuringProcess(name, python_command(context.installation), {}))
            programs = {candidate.recipe.batch_size: str(candidate.program.path)}
            try:
                process.open(MigraphxPrograms(context.installation, context.serving.binding, programs))
            except ServeError as error:
                self._fail(name, error)
            else:
                processes[name] = process
        return processes

    def _fail(self, name: str, error: ServeError) -> None:
        """Go on without this precision. Raises: the error, where it is the one that the others are compared with."""
        if name == _REFERENCE.value:
            raise error
        self._failures[name] = error.text

    def _read_data(
        self, context: ToolContext, recipe: ProgramRecipe, tensors: Mapping[str, ProgramTensor]
    ) -> Sequence[Mapping[str, Array]]:
        """The runs that the calibration data make. Raises: ServeError, which names them as the command line does."""
        options = self._calibration_options(context)
        try:
            return read_calibration(self._model.source.model_folder, replace(recipe, options=options), tensors)
        except ServeError as error:
            inner = f"calibration_data '{options.calibration_data}'"
            raise ServeError(error.code, error.text.replace(inner, self._data_name(options))) from None

    def _data_name(self, options: CompileOptions) -> str:
        return f"the calibration data {self._model.calibration_data or options.calibration_data}"

    def _samples(self, reference: _Candidate) -> tuple[list[Path], str]:
        """Files with the inputs of a run each, and what they are."""
        tensors = {tensor.name: tensor for tensor in reference.program.about.inputs}
        runs: Sequence[Mapping[str, Array]]
        if self._has_data:
            self._progress.report("reading the calibration data")
            read = self._read_data(reference.context, reference.recipe, tensors)
            runs = read[:_MOST_RUNS]
            name = self._data_name(self._calibration_options(reference.context))
            data = f"{len(runs)} of {len(read)} runs of {name}"
        else:
            inputs = [program_input(tensor) for tensor in tensors.values()]
            runs = [random_inputs(inputs, seed) for seed in range(_RANDOM_RUNS)]
            data = f"{len(runs)} runs of RANDOM inputs: name real ones with --calibration-data for errors that count"
        files = []
        for number, run in enumerate(runs):
            files.append(self._folder / f"inputs-{number}.npz")
            save_inputs(files[-1], run)
        return files, data

    def _calibration_options(self, context: ToolContext) -> CompileOptions:
        config = self._model.with_precision(Precision.INT8.value).source.config
        return compile_options(
            config, self._model.source.instance_kind, usable_targets(context.library, context.device)
        )

    def _outputs(self, name: str, process: MeasuringProcess, files: Sequence[Path]) -> list[list[Array]]:
        """Of each run; nothing where one failed."""
        self._progress.report(f"{name}: running {len(files)} samples")
        outputs = []
        try:
            for file in files:
                target = self._folder / f"{name}-outputs.npz"
                process.measure(replace(self._order(name, file), repeats=0, outputs_file=str(target)))
                outputs.append(read_outputs(str(target)))
        except ServeError as error:
            self._fail(name, error)
            return []
        return outputs

    def _order(self, name: str, file: Path) -> Measure:
        candidate = self._candidates[name]
        inputs = tuple(program_input(tensor) for tensor in candidate.program.about.inputs)
        return Measure(candidate.recipe.batch_size, inputs, data_file=str(file))

    def _result(
        self, name: str, outputs: Mapping[str, list[list[Array]]], latencies: Mapping[str, list[float]]
    ) -> PrecisionResult:
        if name in self._failures:
            return PrecisionResult(name, {}, None, 0.0, 0, self._failures[name])
        candidate = self._candidates[name]
        names = [output.name for output in candidate.context.plan().outputs]
        reference = outputs[_REFERENCE.value]
        reference_latency, latency = (summarise(latencies[each]) for each in (_REFERENCE.value, name))
        return PrecisionResult(
            precision=name,
            outputs={
                output: difference(
                    (given[number], expected[number]) for given, expected in zip(outputs[name], reference, strict=True)
                )
                for number, output in enumerate(names)
            },
            latency=latency,
            speed=reference_latency.p50 / latency.p50,
            size_bytes=candidate.program.size_bytes,
        )


def _has_calibration_data(model: ToolModel) -> bool:
    config = model.source.config
    return "calibration_data" in config.parameters or "calibration_data" in accelerator_parameters(config)
