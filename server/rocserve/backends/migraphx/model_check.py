"""Checks a model before it is served: whether its rows depend on each other, and whether its programs compute what ONNX
Runtime computes. Each runs in a child process, and its verdict is kept in the cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rocserve.backends.installed import is_installed
from rocserve.backends.migraphx.binding import DimensionRange
from rocserve.backends.migraphx.compiling.check_jobs import COMPARING, CheckJob, ReferenceTrial, RowsJob
from rocserve.backends.migraphx.compiling.context import CompileContext
from rocserve.backends.migraphx.compiling.known_faults import KnownFault
from rocserve.backends.migraphx.compiling.plan import ProgramPlan
from rocserve.backends.migraphx.compiling.program_cache import CachedProgram
from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe, SourceKind
from rocserve.backends.migraphx.compiling.wanted_sizes import WantedSizes
from rocserve.backends.migraphx.options import Target
from rocserve.backends.migraphx.program_runner import ProgramTensors
from rocserve.backends.onnx.checked_sizes import checked_sizes
from rocserve.backends.onnx.reference_job import OnnxReferenceJob, OnnxReferenceResult
from rocserve.backends.parameters import asked_engine, load_check_mode
from rocserve.backends.written_sizes import padding_report
from rocserve.cache.folders import cache_directory
from rocserve.cache.temporary_folder import TemporaryFolder, remove_left
from rocserve.core.load_check import NOT_CHECKED, REFERENCE, LoadCheckFailed, LoadCheckMode, LoadCheckReport
from rocserve.core.padding import Padding
from rocserve.core.plain import to_json
from rocserve.jobs.messages import Job, JobError
from rocserve.jobs.runner import JobRunner
from rocserve.load_check.facts import NO_FACTS
from rocserve.load_check.made_inputs import seed_of
from rocserve.load_check.onnx_facts import onnx_facts
from rocserve.load_check.padding_verdict import undecided
from rocserve.load_check.reference import CASE_ROWS, ReferenceVerdict
from rocserve.load_check.rows import Independence, RowsVerdict, couples, doubt_of
from rocserve.load_check.verdict_cache import VerdictCache, verdict_key


@dataclass(frozen=True, slots=True)
class ReferenceEngine:
    """The reference that programs are compared with."""

    name: str
    """As users read it, such as "ONNX Runtime"."""
    runner: JobRunner
    job: Callable[[Mapping[str, tuple[int, ...]], bool, str, int, float], Job]
    """Makes the job from an OnnxReferenceJob's shapes, checks_rows, cases_file, case_rows and seconds; its result is an
    OnnxReferenceResult."""


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """The subject of a check: a model's file, and its tensors as its programs take them."""

    onnx_file: Path | None
    """The reference's model; None = none has it."""
    digest: str
    """Of the model's file."""
    shapes: Mapping[str, tuple[int, ...]]
    """Input -> its sizes without the rows, as clients see them; the smallest of those that are padded."""
    tensors: ProgramTensors
    """Of a program of any size: without its rows."""
    precision: str
    batches: bool
    file_batch: int
    """The rows that the file takes; 0 = any."""

    def of_program(self, plan: ProgramPlan, recipe: ProgramRecipe) -> CheckedModel:
        """Return the model at the sizes of one of its programs."""
        rows = program_rows(plan.batches, recipe)
        tensors = replace(self.tensors, rows=rows, sizes=tuple(recipe.sizes.values()), padding=plan.padding)
        return replace(self, shapes=_shapes(plan, recipe), tensors=tensors)


def _shapes(plan: ProgramPlan, recipe: ProgramRecipe) -> Mapping[str, tuple[int, ...]]:
    return {tensor.name: (plan.shape_in(tensor, recipe) or ())[plan.batches :] for tensor in plan.inputs}


def checked_model(plan: ProgramPlan, pad_with_first_row: bool) -> CheckedModel:
    source, options = plan.recipes[0].source, plan.recipes[0].options
    is_onnx = source.kind is SourceKind.ONNX
    return CheckedModel(
        onnx_file=Path(source.path) if is_onnx else None,
        digest=source.digest,
        shapes=_shapes(plan, plan.smallest),
        tensors=ProgramTensors(
            tuple(tensor.name for tensor in plan.inputs),
            tuple(tensor.name for tensor in plan.outputs),
            nhwc=not is_onnx,
            pad_with_first_row=pad_with_first_row,
            scalars=tuple(tensor.name for tensor in plan.outputs if tensor.dims == ()),
        ),
        precision=options.precision.value,
        batches=plan.batches,
        file_batch=plan.file_batch,
    )


