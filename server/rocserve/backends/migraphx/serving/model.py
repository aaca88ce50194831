"""Loads an ONNX model or a TensorFlow graph on MIGraphX, and serves it in a worker.

The model is READY with the program of the first batch size. The programs of the other sizes follow while it serves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rocserve.backends.base import Batch, BatchResult, ModelSource
from rocserve.backends.migraphx.binding.interface import Binding, DimensionRange, MigraphxError, Program, shape_text
from rocserve.backends.migraphx.binding.module import open_binding
from rocserve.backends.migraphx.compiler import ProgramCompiler
from rocserve.backends.migraphx.configuration.options import (
    CompileOptions,
    ServingOptions,
    Target,
    compile_options,
    serving_options,
)
from rocserve.backends.migraphx.installation import find_installation
from rocserve.backends.migraphx.jobs.child import migraphx_jobs, with_hint
from rocserve.backends.migraphx.model_files.graph import GraphTensor
from rocserve.backends.migraphx.planning.plan import (
    ProgramPlan,
    check_memory,
    compiled_memory,
    plan_programs,
    planned_memory,
)
from rocserve.backends.migraphx.planning.recipe import (
    ProgramEnvironment,
    ProgramRecipe,
    SourceKind,
    program_environment,
)
from rocserve.backends.migraphx.program_cache import ProgramAbout, open_cache
from rocserve.backends.migraphx.serving.programs import (
    LoadedProgram,
    ProgramLayout,
    ProgramRunner,
    program_layout,
)
from rocserve.backends.migraphx.tensors import varies_with_values
from rocserve.backends.parameters import asked_engine
from rocserve.core.errors import ServeError, internal, unavailable
from rocserve.core.requests import Signature, TensorSpec
from rocserve.jobs.runner import JobRunner


@dataclass(frozen=True, slots=True)
class CompileContext:
    model: ModelSource
    binding: Binding
    options: CompileOptions
    serving: ServingOptions
    environment: ProgramEnvironment
    compiler: ProgramCompiler
    log: logging.Logger

    def properties(self, batch_sizes: str, of_program: Mapping[str, str]) -> Mapping[str, str]:
        """Return facts about the engine for the model's metadata. `batch_sizes`: the sizes in service. `of_program`:
        facts about the program, which override facts that follow from the parameters. Empty facts are left out."""
        facts = {
            "migraphx_version": self.binding.migraphx_version,
            "migraphx_binding": self.binding.name,
            "migraphx_library": self.binding.library,
            "rocm_version": self.environment.rocm_version,
            "gpu_architecture": self.environment.gpu_architecture,
            "target": self.options.target.value,
            "precision": self.options.precision.value,
            "batch_sizes": batch_sizes,
            **of_program,
        }
        return {name: value for name, value in facts.items() if value}

    def open_program(self, path: Path) -> Program:
        """Load a program that a child has tried. Raises ServeError (UNAVAILABLE) if MIGraphX refuses it here."""
        try:
            return self.binding.load(path)
        except MigraphxError as error:
            raise unavailable(f"MIGraphX cannot load {path.name}: {with_hint(str(error))}") from None
        finally:
            for line in self.binding.take_messages():
                self.log.info("MIGraphX: %s", line)


def open_compile_context(model: ModelSource, log: logging.Logger) -> CompileContext:
    """Load MIGraphX, check its target, and open the cache and the compiler for a model. Raises ServeError (UNAVAILABLE)
    if MIGraphX or the target cannot be used here, ServeError (INVALID_ARGUMENT) if a parameter is wrong."""
    installation = find_installation(model.settings)
    serving = serving_options(model.config)
    try:
        binding = open_binding(installation, serving.binding)
    except MigraphxError as error:
        raise unavailable(f"MIGraphX cannot be loaded: {with_hint(str(error))}") from None
    targets = usable_targets(binding, has_gpu=model.device is not None)
    options = compile_options(model.config, model.instance_kind, targets)
    try:
        binding.check_target(options.target.value)
    except MigraphxError as error:
        raise unavailable(f"MIGraphX's target {options.target.value} cannot be used: {with_hint(str(error))}") from None
    device = model.device if options.target is Target.GPU else None
    environment = program_environment(options.target, device, binding.migraphx_version)
    cache = open_cache(model.settings, log.warning)
    runner = JobRunner(migraphx_jobs(installation, serving.binding), model.report, log)
    compiler = ProgramCompiler(runner, cache, model_name=model.name, model_folder=model.model_folder)
    return CompileContext(model, binding, options, serving, environment, compiler, log)


def usable_targets(binding: Binding, has_gpu: bool) -> Sequence[Target]:
    """Return the targets that programs can be compiled for and run on here, preferred first."""
    targets = [Target.GPU] if has_gpu else []
    for target in (Target.CPU, Target.REF):
        try:
            binding.check_target(target.value)
        except MigraphxError:
            continue
        targets.append(target)
    return targets


@dataclass(eq=False)
class MigraphxModel:
    """Serves one model version on one device with MIGraphX programs. For one thread; see LoadedModel."""

    _context: CompileContext
    signature: Signature
    _runner: ProgramRunner
    _facts: Mapping[str, str]
    """Facts about the program, which override facts that follow from the parameters."""
    _background: BackgroundSizes | None = None

    def __post_init__(self) -> None:
        self.properties: Mapping[str, str] = self._context.properties(self._runner.batch_sizes, self._facts)
        """Facts about the engine, replaced as a whole. Any thread may ask, also after `close`."""

    def add(self, program: LoadedProgram) -> None:
        """Put a program into service; it replaces one of the same batch size. Only one thread may call this."""
        self._runner.add(program)
        self.properties = self._context.properties(self._runner.batch_sizes, self._facts)

    def warm_up(self, samples: Sequence[Batch]) -> None:
        """Run every program on zeros, then run the samples, then start preparing the remaining batch sizes. A failure
        on zeros is only logged."""
        try:
            self._runner.warm_up()
        except MigraphxError as error:
            name = self._context.model.name
            self._context.log.debug("model '%s' could not be warmed up with zeros: %s", name, error)
        for sample in samples:
            self.execute(sample)
        if self._background is not None:
            self._background.start()

    def execute(self, batch: Batch) -> BatchResult:
        """Run a batch. Raises ServeError (INVALID_ARGUMENT) for inputs of a shape that is not served, ServeError
        (INTERNAL) with MIGraphX's text if a run fails."""
        try:
            wanted = batch.requested_outputs or tuple(spec.name for spec in self.signature.outputs)
            return BatchResult(self._runner.run(batch.arrays, wanted, batch.room))
        except MigraphxError as error:
            raise internal(f"migraphx error: {error}") from None

    def wait(self) -> None:
        """After `warm_up`: wait until all batch sizes are in service or have failed."""
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        if self._background is not None:
            self._background.stop()
        # The runner and the background thread keep the programs alive.
        self._background = None
        del self._runner


