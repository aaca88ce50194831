"""Runs `rocserve inspect MODEL`: prints how MIGraphX reads and compiles a model, or draws an ensemble."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from rocserve.backends.migraphx.binding import DimensionRange, ProgramTensor
from rocserve.backends.migraphx.compiling.probe_jobs import InspectJob, InspectResult
from rocserve.backends.migraphx.mxr_file import MxrFile, check_mxr, read_mxr
from rocserve.backends.migraphx.program_text import (
    ELEMENT_BYTES,
    allocated_bytes,
    fused_operators,
    plain_operator,
    read_program_text,
)
from rocserve.core.errors import ServeError
from rocserve.core.printable import readable_size as size
from rocserve.flags import FlagError
from rocserve.settings.flag import SWITCH, Kind, flag, part
from rocserve.verbs.ensemble_svg import draw_ensemble
from rocserve.verbs.model_choice import ModelOptions, ToolModel, find_model
from rocserve.verbs.printing import ToolProgress, console_on, say, say_json, show, table
from rocserve.verbs.tool_context import ToolContext
from rocserve.verbs.verb import Verb


@dataclass(frozen=True, slots=True)
class OperatorCount:
    name: str
    count: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """Describes a fused kernel, which runs several operators."""

    name: str
    operators: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Copies:
    count: int
    bytes: int
    """Bytes copied in one run."""


@dataclass(frozen=True, slots=True)
class ProgramSummary:
    operators: tuple[OperatorCount, ...]
    """Operators executed in one run, the most frequent first. A fused kernel is counted under its own name."""
    instructions: int
    kernels: tuple[Kernel, ...]
    constant_bytes: int
    scratch_bytes: int
    """Allocated once for intermediate results; 0 = the target allocates during the run."""
    result_bytes: int
    """Sum of all instructions' results in one run, as if each were kept."""
    to_gpu: Copies
    from_gpu: Copies


def summarise_program(text: str, known_operators: frozenset[str] = frozenset()) -> ProgramSummary:
    """Summarise MIGraphX's print of a program. `known_operators` helps to split a kernel's name into its operators, for
    example the plain operator names of the uncompiled program."""
    instructions = read_program_text(text)
    # Copies a constant to the GPU, once.
    copied_literal = "hip::hip_copy_literal"
    idle = ("check_context", "load", "hip::hip_allocate_memory", "hip::allocate_memory", copied_literal)
    computing = [one for one in instructions if one.is_computing and not one.operator.startswith(idle)]
    used = Counter(one.symbol for one in computing if one.symbol)
    made_of = {name: fused_operators(name, known_operators) for name in used}
    counts = Counter(one.title for one in computing)
    to_gpu, from_gpu = (
        [one.bytes for one in instructions if one.operator == copy]
        for copy in ("hip::copy_to_gpu", "hip::copy_from_gpu")
    )
    return ProgramSummary(
        operators=tuple(OperatorCount(name, count) for name, count in counts.most_common()),
        instructions=len(computing),
        kernels=tuple(Kernel(one, made_of[one], count) for one, count in used.most_common() if len(made_of[one]) > 1),
        constant_bytes=sum(one.bytes for one in instructions if one.operator in ("@literal", copied_literal)),
        scratch_bytes=allocated_bytes(instructions),
        result_bytes=sum(one.bytes for one in computing),
        to_gpu=Copies(len(to_gpu), sum(to_gpu)),
        from_gpu=Copies(len(from_gpu), sum(from_gpu)),
    )


def plain_counts(summary: ProgramSummary) -> Counter[str]:
    """Count the operators, without the target's prefix in their names."""
    counts: Counter[str] = Counter()
    for operator in summary.operators:
        counts[plain_operator(operator.name)] += operator.count
    return counts


@dataclass(frozen=True, slots=True)
class TensorFacts:
    name: str
    datatype: str
    """MIGraphX's name of the datatype."""
    shape: tuple[int | DimensionRange, ...]
    bytes: int
    """Size at the largest shape."""


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    title: str
    """Such as "batch size 4"."""
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    file_bytes: int
    compile_seconds: float | None
    """None = the user supplied the compiled program."""
    before: ProgramSummary | None
    """The program before compilation; None for a .mxr file, which has only the compiled program."""
    after: ProgramSummary
    before_text: str
    after_text: str


@dataclass(frozen=True, slots=True)
class Inspection:
    model: str
    file: str
    migraphx: str
    place: str
    """Such as "target gpu (gfx90a)"."""
    programs: tuple[ProgramFacts, ...]
    precision: str = ""
    weight_bytes: int | None = None
    """Weights in the model's file; None for a .mxr file."""
    mxr: MxrFile | None = None
    refusal: str = ""
    """Why a server here would refuse the .mxr file, and the remedy; "" = it would not, unless MIGraphX crashes."""


