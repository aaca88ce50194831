"""Loads an ONNX model or a TensorFlow graph on MIGraphX, and serves it in a worker.

The model is READY with the program of the first batch size. The programs of the other sizes follow while it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from rocserve.backends.base import Batch, BatchResult
from rocserve.backends.migraphx.background_sizes import BackgroundSizes
from rocserve.backends.migraphx.binding import Array, DimensionRange, MigraphxError, shape_text
from rocserve.backends.migraphx.compiling.context import CompileContext
from rocserve.backends.migraphx.compiling.graph import GraphTensor
from rocserve.backends.migraphx.compiling.memory import check_memory, compiled_memory, planned_memory
from rocserve.backends.migraphx.compiling.plan import ProgramPlan, plan_programs
from rocserve.backends.migraphx.compiling.program_cache import CachedProgram, ProgramAbout
from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe
from rocserve.backends.migraphx.default_sizes import planned_sizes, with_default_sizes, with_padded_outputs
from rocserve.backends.migraphx.layout import ProgramLayout
from rocserve.backends.migraphx.model_check import (
    CheckedModel,
    ModelCheck,
    ReferenceEngine,
    checked_model,
)
from rocserve.backends.migraphx.program_runner import LoadedProgram, ProgramRunner
from rocserve.backends.migraphx.tensors import varies_with_values
from rocserve.backends.onnx.checked_sizes import equal_dimensions
from rocserve.backends.parameters import asked_engine
from rocserve.core.errors import ServeError, internal, unavailable
from rocserve.core.load_check import LoadCheckReport
from rocserve.core.padding import NO_PADDING, Padding
from rocserve.core.requests import Signature, TensorSpec
from rocserve.load_check.rows import couples, doubt_of


@dataclass(eq=False)
class MigraphxModel:
    """Serves one model version on one device with MIGraphX programs. For one thread; see LoadedModel."""

    _context: CompileContext
    signature: Signature
    _runner: ProgramRunner
    _facts: Mapping[str, str]
    """Facts about the program, which override facts that follow from the parameters."""
    _check: ModelCheck
    _background: BackgroundSizes | None = None

    def __post_init__(self) -> None:
        self.properties: Mapping[str, str] = self._context.properties(self._runner.batch_sizes, self._facts)
        """Facts about the engine, replaced as a whole. Any thread may ask, also after `close`."""
        self.load_check = self._check.report
        self._check.is_serving = True

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
            self._context.log.debug("model '%s': warm-up with zeros failed: %s", name, error)
        for sample in samples:
            self.execute(sample)
        if self._background is not None:
            self._background.start()

    def execute(self, batch: Batch) -> BatchResult:
        """Run a batch. Raises ServeError (INVALID_ARGUMENT) for inputs of a shape that is not served, ServeError
        (INTERNAL) with MIGraphX's text if a run fails."""
        try:
            wanted = batch.requested_outputs or tuple(spec.name for spec in self.signature.outputs)
            if couples(self._check.rows) and len(batch.request_sizes) > 1:
                return self._each_request(batch, wanted)
            return BatchResult(self._runner.run(batch.arrays, wanted, batch.room))
        except MigraphxError as error:
            raise internal(f"migraphx error: {error}") from None

    def _each_request(self, batch: Batch, wanted: Sequence[str]) -> BatchResult:
        """Run the requests of a batch one by one, because a row's answer changes with its neighbours."""
        found: dict[str, list[Array]] = {name: [] for name in wanted}
        failures: dict[int, ServeError] = {}
        start = 0
        for index, rows in enumerate(batch.request_sizes):
            inputs = {name: array[start : start + rows] for name, array in batch.arrays.items()}
            start += rows
            try:
                answer = self._runner.run(inputs, wanted)
            except ServeError as error:
                failures[index] = error
                answer = self._runner.blank(inputs, wanted)
            for name in wanted:
                found[name].append(answer[name])
        return BatchResult({name: np.concatenate(parts) for name, parts in found.items()}, failures)

    def wait(self) -> None:
        """After `warm_up`: wait until all batch sizes are in service or have failed."""
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        if self._background is not None:
            self._background.stop()
        self._check.close()
        # The runner and the background thread keep the programs alive.
        self._background = None
        del self._runner