THREAD_NAME = "batch sizes"


@dataclass(eq=False)
class BackgroundSizes:
    """Compiles the remaining batch sizes one by one and puts them into service. A failed size does not stop the others.
    The sizes need a separate thread because a compile takes minutes, while the worker's main thread listens to the
    server and its second thread answers batches."""

    _sizes: Sequence[str]
    """For people; a tuned program that replaces another counts as a size."""
    _prepare: Callable[[str, Callable[[str], None]], None]
    """Compiles a size, loads it and puts it into service. The second argument reports progress."""
    _cancel: Callable[[], None]
    """Makes the running `_prepare` and all later ones raise. May be called on any thread."""
    _report: Callable[[str], None]
    """Sends the state to the server; "" = done."""
    _log: logging.Logger
    _stopping: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        if self._sizes:
            self._thread.start()

    def stop(self) -> None:
        """Cancel the compiles, and wait for the thread to end."""
        self._stopping.set()
        self._cancel()
        self.wait()

    def wait(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        failures: dict[str, str] = {}
        for index, size in enumerate(self._sizes):
            if self._stopping.is_set():
                return
            missing = f"serving; batch sizes still to come: {', '.join(self._sizes[index:])}"

            def report(text: str, missing: str = missing) -> None:
                self._report(f"{missing}; {text}" if text else missing)

            report("")
            try:
                self._prepare(size, report)
            except Exception as error:
                # Any error is caught because the sizes in service go on serving.
                if self._stopping.is_set():
                    return
                if isinstance(error, ServeError):
                    failures[size] = error.text
                    self._log.warning("batch size %s is not in service: %s", size, error.text)
                else:
                    failures[size] = str(error) or type(error).__name__
                    self._log.error("batch size %s is not in service", size, exc_info=error)
        if not self._stopping.is_set():
            # All failed sizes come before the first reason because readers cut long texts.
            text = "; ".join(f"batch size {size}: {reason}" for size, reason in failures.items())
            if failures:
                sizes = f"batch sizes {', '.join(failures)}: " if len(failures) > 1 else ""
                text = f"serving without {sizes}{text}"
            self._report(text)


def load_compiled(
    context: CompileContext, model_file: Path | None = None, note: str = "", quantised_in: str = ""
) -> MigraphxModel:
    """Compile the version's own file, or `model_file`, an ONNX file, and return the served model. `note` is the reason
    for `model_file` in the metadata. `quantised_in` is the precision in the metadata if the file holds quantising
    operators. Raises ServeError if the file or the configuration is wrong, the compile fails, or memory does not
    suffice."""
    config = context.model.config
    plan = plan_programs(context.model, context.options, context.serving, context.environment, model_file=model_file)
    own = {tensor.name for tensor in plan.outputs}
    if model_file and len(config.outputs) == len(plan.outputs) and any(out.name not in own for out in config.outputs):
        # A compiled program's outputs have the configuration's names, so its replacement's outputs have them, too.
        pairs = zip(plan.outputs, config.outputs, strict=True)
        plan = replace(plan, outputs=tuple(replace(tensor, name=entry.name) for tensor, entry in pairs))
    precision = quantised_in if plan.is_quantised else ""
    facts = {name: text for name, text in (("precision", precision), ("note", note)) if text}
    compiled = _Compiled(context, plan)
    # The batch size that a file fixes always works; other sizes may fail.
    first, *others = sorted(plan.recipes, key=lambda recipe: recipe.rebatched)
    soonest = context.compiler.first_to_serve(first)
    loaded = compiled.program(soonest)
    runner = ProgramRunner(context.model.name, loaded)
    later = {str(recipe.batch_size): recipe for recipe in others}
    if soonest is not first:
        later = {f"{first.batch_size or 'all'} (tuned)": first, **later}

    def prepare(size: str, report: Callable[[str], None]) -> None:
        program = compiled.program(later[size], report)
        try:
            program.warm_up()
        except MigraphxError as error:
            context.log.debug("batch size %s could not be warmed up with zeros: %s", size, error)
        model.add(program)

    background = BackgroundSizes(
        tuple(later), prepare, context.compiler.runner.call_off, context.model.report, context.log
    )
    model = MigraphxModel(context, compiled.signature(loaded.layout), runner, facts, background)
    context.model.report("")
    return model


@dataclass(frozen=True, slots=True)
class _Compiled:
    context: CompileContext
    plan: ProgramPlan

    def program(self, recipe: ProgramRecipe, report: Callable[[str], None] | None = None) -> LoadedProgram:
        """Return the recipe's program, compiled if it is not cached. `report` is given if the model serves already."""
        context, plan, model = self.context, self.plan, self.context.model
        check_memory(model.name, planned_memory(recipe, plan), model.device)
        timeout = context.serving.compile_timeout_seconds
        cached = context.compiler.program(
            recipe, timeout_seconds=timeout, low_priority=report is not None, report=report
        )
        try:
            self._check_outputs(cached.about)
            check_memory(model.name, compiled_memory(cached), model.device)
            program = context.open_program(cached.path)
        finally:
            cached.release()
        rows = None
        if plan.batches:
            rows = DimensionRange(recipe.batch_size or 1, recipe.batch_size or recipe.largest_batch)
        inputs, outputs = ([tensor.name for tensor in tensors] for tensors in (plan.inputs, plan.outputs))
        layout = program_layout(program, inputs, outputs, nhwc=recipe.source.kind is SourceKind.TENSORFLOW)
        if rows is not None:
            layout.check_batch(rows.least, model.name)
        return LoadedProgram(program, layout, rows, context.serving.pad_with_first_row)

    def _check_outputs(self, about: ProgramAbout) -> None:
        """Refuse outputs that differ from the model's file, if ONNX Runtime may run the model instead."""
        config = self.context.model.config
        if config.backend != "onnx" or asked_engine(config) not in ("", "auto"):
            return
        for planned, output in zip(self.plan.outputs, about.outputs, strict=False):
            # If the model batches, `check_batch` refuses such outputs.
            if not self.plan.batches and varies_with_values(about.inputs, output):
                raise unavailable(
                    f"the shape of output '{planned.name}' depends on the values of the inputs, of which MIGraphX takes"
                    " some wrongly (such as negative axes) and does not survive others; set parameter 'engine' to"
                    ' "migraphx" to use MIGraphX anyway'
                )
            # The shapes are compared as far as both are known.
            if planned.shape is not None and (
                len(output.shape) != len(planned.shape)
                or any(
                    size != -1 and not isinstance(dimension, DimensionRange) and dimension != size
                    for dimension, size in zip(output.shape, planned.shape, strict=True)
                )
            ):
                raise unavailable(
                    f"MIGraphX gives output '{planned.name}' the shape {shape_text(output.shape)}, but the model's file"
                    f" says {shape_text(planned.shape)}; set parameter 'engine' to \"migraphx\" to use MIGraphX anyway"
                )

    def signature(self, layout: ProgramLayout) -> Signature:
        """Return the signature of the model's file. The program adds what the file does not say."""
        served = {tensor.name: tensor for tensor in (*layout.inputs, *layout.outputs)}
        declared = {entry.name: entry.model_dims for entry in self.context.model.config.inputs}
        lead = (-1,) if self.plan.batches else ()

        def spec(tensor: GraphTensor, dims: tuple[int, ...] | None = None) -> TensorSpec:
            program, shape = served.get(tensor.name), tensor.shape
            if program is not None and shape is None:
                shape = (*lead, *program.shape[len(lead) :])
            datatype = tensor.datatype if program is None else program.datatype
            assert datatype is not None and shape is not None, "what is not known beforehand is the program's"
            if dims is not None and len(lead) + len(dims) == len(shape):
                # A dimension is -1 if the configuration says so and only MIGraphX needs a number.
                pairs = zip(shape, (*lead, *dims), strict=True)
                shape = tuple(-1 if theirs == -1 else ours for ours, theirs in pairs)
            return TensorSpec(tensor.name, datatype, shape)

        inputs = tuple(spec(tensor, declared.get(tensor.name)) for tensor in self.plan.inputs)
        outputs = tuple(map(spec, self.plan.outputs))
        config, sizes = self.context.model.config, self.context.serving.batch_sizes
        # The sizes that are named without a max_batch_size say what it is.
        most = max(sizes, default=None) if config.has_open_batch else None
        return Signature(inputs, outputs, self.plan.batches, max_batch_size=most, purpose=self.plan.purpose)