def inspect_model(model: ToolModel) -> Inspection:
    """Compile the model and describe its programs. Raises ServeError if MIGraphX is not available here or cannot read
    or compile the model."""
    file = model.source.model_file
    with ToolProgress() as progress:
        context = ToolContext(model, progress.report)
        of_all = (model.source.name, str(file), context.library.version, context.place)
        if file.suffix == ".mxr":
            mxr = read_mxr(file)
            program = _program_facts(context, file.name, file.name, file)
            refusal = ""
            try:
                check_mxr(file, context.environment, context.options.target)
            except ServeError as error:
                refusal = error.text
            return Inspection(*of_all, (program,), mxr=mxr, refusal=refusal)
        plan = context.plan()
        progress.steps(len(plan.recipes))
        programs = []
        for recipe in plan.recipes:
            name = f"{recipe.title} of model '{model.source.name}'"
            read = _inspected(context, InspectJob(name, recipe=recipe)).text
            made, _ = context.program(recipe)
            outputs = [output.name for output in plan.outputs]
            facts = _program_facts(context, recipe.title, name, made.path, outputs, read)
            programs.append(replace(facts, compile_seconds=made.about.compile_seconds))
            progress.done()
    return Inspection(*of_all, tuple(programs), context.options.precision.value, plan.weight_bytes)


def _program_facts(
    context: ToolContext, title: str, name: str, file: Path, output_names: Sequence[str] = (), before_text: str = ""
) -> ProgramFacts:
    """Describe a compiled program's file. `before_text` is MIGraphX's print of the uncompiled program; "" = there is
    none."""
    made = _inspected(context, InspectJob(name, program_file=str(file)))
    before = summarise_program(before_text) if before_text else None
    return ProgramFacts(
        title=title,
        inputs=_facts(made.parameters, ()),
        outputs=_facts(made.outputs, output_names),
        file_bytes=file.stat().st_size,
        compile_seconds=None,
        before=before,
        after=summarise_program(made.text, frozenset(plain_counts(before)) if before else frozenset()),
        before_text=before_text,
        after_text=made.text,
    )


def _inspected(context: ToolContext, job: InspectJob) -> InspectResult:
    return context.runner.run(job, InspectResult, timeout_seconds=600.0, limit_name="the time for it")


def _facts(tensors: Sequence[ProgramTensor], names: Sequence[str]) -> tuple[TensorFacts, ...]:
    facts = []
    for number, tensor in enumerate(tensors):
        name = tensor.name or (names[number] if number < len(names) else f"output_{number}")
        sizes = (dim.most if isinstance(dim, DimensionRange) else dim for dim in tensor.shape)
        nbytes = math.prod(sizes, start=ELEMENT_BYTES.get(tensor.datatype, 0))
        facts.append(TensorFacts(name, tensor.datatype, tuple(tensor.shape), nbytes))
    return tuple(facts)


@dataclass(frozen=True, slots=True)
class InspectOptions:
    model: ModelOptions = part(ModelOptions, "model")
    text: bool = flag(False, SWITCH, "also print the programs as MIGraphX prints them")
    json: bool = flag(False, SWITCH, "print JSON")
    graph: Path | None = flag(
        None, Kind("FILE.svg", Path), "of an ensemble: draw its steps into this file; no engine is needed"
    )


def inspect(options: InspectOptions) -> None:
    """Print the inspection, or draw the ensemble. Raises ServeError as `inspect_model` and `draw_ensemble` do."""
    if options.graph is not None:
        if options.text or options.json or options.model.batch_sizes or options.model.parameters():
            raise FlagError("argument --graph: expected no other option than --model-config-name; remove the others")
        draw_ensemble(options.model.model, options.model.config_name, options.graph)
        return
    inspection, out = inspect_model(find_model(options.model)), console_on()
    if options.json:
        say_json(out, inspection)
        return
    _print_head(inspection, out)
    first, *others = inspection.programs
    tensors = [("input", tensor) for tensor in first.inputs] + [("output", tensor) for tensor in first.outputs]
    rows = [(kind, one.name, one.datatype, _dimensions(one), size(one.bytes)) for kind, one in tensors]
    show(out, table(first.title, ("", "name", "type", "shape", "bytes"), rows, left=4))
    if others:
        say(out, f"{'; '.join(program.title for program in others)}: the same at these sizes")
    _print_memory(inspection, out)
    # The programs of a model differ only in their sizes. The largest one shows the most.
    largest = max(inspection.programs, key=lambda program: sum(tensor.bytes for tensor in program.inputs))
    _print_operators(largest, inspection.place, out)
    if options.text:
        for program in inspection.programs:
            if program.before_text:
                say(out, f"\n{program.title}, as it was read:\n{program.before_text.strip()}")
            say(out, f"\n{program.title}, compiled:\n{program.after_text.strip()}")


