"""A model on MIGraphX, as its worker serves it, and its loading from an ONNX model or a TensorFlow graph.

The program of the first batch size makes it READY; those of the others follow while it serves.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from rocserve.backends.base import Batch, BatchResult
from rocserve.backends.migraphx.binding.interface import Dimension, DimensionRange, MigraphxError, Program, shape_text
from rocserve.backends.migraphx.planning.memory import check_memory, compiled_memory, planned_memory
from rocserve.backends.migraphx.planning.plan import PlannedTensor, ProgramPlan, plan_programs
from rocserve.backends.migraphx.planning.recipe import ProgramRecipe, SourceKind
from rocserve.backends.migraphx.program_cache import ProgramAbout
from rocserve.backends.migraphx.serving.compile_context import CompileContext
from rocserve.backends.migraphx.serving.programs import (
    LoadedProgram,
    ProgramLayout,
    ProgramRunner,
    program_layout,
    varies_with_values,
)
from rocserve.core.errors import ServeError, internal, unavailable
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import Signature, TensorSpec


class MigraphxModel:
    """Programs that serve one version of a model on one device. For one thread; see LoadedModel."""

    def __init__(
        self,
        context: CompileContext,
        signature: Signature,
        runner: ProgramRunner,
        facts: Mapping[str, str] = MappingProxyType({}),
        background: BackgroundSizes | None = None,
    ) -> None:
        """`facts`: of its program, for the metadata."""
        self._context = context
        self._signature = signature
        self._outputs = tuple(spec.name for spec in signature.outputs)
        self._runner = runner
        self._facts = facts
        self._background = background
        self._last_facts: Mapping[str, str] = {}

    @property
    def signature(self) -> Signature:
        return self._signature

    @property
    def properties(self) -> Mapping[str, str]:
        """Facts about the engine, as they are now. From any thread, also of a model that is closed."""
        return self._last_facts or self._context.properties(self._runner.batch_sizes, self._facts)

    def warm_up(self, samples: Sequence[Batch]) -> None:
        """Run every program on zeros, then the samples; then the remaining batch sizes are got ready.

        A model that cannot take zeros is no fault.
        """
        try:
            self._runner.warm_up()
        except MigraphxError as error:
            name = self._context.model.name
            self._context.log.info("model '%s' could not be warmed up with zeros: %s", name, error)
        for sample in samples:
            self.execute(sample)
        if self._background is not None:
            self._background.start()

    def execute(self, batch: Batch) -> BatchResult:
        """Raises: ServeError: INVALID_ARGUMENT where the inputs are not of a shape that is served, INTERNAL in
        MIGraphX's own words where it cannot run them."""
        try:
            return BatchResult(self._runner.run(batch.arrays, batch.requested_outputs or self._outputs, batch.room))
        except MigraphxError as error:
            raise internal(f"migraphx error: {error}") from None

    def wait(self) -> None:
        """Until all batch sizes are in service or have failed, once it is warmed up."""
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """Free the programs and their buffers."""
        if self._background is not None:
            self._background.stop()
        # The properties and the background thread refer to the programs.
        self._last_facts = self.properties
        self._background = None
        del self._runner


THREAD_NAME = "batch sizes"