def load_compiled(
    context: CompileContext,
    model_file: Path | None = None,
    note: str = "",
    quantised_in: str = "",
    reference: ReferenceEngine | None = None,
) -> MigraphxModel:
    """Compile the version's own file, or `model_file`, an ONNX file, and return the served model. `note` is the reason
    for `model_file` in the metadata. `quantised_in` is the precision in the metadata if the file holds quantising
    operators. `reference`: the reference of the programs; None = ONNX Runtime. Raises ServeError if the file or the
    configuration is wrong, the compile fails, memory does not suffice, or a program's answers are wrong."""
    check = ModelCheck(context, reference)
    try:
        return _checked(context, check, model_file, note, quantised_in, reference)
    except BaseException:
        check.close()
        raise


def _planned(
    context: CompileContext, check: ModelCheck, model_file: Path | None, is_own: bool
) -> tuple[ProgramPlan, bool]:
    """Plan the programs, and tell whether sizes are chosen by default; a model whose rows may depend on each other only
    batches if its configuration says so. `is_own`: ONNX Runtime is the reference of the file, so that it also tells
    what may be padded by default, and which dimensions must be equal."""

    def plan(no_batch: str, default: Padding) -> ProgramPlan:
        return plan_programs(
            context.model,
            context.options,
            context.serving,
            context.environment,
            model_file=model_file,
            no_batch=no_batch,
            default=default,
            equal=partial(equal_dimensions, context.model, context.onnxruntime) if is_own else None,
        )

    def found(no_batch: str = "") -> tuple[ProgramPlan, LoadCheckReport | None]:
        if not is_own:
            return plan(no_batch, NO_PADDING), None
        return with_default_sizes(context.model, context.onnxruntime, partial(plan, no_batch))

    planned, report = found()
    check.check_faults(planned.faults)
    check.check_rows(checked_model(planned, context.serving.pad_with_first_row), planned.smallest)
    if doubt_of(check.rows) and not context.batching_is_written:
        planned, report = found(doubt_of(check.rows))
    planned = with_padded_outputs(context, planned)
    if report is not None:
        check.add(report)
        return planned, True
    model = checked_model(planned, context.serving.pad_with_first_row)
    return replace(planned, padding=check.check_padding(model, planned)), False


def _checked(
    context: CompileContext,
    check: ModelCheck,
    model_file: Path | None,
    note: str,
    quantised_in: str,
    reference: ReferenceEngine | None,
) -> MigraphxModel:
    config = context.model.config
    plan, has_default_sizes = _planned(context, check, model_file, reference is None)
    checked = checked_model(plan, context.serving.pad_with_first_row)
    own = {tensor.name for tensor in plan.outputs}
    if model_file and len(config.outputs) == len(plan.outputs) and any(out.name not in own for out in config.outputs):
        # A compiled program's outputs have the configuration's names, so its replacement's outputs have them, too.
        plan = plan.with_outputs([entry.name for entry in config.outputs])
    precision = quantised_in if plan.is_quantised else ""
    facts = {name: text for name, text in (("precision", precision), ("note", note)) if text}
    first = plan.first
    soonest = context.compiler.first_to_serve(first)
    compiled = _Compiled(context, plan, check, checked)
    cached = compiled.cached(soonest)
    if has_default_sizes:
        plan = planned_sizes(context, plan, cached)
        compiled = replace(compiled, plan=plan)
    others = sorted((recipe for recipe in plan.recipes if recipe is not first), key=lambda recipe: recipe.rebatched)
    loaded = compiled.opened(soonest, cached)
    runner = ProgramRunner(context.model.name, loaded, doubt_of(check.rows) if couples(check.rows) else "")
    later = {recipe.short_title: recipe for recipe in others}
    if soonest is not first:
        later = {f"{first.short_title} (tuned)": first, **later}

    def prepare(size: str, report: Callable[[str], None]) -> None:
        try:
            program = compiled.program(later[size], report)
        finally:
            if size == last:
                check.close()
        try:
            program.warm_up()
        except MigraphxError as error:
            context.log.debug("batch size %s: warm-up with zeros failed: %s", size, error)
        model.add(program)

    *_, last = ("", *later)
    if not later:
        check.close()
    background = BackgroundSizes(
        tuple(later), prepare, check.call_off, context.model.report, context.log, *_names_of_sizes(plan)
    )
    model = MigraphxModel(context, compiled.signature(loaded.layout), runner, facts, check, background)
    context.model.report("")
    return model