def _print_head(inspection: Inspection, out: Console) -> None:
    precision = f", {inspection.precision}" if inspection.precision else ""
    say(out, f"{inspection.model}: {inspection.file}")
    say(out, f"MIGraphX {inspection.migraphx}, {inspection.place}{precision}")
    mxr = inspection.mxr
    if mxr is not None:
        facts = [
            f"compiled by MIGraphX {mxr.migraphx_version} (file version {mxr.format_version})",
            f"for target {', '.join(mxr.targets) or 'none: it is not compiled'}",
        ]
        if mxr.architectures:
            facts.append(f"GPU {', '.join(mxr.architectures)}")
        if mxr.wants_output_buffers:
            facts.append("without offload_copy: it expects its tensors in GPU memory")
        say(out, ", ".join(facts))
    if inspection.refusal:
        say(out, f"a server would not run it: {inspection.refusal}")


def _dimensions(tensor: TensorFacts) -> str:
    """Return a text such as "[1-8, 3]", whose first dimension varies."""
    dims = (f"{dim.least}-{dim.most}" if isinstance(dim, DimensionRange) else str(dim) for dim in tensor.shape)
    return f"[{', '.join(dims)}]"


def _print_memory(inspection: Inspection, out: Console) -> None:
    rows = []
    for program in inspection.programs:
        after = program.after
        rows.append(
            (
                program.title,
                size(after.constant_bytes),
                size(sum(tensor.bytes for tensor in program.inputs)),
                size(sum(tensor.bytes for tensor in program.outputs)),
                size(after.scratch_bytes) if after.scratch_bytes else "as it runs",
                size(after.result_bytes),
                _copies(after.to_gpu),
                _copies(after.from_gpu),
                size(program.file_bytes),
            )
        )
    columns = ("memory", "weights", "inputs", "outputs", "scratch", "results", "to GPU", "from GPU", ".mxr file")
    show(out, table("", columns, rows))
    if len(inspection.programs) > 1:
        total = sum(program.file_bytes for program in inspection.programs)
        say(out, f"all {len(inspection.programs)} programs: {size(total)}, which each instance has in memory")
    if inspection.weight_bytes is not None:
        say(out, f"weights in the model's file: {size(inspection.weight_bytes)}")


def _copies(copies: Copies) -> str:
    return f"{copies.count} x, {size(copies.bytes)}" if copies.count else "none"


def _print_operators(program: ProgramFacts, place: str, out: Console) -> None:
    before, after = program.before, program.after

    def show_counts(what: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        show(out, table(f"{program.title}: {what}", columns, rows[:40]))

    done = [(operator.name, str(operator.count)) for operator in after.operators]
    if before is None:
        show_counts("what a run does", ("operator", "count"), done)
    else:
        read, compiled = plain_counts(before), plain_counts(after)
        if after.kernels:
            show_counts(
                "as it was read", ("operator", "count"), [(one, str(count)) for one, count in read.most_common()]
            )
            show_counts("compiled", ("operator or kernel", "count"), done)
        else:
            names = sorted(read | compiled, key=lambda name: (-compiled[name], name))
            rows = [(name, str(read[name]), str(compiled[name])) for name in names]
            show_counts("operators", ("operator", "as it was read", "compiled"), rows)
        say(out, f"instructions of a run: {before.instructions} as it was read, {after.instructions} compiled")
    hidden = len(after.operators) - 40
    if hidden > 0:
        say(out, f"... and {hidden} more kinds (--json has them all)")
    if not after.kernels:
        say(out, "no fused kernels" + ("; the target ref runs operator by operator" if place == "target ref" else ""))
        return
    kernels = [(kernel.name, " + ".join(kernel.operators), str(kernel.count)) for kernel in after.kernels]
    show(out, table("fused kernels", ("kernel", "made of", "count"), kernels, left=2))


VERB = Verb(
    "Show a model's inputs, outputs and memory, and its operators before and after MIGraphX has compiled it: which"
    " operators are fused, and how much is copied to and from a GPU. Draw an ensemble's steps with --graph.",
    InspectOptions(),
    inspect,
    lambda options: options.model.model,
)
