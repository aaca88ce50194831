"""Has MIGraphX read and compile a model, and gathers what it says of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rocserve.backends.migraphx.binding.interface import DimensionRange, ProgramTensor
from rocserve.backends.migraphx.binding.program_text import ELEMENT_BYTES
from rocserve.backends.migraphx.jobs.inspect import InspectJob, InspectResult
from rocserve.backends.migraphx.model_files.mxr import MxrFile, check_mxr, read_mxr
from rocserve.backends.migraphx.planning.recipe import ProgramRecipe
from rocserve.core.errors import ServeError
from rocserve.core.plain import to_json
from rocserve.tools.inspect.summary import ProgramSummary, plain_counts, summarise_program
from rocserve.tools.model_choice import ToolModel
from rocserve.tools.progress import ToolProgress
from rocserve.tools.tool_context import ToolContext

_INSPECT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class TensorFacts:
    name: str
    datatype: str
    """MIGraphX's name."""
    shape: tuple[int | DimensionRange, ...]
    bytes: int
    """At its largest."""


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    title: str
    """"batch size 4"."""
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    file_bytes: int
    """Of the .mxr."""
    compile_seconds: float | None
    """None of a program that was brought."""
    before: ProgramSummary | None
    """As it was read; None of a .mxr, which holds the compiled program only."""
    after: ProgramSummary
    before_text: str
    after_text: str


@dataclass(frozen=True, slots=True)
class Inspection:
    model: str
    file: str
    migraphx: str
    place: str
    """"target gpu (gfx90a)"."""
    precision: str
    weight_bytes: int | None
    """As the model's file has them; None of a .mxr."""
    programs: tuple[ProgramFacts, ...]
    mxr: MxrFile | None
    refusal: str = ""
    """Why a server would not run the .mxr here, and what to do; "" = it would, if it does not crash."""

    def json(self) -> str:
        return to_json(self).decode()


def inspect_model(model: ToolModel, log: logging.Logger) -> Inspection:
    """
    Raises:
        ServeError: MIGraphX cannot be had here, or cannot read or compile the model.
    """
    with ToolProgress() as progress:
        context = ToolContext(model, progress.report, log)
        if model.source.model_file.suffix == ".mxr":
            return _inspect_mxr(context)
        plan = context.plan()
        progress.steps(len(plan.recipes))
        programs = []
        for recipe in plan.recipes:
            programs.append(_inspect_recipe(context, recipe, [output.name for output in plan.outputs]))
            progress.done()
    return Inspection(
        model=model.source.name,
        file=str(model.source.model_file),
        migraphx=context.library.version,
        place=context.place,
        precision=context.options.precision.value,
        weight_bytes=plan.weight_bytes,
        programs=tuple(programs),
        mxr=None,
    )


def _inspect_recipe(context: ToolContext, recipe: ProgramRecipe, output_names: Sequence[str]) -> ProgramFacts:
    title = recipe.title
    name = f"{title} of model '{context.model.source.name}'"
    read = _inspected(context, InspectJob(name, recipe=recipe))
    program = context.program(recipe).program
    made = _inspected(context, InspectJob(name, program_file=str(program.path)))
    before = summarise_program(read.text)
    return ProgramFacts(
        title=title,
        inputs=_facts(made.parameters, ()),
        outputs=_facts(made.outputs, output_names),
        file_bytes=program.size_bytes,
        compile_seconds=program.about.compile_seconds,
        before=before,
        after=summarise_program(made.text, frozenset(plain_counts(before))),
        before_text=read.text,
        after_text=made.text,
    )


def _inspect_mxr(context: ToolContext) -> Inspection:
    file = context.model.source.model_file
    mxr = read_mxr(file)
    made = _inspected(context, InspectJob(file.name, program_file=str(file)))
    facts = ProgramFacts(
        title=file.name,
        inputs=_facts(made.parameters, ()),
        outputs=_facts(made.outputs, ()),
        file_bytes=file.stat().st_size,
        compile_seconds=None,
        before=None,
        after=summarise_program(made.text),
        before_text="",
        after_text=made.text,
    )
    return Inspection(
        model=context.model.source.name,
        file=str(file),
        migraphx=context.library.version,
        place=context.place,
        precision="",
        weight_bytes=None,
        programs=(facts,),
        mxr=mxr,
        refusal=_refusal(context, file),
    )


def _refusal(context: ToolContext, file: Path) -> str:
    try:
        check_mxr(file, context.environment, context.options.target)
    except ServeError as error:
        return error.text
    return ""


def _inspected(context: ToolContext, job: InspectJob) -> InspectResult:
    return context.runner.run(job, InspectResult, timeout_seconds=_INSPECT_SECONDS, limit_name="the time for it")


def _facts(tensors: Sequence[ProgramTensor], names: Sequence[str]) -> tuple[TensorFacts, ...]:
    facts = []
    for number, tensor in enumerate(tensors):
        name = tensor.name or (names[number] if number < len(names) else f"output_{number}")
        facts.append(TensorFacts(name, tensor.datatype, tuple(tensor.shape), _tensor_bytes(tensor)))
    return tuple(facts)


def _tensor_bytes(tensor: ProgramTensor) -> int:
    total = ELEMENT_BYTES.get(tensor.datatype, 0)
    for dim in tensor.shape:
        total *= dim.most if isinstance(dim, DimensionRange) else dim
    return total