class BackgroundSizes:
    """Has one batch size after the other compiled and put into service; one that fails leaves the others be.

    It has its own thread, because a compile takes minutes while the worker's main thread listens to the server and
    the other one answers batches.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        prepare: Callable[[int, Callable[[str], None]], None],
        cancel: Callable[[], None],
        report: Callable[[str], None],
        log: logging.Logger,
    ) -> None:
        """
        Args:
            prepare: compiles a size, loads it and puts it into service; reports its progress by its second argument.
            cancel: ends a `prepare` that is under way, with whatever exception, and those to come. From any thread.
            report: gives the server the state, as text; "" = done.
        """
        self._sizes = sizes
        self._prepare = prepare
        self._cancel = cancel
        self._report = report
        self._log = log
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        if self._sizes:
            self._thread.start()

    def stop(self) -> None:
        """Call it off; returns when the thread has ended."""
        self._stopping.set()
        self._cancel()
        self.wait()

    def wait(self) -> None:
        """Until all sizes are in service or have failed."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        failures: dict[int, str] = {}
        for index, size in enumerate(self._sizes):
            if self._stopping.is_set():
                return
            report = functools.partial(self._report_missing, self._sizes[index:])
            report("")
            try:
                self._prepare(size, report)
            except Exception as error:
                # Anything: the sizes that are there go on serving.
                if self._stopping.is_set():
                    return
                if isinstance(error, ServeError):
                    failures[size] = error.text
                    self._log.warning("batch size %d is not in service: %s", size, error.text)
                else:
                    failures[size] = str(error) or type(error).__name__
                    self._log.error("batch size %d is not in service", size, exc_info=error)
        if not self._stopping.is_set():
            self._report(_without(failures))

    def _report_missing(self, sizes: Sequence[int], text: str) -> None:
        missing = f"serving; batch sizes still to come: {', '.join(map(str, sizes))}"
        self._report(f"{missing}; {text}" if text else missing)


def _without(failures: Mapping[int, str]) -> str:
    """All sizes that failed before the first reason, since readers cut long texts."""
    if len(failures) == 1:
        ((size, reason),) = failures.items()
        return f"serving without batch size {size}: {reason}"
    reasons = "; ".join(f"batch size {size}: {reason}" for size, reason in failures.items())
    return f"serving without batch sizes {', '.join(map(str, failures))}: {reasons}" if failures else ""


def load_compiled(
    context: CompileContext, model_file: Path | None = None, note: str = "", quantised_in: str = ""
) -> MigraphxModel:
    """
    Args:
        model_file: an ONNX file to compile instead of the version's own.
        note: for the model's metadata; why it is that file.
        quantised_in: its precision, should it hold quantising operators.

    Raises:
        ServeError: the file or the configuration is wrong, it cannot be compiled, or memory does not suffice.
    """
    plan = plan_programs(context.model, context.options, context.serving, context.environment, model_file=model_file)
    if model_file is not None:
        plan = _with_configured_names(plan, context.model.config)
    precision = quantised_in if plan.is_quantised else ""
    facts = {name: text for name, text in (("precision", precision), ("note", note)) if text}
    model = _Compiled(context, plan).load(facts)
    context.model.report("")
    return model


