"""Runs `rocserve inspect MODEL`: prints an inspection."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rich.console import Console

from rocserve.backends.migraphx.binding.interface import DimensionRange
from rocserve.tools.inspect.model import Inspection, ProgramFacts, TensorFacts, inspect_model
from rocserve.tools.inspect.summary import Copies, ProgramSummary, plain_counts
from rocserve.tools.model_choice import ToolModel
from rocserve.tools.printing import say, show, size, table

_SHOWN_OPERATORS = 40


def inspect(model: ToolModel, with_text: bool, as_json: bool, out: Console, log: logging.Logger) -> None:
    """Raises: ServeError: MIGraphX cannot be had here, or cannot read or compile the model."""
    inspection = inspect_model(model, log)
    if as_json:
        say(out, inspection.json())
        return
    _print_head(inspection, out)
    first, *others = inspection.programs
    _print_tensors(first, out)
    if others:
        say(out, f"{', '.join(program.title for program in others)}: the same, with as many rows")
    _print_memory(inspection, out)
    # All programs of a model are alike but for their sizes; the largest has the most to say.
    _print_operators(inspection.programs[-1], inspection.place, out)
    if with_text:
        for program in inspection.programs:
            _print_text(program, out)


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
            facts.append("without offload_copy: it wants its tensors in GPU memory")
        say(out, ", ".join(facts))
    if inspection.refusal:
        say(out, f"a server would not run it: {inspection.refusal}")


def _print_tensors(program: ProgramFacts, out: Console) -> None:
    rows = [("input", *_cells(tensor)) for tensor in program.inputs]
    rows += [("output", *_cells(tensor)) for tensor in program.outputs]
    show(out, table(program.title, ("", "name", "type", "shape", "bytes"), rows, left=4))


def _cells(tensor: TensorFacts) -> tuple[str, str, str, str]:
    return tensor.name, tensor.datatype, f"[{', '.join(map(_dimension, tensor.shape))}]", size(tensor.bytes)


def _dimension(dim: int | DimensionRange) -> str:
    """ "1-8" where it varies."""
    return f"{dim.least}-{dim.most}" if isinstance(dim, DimensionRange) else str(dim)


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
    if inspection.weight_bytes is not None:
        say(out, f"weights in the model's file: {size(inspection.weight_bytes)}")


def _copies(copies: Copies) -> str:
    return f"{copies.count} x, {size(copies.bytes)}" if copies.count else "none"


def _print_operators(program: ProgramFacts, place: str, out: Console) -> None:
    before, after = program.before, program.after
    if before is None:
        rows = [(operator.name, str(operator.count)) for operator in after.operators[:_SHOWN_OPERATORS]]
        show(out, table(f"{program.title}: what a run does", ("operator", "count"), rows))
    else:
        _print_change(program.title, before, after, out)
    hidden = len(after.operators) - _SHOWN_OPERATORS
    if hidden > 0:
        say(out, f"... and {hidden} more kinds (--json has them all)")
    if not after.kernels:
        say(out, "no fused kernels" + ("; the target ref runs operator by operator" if place == "target ref" else ""))
        return
    kernels = [(kernel.name, " + ".join(kernel.operators), str(kernel.count)) for kernel in after.kernels]
    show(out, table("fused kernels", ("kernel", "made of", "count"), kernels, left=2))


def _print_change(title: str, before: ProgramSummary, after: ProgramSummary, out: Console) -> None:
    counts_before = plain_counts(before)
    if after.kernels:
        rows: Sequence[Sequence[str]] = [(name, str(count)) for name, count in counts_before.most_common()]
        show(out, table(f"{title}: as it was read", ("operator", "count"), rows[:_SHOWN_OPERATORS]))
        rows = [(operator.name, str(operator.count)) for operator in after.operators]
        show(out, table(f"{title}: compiled", ("operator or kernel", "count"), rows[:_SHOWN_OPERATORS]))
    else:
        counts_after = plain_counts(after)
        names = sorted(counts_before | counts_after, key=lambda name: (-counts_after[name], name))
        rows = [(name, str(counts_before[name]), str(counts_after[name])) for name in names]
        columns = ("operator", "as it was read", "compiled")
        show(out, table(f"{title}: operators", columns, rows[:_SHOWN_OPERATORS]))
    say(out, f"instructions of a run: {before.instructions} as it was read, {after.instructions} compiled")


def _print_text(program: ProgramFacts, out: Console) -> None:
    if program.before_text:
        say(out, f"\n{program.title}, as it was read:\n{program.before_text.strip()}")
    say(out, f"\n{program.title}, compiled:\n{program.after_text.strip()}")