def _names_of_sizes(plan: ProgramPlan) -> tuple[str, str]:
    """Return the nouns for one and for several of the short titles of recipes."""
    labels = [*(("batch",) if plan.batches else ()), *plan.recipes[0].sizes]
    if not plan.padding.dimensions:
        return "batch size", "batch sizes"
    return f"program ({' x '.join(labels)})", f"programs ({' x '.join(labels)})"


@dataclass(frozen=True, slots=True)
class _Compiled:
    context: CompileContext
    plan: ProgramPlan
    check: ModelCheck
    checked: CheckedModel

    def program(self, recipe: ProgramRecipe, report: Callable[[str], None] | None = None) -> LoadedProgram:
        """Return the recipe's program, compiled if it is not cached. `report` is given if the model serves already."""
        return self.opened(recipe, self.cached(recipe, report))

    def cached(self, recipe: ProgramRecipe, report: Callable[[str], None] | None = None) -> CachedProgram:
        """Return the recipe's program in the cache, as `program`."""
        model = self.context.model
        check_memory(model.name, planned_memory(recipe, self.plan), model.device)
        return self.check.program(self.checked.of_program(self.plan, recipe), recipe, report)

    def opened(self, recipe: ProgramRecipe, cached: CachedProgram) -> LoadedProgram:
        """Load a program from the cache, which may then drop it."""
        context, plan, model = self.context, self.plan, self.context.model
        checked = self.checked.of_program(plan, recipe)
        try:
            self._check_outputs(cached.about)
            check_memory(model.name, compiled_memory(cached), model.device)
            program = context.open_program(cached.path)
        finally:
            cached.release()
        loaded = replace(checked.tensors, outputs=tuple(tensor.name for tensor in plan.outputs)).open(program)
        if loaded.rows is not None:
            loaded.layout.check_batch(loaded.rows.least, model.name)
        return loaded

    def _check_outputs(self, about: ProgramAbout) -> None:
        """Refuse outputs that differ from the model's file, if ONNX Runtime may run the model instead."""
        config = self.context.model.config
        if config.backend != "onnx" or asked_engine(config) not in ("", "auto"):
            return
        for planned, output in zip(self.plan.outputs, about.outputs, strict=False):
            # If the model batches, `check_batch` refuses such outputs.
            if not self.plan.batches and varies_with_values(about.inputs, output):
                raise unavailable(
                    f"the shape of output '{planned.name}' depends on the values of the inputs; MIGraphX computes some"
                    " of these wrongly (such as negative axes) and crashes on others; set parameter 'engine' to"
                    ' "migraphx" to use MIGraphX anyway'
                )
            if planned.shape == () and all(size == 1 for size in output.shape):
                # See ProgramLayout.scalars.
                continue
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
        """Return the signature of the model's file, completed from the program."""
        served = {tensor.name: tensor for tensor in (*layout.inputs, *layout.outputs)}
        declared = {entry.name: entry.model_dims for entry in self.context.model.config.inputs}
        lead = (-1,) if self.plan.batches else ()

        def spec(tensor: GraphTensor, dims: tuple[int, ...] | None = None) -> TensorSpec:
            program, shape = served.get(tensor.name), tensor.shape
            if program is not None and shape is None:
                shape = (*lead, *program.shape[len(lead) :])
            datatype = tensor.datatype if program is None else program.datatype
            assert datatype is not None and shape is not None, "the program completes the file's tensors"
            if dims is not None and len(lead) + len(dims) == len(shape):
                # A dimension is -1 if the configuration says so and only MIGraphX needs a number.
                pairs = zip(shape, (*lead, *dims), strict=True)
                shape = tuple(-1 if theirs == -1 else ours for ours, theirs in pairs)
            return TensorSpec(tensor.name, datatype, shape)

        inputs = tuple(spec(tensor, declared.get(tensor.name)) for tensor in self.plan.inputs)
        outputs = tuple(map(spec, self.plan.outputs))
        config, sizes = self.context.model.config, self.context.serving.batch_sizes
        # Sizes that are named without a max_batch_size define it.
        most = max(sizes, default=None) if config.has_open_batch else None
        return Signature(
            inputs,
            outputs,
            self.plan.batches,
            max_batch_size=most,
            purpose=self.plan.purpose,
            dependent_rows=doubt_of(self.check.rows),
            padding=self.plan.padding,
        )