class _Compiled:
    def __init__(self, context: CompileContext, plan: ProgramPlan) -> None:
        self._context = context
        self._plan = plan
        self._name = context.model.name

    def load(self, facts: Mapping[str, str]) -> MigraphxModel:
        # The batch size that a file has baked in is sure to be had; others may turn out not to be.
        first, *others = sorted(self._plan.recipes, key=lambda recipe: recipe.rebatched)
        loaded = self._loaded(first)
        runner = ProgramRunner(self._name, loaded)
        signature = plan_signature(self._plan, loaded.layout, self._context.model.config)
        return MigraphxModel(self._context, signature, runner, facts, self._background(runner, others))

    def _loaded(self, recipe: ProgramRecipe, report: Callable[[str], None] | None = None) -> LoadedProgram:
        program = self._program(recipe, report)
        rows = None
        if self._plan.batches:
            rows = DimensionRange(recipe.batch_size or 1, recipe.batch_size or recipe.largest_batch)
        inputs, outputs = ([tensor.name for tensor in tensors] for tensors in (self._plan.inputs, self._plan.outputs))
        layout = program_layout(program, inputs, outputs, nhwc=recipe.source.kind is SourceKind.TENSORFLOW)
        if rows is not None:
            layout.check_batch(rows.least, self._name)
        return LoadedProgram(program, layout, rows, self._context.serving.pad_with_first_row)

    def _background(self, runner: ProgramRunner, recipes: Sequence[ProgramRecipe]) -> BackgroundSizes:
        by_size = {recipe.batch_size: recipe for recipe in recipes}

        def prepare(size: int, report: Callable[[str], None]) -> None:
            loaded = self._loaded(by_size[size], report)
            try:
                loaded.warm_up()
            except MigraphxError as error:
                self._context.log.info("batch size %d could not be warmed up with zeros: %s", size, error)
            runner.add(loaded)

        return BackgroundSizes(
            tuple(by_size), prepare, self._context.runner.call_off, self._context.model.report, self._context.log
        )

    def _program(self, recipe: ProgramRecipe, report: Callable[[str], None] | None = None) -> Program:
        """The recipe's program, compiled where it is not in the cache. With `report` while the model serves."""
        device = self._context.model.device
        check_memory(self._name, planned_memory(recipe, self._plan), device)
        cached = self._context.compiler.program(
            recipe,
            timeout_seconds=self._context.serving.compile_timeout_seconds,
            low_priority=report is not None,
            report=report,
        )
        try:
            self._check_outputs(cached.about)
            check_memory(self._name, compiled_memory(cached), device)
            return self._context.open_program(cached.path)
        finally:
            cached.release()

    def _check_outputs(self, about: ProgramAbout) -> None:
        """Refuses other outputs than the model's file says where ONNX Runtime may take over."""
        config = self._context.model.config
        if config.backend != "onnx" or config.parameters.get("engine", "") not in ("", "auto"):
            return
        for planned, output in zip(self._plan.outputs, about.outputs, strict=False):
            # `check_batch` refuses batches of such.
            if not self._plan.batches and varies_with_values(about.inputs, output):
                raise unavailable(
                    f"the shape of output '{planned.name}' depends on the values of the inputs, of which MIGraphX takes"
                    " some wrongly (such as negative axes) and does not survive others; set parameter 'engine' to"
                    ' "migraphx" to have it all the same'
                )
            if planned.shape is not None and not _agree(output.shape, planned.shape):
                raise unavailable(
                    f"MIGraphX gives output '{planned.name}' the shape {shape_text(output.shape)}, but the model's file"
                    f" says {shape_text(planned.shape)}; set parameter 'engine' to \"migraphx\" to have it all the same"
                )


def _agree(shape: Sequence[Dimension], planned: Sequence[int]) -> bool:
    """Whether a program's shape is the file's, as far as either is known."""
    return len(shape) == len(planned) and all(
        size == -1 or isinstance(dimension, DimensionRange) or dimension == size
        for dimension, size in zip(shape, planned, strict=True)
    )


def plan_signature(plan: ProgramPlan, layout: ProgramLayout, config: ModelConfig) -> Signature:
    """The signature of the plan's programs: as the model's file has it, and where that is silent, as the program."""
    served = {tensor.name: tensor for tensor in (*layout.inputs, *layout.outputs)}
    declared = {entry.name: entry.dims if entry.reshape is None else entry.reshape for entry in config.inputs}
    lead = (-1,) if plan.batches else ()

    def spec(tensor: PlannedTensor, dims: tuple[int, ...] | None = None) -> TensorSpec:
        program, shape = served.get(tensor.name), tensor.shape
        if program is not None and shape is None:
            shape = (*lead, *program.shape[len(lead) :])
        datatype = tensor.datatype if program is None else program.datatype
        assert datatype is not None and shape is not None, "what is not known beforehand is the program's"
        if dims is not None and len(lead) + len(dims) == len(shape):
            # -1 where the configuration says so of a dimension that has a number only because MIGraphX needs one.
            pairs = zip(shape, (*lead, *dims), strict=True)
            shape = tuple(-1 if theirs == -1 else ours for ours, theirs in pairs)
        return TensorSpec(tensor.name, datatype, shape)

    inputs = tuple(spec(tensor, declared.get(tensor.name)) for tensor in plan.inputs)
    return Signature(inputs, tuple(map(spec, plan.outputs)), plan.batches)


def _with_configured_names(plan: ProgramPlan, config: ModelConfig) -> ProgramPlan:
    """A program file's outputs have the configuration's names; so have those of the program compiled in its place."""
    own = {tensor.name for tensor in plan.outputs}
    if len(config.outputs) != len(plan.outputs) or all(entry.name in own for entry in config.outputs):
        return plan
    outputs = zip(plan.outputs, config.outputs, strict=True)
    return replace(plan, outputs=tuple(replace(tensor, name=entry.name) for tensor, entry in outputs))