def program_rows(batches: bool, recipe: ProgramRecipe) -> DimensionRange | None:
    """Return the batch sizes that a program takes; None = no batch dimension."""
    return DimensionRange(recipe.batch_size, recipe.batch_size) if batches else None


@dataclass(eq=False)
class ModelCheck:
    """Checks one version of a model. For one thread at a time."""

    _context: CompileContext
    _engine: ReferenceEngine | None = None
    """None = ONNX Runtime, for a model that has an ONNX file."""
    is_serving: bool = field(default=False, init=False)
    """Programs that are checked now are logged, not reported."""
    report: LoadCheckReport = field(default=NOT_CHECKED, init=False)
    """The reports of the checks before the model served."""
    rows: RowsVerdict | None = field(default=None, init=False)
    """None = the rows were not checked."""
    _references: dict[tuple[object, ...], tuple[Path, OnnxReferenceResult]] = field(default_factory=dict, init=False)
    """Rows of each case, and the inputs' shapes -> the file of the reference's cases, and its result."""

    def __post_init__(self) -> None:
        model = self._context.model
        self._mode = load_check_mode(model.config, model.settings)
        self._verdicts = VerdictCache(cache_directory(model.settings))
        remove_left("rocserve-check-")
        self._folder = TemporaryFolder("rocserve-check-")

    def close(self) -> None:
        """Remove the reference's cases."""
        self._folder.remove()

    def call_off(self) -> None:
        """Kill all running jobs, and refuse new ones. From any thread."""
        self._context.compiler.runner.call_off()
        self._context.onnxruntime.call_off()
        if self._engine is not None:
            self._engine.runner.call_off()

    def check_faults(self, faults: Mapping[str, KnownFault]) -> None:
        """Raises LoadCheckFailed if this MIGraphX has one of the faults, unless such models serve with a warning."""
        version = self._context.binding.migraphx_version
        for operator, fault in faults.items():
            if self._mode is not LoadCheckMode.OFF and fault.is_in(version):
                self._judge("the graph", ReferenceVerdict(False, 0, math.inf, "", "", f"{operator} {fault.text}"))

    def check_rows(self, model: CheckedModel, recipe: ProgramRecipe | None = None, program_file: str = "") -> None:
        """Find whether rows depend on each other: on ONNX Runtime, else on MIGraphX, with a program that is compiled
        from `recipe`'s model, or one that is compiled already. Raises JobError if a process dies."""
        # One row shows nothing: MIGraphX's programs of other sizes are compared with it.
        if self._mode is LoadCheckMode.OFF or not model.batches or model.file_batch == 1:
            return
        engine = self._engine_for(model)
        where = to_json(self._context.environment).decode() if isinstance(engine, str) else engine.name
        sizes = (str(model.file_batch), str(self._context.model.config.max_batch_size))
        key = verdict_key("rows", model.digest, repr(sorted(model.shapes.items())), *sizes, where)
        self.rows = self._verdicts.find(key, RowsVerdict)
        if self.rows is None:
            with self._checking("running batches of different rows"):
                if not isinstance(engine, str):
                    self.rows = self._reference(model, engine, model.file_batch or CASE_ROWS, True)[1].rows
                self.rows = self.rows or self._rows_on_migraphx(model, recipe, program_file)
            if self.rows.is_lasting:
                self._verdicts.remember(key, self.rows)
        self.add(self.rows.report(self._context.batching_is_written, warns_of_undecided=True))

    def check_padding(self, model: CheckedModel, plan: ProgramPlan) -> Padding:
        """Try on ONNX Runtime whether the plan's dimensions may be padded, and return the padding with the values that
        the check finds. Raises LoadCheckFailed if the check is strict, and answers change."""
        padding = plan.padding
        if self._mode is LoadCheckMode.OFF or not padding.dimensions:
            return padding
        verdict, took = undecided(padding, "no other engine runs it"), 0.0
        if model.onnx_file is not None:
            shapes = {tensor.name: (tensor.shape or ())[plan.batches :] for tensor in plan.inputs}
            wanted = WantedSizes(plan.recipes[0].source, padding, shapes, plan.batches)
            shares = plan.batches and not doubt_of(self.rows)
            verdict, took = checked_sizes(self._context.model, self._context.onnxruntime, wanted, shares)
        self.add(LoadCheckReport(seconds=took))
        self.add(padding_report(verdict, self._mode))
        return replace(padding, values=verdict.values)

    def program(
        self, model: CheckedModel, recipe: ProgramRecipe, report: Callable[[str], None] | None = None
    ) -> CachedProgram:
        """Return the program, compiled if it is not cached. `report` is given if the model serves already. Raises
        LoadCheckFailed if it does not compute what the reference does, else as ProgramCompiler.program."""
        compiler, timeout = self._context.compiler, self._context.serving.compile_timeout_seconds
        key = verdict_key("reference", recipe.key, self._reference_name)
        compiled = partial(
            compiler.program, recipe, timeout_seconds=timeout, low_priority=self.is_serving, report=report
        )
        if self._judged(key, recipe.title):
            return compiled()
        trial = self._trial(model, program_rows(model.batches, recipe))
        if trial is None:
            return compiled()
        found: list[ReferenceVerdict] = []
        try:
            cached = compiled(trial=trial, on_verdict=found.append)
            if not found:
                # It was compiled without a check, or by another process at this moment.
                with self._checking(f"checking {recipe.title}"):
                    job = CheckJob(str(cached.path), trial)
                    found.append(compiler.runner.run(job, ReferenceVerdict, timeout_seconds=timeout, report=report))
        except JobError as error:
            if not error.is_crash or COMPARING not in error.text:
                raise
            found.append(_crashed(error))
        self._verdicts.remember(key, found[0])
        self._judge(recipe.title, found[0])
        return compiled()

    def compiled_program(self, model: CheckedModel, path: Path, rows: DimensionRange | None) -> None:
        """Compare a program that was compiled elsewhere with the reference. Raises as `program`."""
        key = verdict_key("reference", model.digest, to_json(self._context.environment).decode(), self._reference_name)
        if self._judged(key, path.name):
            return
        trial = self._trial(model, rows)
        if trial is None:
            return
        timeout = self._context.serving.compile_timeout_seconds
        with self._checking(f"checking {path.name}"):
            try:
                verdict = self._context.compiler.runner.run(
                    CheckJob(str(path), trial), ReferenceVerdict, timeout_seconds=timeout
                )
            except JobError as error:
                if not error.is_crash:
                    raise
                verdict = _crashed(error)
        self._verdicts.remember(key, verdict)
        self._judge(path.name, verdict)

    @property
    def _reference_name(self) -> str:
        return "ONNX Runtime" if self._engine is None else self._engine.name

    def _engine_for(self, model: CheckedModel) -> ReferenceEngine | str:
        """Return the reference of the model, or why there is none."""
        if self._engine is not None:
            return self._engine
        if model.onnx_file is None:
            return "no other engine runs it"
        if not is_installed("onnxruntime"):
            return "ONNX Runtime is not installed"
        largest = self._context.model.config.max_batch_size
        job = partial(OnnxReferenceJob, self._context.model.name, str(model.onnx_file), largest_batch=largest)
        return ReferenceEngine(self._reference_name, self._context.onnxruntime, job)

    def _reference(
        self, model: CheckedModel, engine: ReferenceEngine, rows: int, checks_rows: bool
    ) -> tuple[Path, OnnxReferenceResult]:
        """Return the file of the reference's cases of this many rows, and its result. It runs once for each number of
        rows, at each of the model's sizes."""
        key = (rows, *sorted(model.shapes.items()))
        if (known := self._references.get(key)) is not None:
            return known
        seconds = self._context.model.settings.load_check_seconds
        path = self._folder.path / f"{len(self._references)}.npz"
        try:
            job = engine.job(model.shapes, checks_rows, str(path), rows, seconds)
            result = engine.runner.run_check(job, OnnxReferenceResult, seconds)
        except JobError as error:
            # The model is served as if it had no reference. If time did not suffice for the reference, it does not
            # suffice for MIGraphX, which would compile first.
            late = RowsVerdict(Independence.UNDECIDED, f"not checked: {error.text}", is_lasting=False)
            result = OnnxReferenceResult(None if error.is_crash else late, 0, error.text)
        self._references[key] = path, result
        return self._references[key]

    def _rows_on_migraphx(self, model: CheckedModel, recipe: ProgramRecipe | None, program_file: str) -> RowsVerdict:
        context = self._context
        job = RowsJob(
            context.model.name,
            model.tensors,
            model.file_batch or (CASE_ROWS if recipe else None),
            context.model.settings.load_check_seconds,
            seed_of(model.digest),
            recipe,
            program_file,
            is_noisy=context.options.target is Target.GPU,
            facts=onnx_facts(model.onnx_file) if model.onnx_file else NO_FACTS,
        )
        timeout = context.serving.compile_timeout_seconds
        try:
            return context.compiler.runner.run(
                job, RowsVerdict, timeout_seconds=timeout, report=context.model.report_check
            )
        except JobError as error:
            return RowsVerdict(Independence.UNDECIDED, f"not checked: {error.text}")

    def _trial(self, model: CheckedModel, rows: DimensionRange | None) -> ReferenceTrial | None:
        """Return the expected answers of a program of these batch sizes; None = there is no reference."""
        if self._mode is LoadCheckMode.OFF:
            return None
        if not isinstance(missing := self._engine_for(model), str):
            # Dependent rows say nothing about batches other than their own.
            case_rows = 0 if rows is None else rows.most if couples(self.rows) else model.file_batch or CASE_ROWS
            with self._checking(f"running it on {missing.name}"):
                cases_file, found = self._reference(model, missing, case_rows, False)
            if found.cases:
                tensors, seconds = replace(model.tensors, rows=rows), self._context.model.settings.load_check_seconds
                return ReferenceTrial(self._context.model.name, str(cases_file), tensors, model.precision, seconds)
            missing = found.reason
        self.add(LoadCheckReport((f"not compared: {missing}",)))
        return None

    def _judged(self, key: str, title: str) -> bool:
        """Return whether the cache has the verdict. Raises LoadCheckFailed as `_judge`."""
        verdict = None if self._mode is LoadCheckMode.OFF else self._verdicts.find(key, ReferenceVerdict)
        if verdict is not None:
            self._judge(title, verdict)
        return verdict is not None

    def _judge(self, title: str, verdict: ReferenceVerdict) -> None:
        """Report a verdict. Raises LoadCheckFailed if it is wrong, unless such programs serve with a warning."""
        context, reference = self._context, self._reference_name
        if not verdict.right and self._mode is not LoadCheckMode.WARN:
            # An engine that was chosen automatically gives way to the next one.
            is_named = asked_engine(context.model.config) not in ("", "auto")
            other = f"let {reference} run the model (parameter 'engine'), or " if is_named else ""
            raise LoadCheckFailed(
                REFERENCE,
                f"MIGraphX {context.binding.migraphx_version} does not compute what {reference} computes: {title}:"
                f" {verdict.reason}; {other}set parameter 'load_check' to \"warn\" to serve it anyway",
            )
        if verdict.right:
            part = f"{verdict.cases} inputs on MIGraphX and {reference}, largest error {verdict.largest_error:.0e}"
            found = LoadCheckReport((part,), verdict.remark)
        else:
            text = f"MIGraphX's answers differ from {reference}'s: {verdict.reason}"
            found = LoadCheckReport((text,), text, (REFERENCE,))
        if self.is_serving and found.warning:
            context.log.warning("model '%s': %s: %s", context.model.name, title, found.warning)
        self.add(found)

    def add(self, found: LoadCheckReport) -> None:
        if not self.is_serving:
            self.report = self.report.then(found)

    @contextmanager
    def _checking(self, what: str) -> Iterator[None]:
        """Show the model as being checked, and count the time."""
        started = time.monotonic()
        try:
            with nullcontext() if self.is_serving else self._context.model.checking(what):
                yield
        finally:
            self.add(LoadCheckReport(seconds=time.monotonic() - started))


def _crashed(error: JobError) -> ReferenceVerdict:
    return ReferenceVerdict(False, 0, math.inf, "", "", error.text)
