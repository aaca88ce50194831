"""Runs `rocserve check MODEL`: checks that a model's engine computes the model, as a server does when it loads it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from rocserve.core.load_check import LoadCheckMode
from rocserve.flags import FlagError
from rocserve.settings.flag import SWITCH, Kind, flag, one_of, part
from rocserve.verbs.check.checking import Check, Checked, OutputRow
from rocserve.verbs.check.operator_search import OperatorFinding, TensorFinding
from rocserve.verbs.engines import ENGINES
from rocserve.verbs.model_choice import ModelOptions, find_model
from rocserve.verbs.printing import ToolProgress, complain, console_on, say, say_json, show, table
from rocserve.verbs.verb import Verb


@dataclass(frozen=True, slots=True)
class CheckOptions:
    model: ModelOptions = part(ModelOptions, "model")
    engine: str = flag(
        "auto", one_of(("auto", *ENGINES)), "the engine to check (default auto: as a server would choose)"
    )
    against: str = flag(
        "",
        one_of(ENGINES),
        "the reference engine (default: cpu for ONNX models, eager for PyTorch's files; cpu is ONNX Runtime's provider"
        " for the CPU)",
    )
    nodes: bool = flag(
        False, SWITCH, "if the outputs differ, find the first operator of the ONNX graph whose results differ"
    )
    record: Path | None = flag(
        None,
        Kind("FILE", Path),
        "write inputs and the reference's answers to this file; a server verifies the file check.npz beside a model at"
        " each load",
    )
    json: bool = flag(False, SWITCH, "print JSON")


def check(options: CheckOptions) -> int:
    """Check the model, print the result, and return the exit status: 1 if the model is not right. Raises FlagError if
    the options contradict each other, ServeError if the model cannot be loaded."""
    if options.model.engines.load_check == LoadCheckMode.OFF.value:
        raise FlagError("argument --load-check: expected on or strict, got off, which checks nothing")
    if options.record is not None and options.record.suffix != ".npz":
        raise FlagError(f"argument --record: expected a name that ends in .npz, got '{options.record}'")
    model = find_model(options.model)
    with ToolProgress() as progress:
        one = Check(
            model,
            options.engine,
            options.against,
            has_nodes=options.nodes,
            record=options.record,
            report=progress.report,
        )
        checked = asyncio.run(one.run())
    out = console_on()
    if options.json:
        say_json(out, checked)
    else:
        _print(checked, out)
    for fault in checked.faults:
        complain(f"rocserve check: {checked.model}: {fault}")
    return 1 if checked.faults else 0


def _print(checked: Checked, out: Console) -> None:
    say(out, f"{checked.model}: {checked.engine}")
    if checked.against:
        say(out, f"against: {checked.against}")
    columns = ("output", "type", "shape", "relative", "noise", "absolute", "with inputs")
    if checked.outputs:
        rows = [_cells(row) for row in checked.outputs]
        show(out, table("", columns if checked.is_compared else columns[:3], rows, left=3))
    if checked.is_compared:
        say(out, f"the worst of {checked.cases} kinds of inputs; relative and noise: to the output's largest value")
        say(out, "noise: how far the reference's own answer moves with the last place of the inputs")
        for remark in dict.fromkeys(row.error.verdict.remark for row in checked.outputs if row.error is not None):
            if remark:
                say(out, remark)
    elif not checked.against:
        say(out, "not compared: this engine is the reference, or there is none; name another with --against")
    if checked.load_check.parts:
        say(out, f"a server finds at the load: {checked.load_check.text}")
    if checked.operator is not None:
        _print_operator(checked.operator, out)
    if checked.recorded:
        say(out, f"recorded: {checked.recorded}; put it beside the model as check.npz, and each load verifies it")


def _cells(row: OutputRow) -> Sequence[str]:
    error = row.error
    if error is None:
        return row.output, row.datatype, _shape(row.shape)
    figures = (error.verdict.largest_error, error.noise, error.absolute)
    case = error.verdict.case or "all"
    return (row.output, row.datatype, _shape(row.shape), *(f"{figure:.2g}" for figure in figures), case)


def _shape(sizes: Sequence[int]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _print_operator(found: OperatorFinding, out: Console) -> None:
    what = "at which the engine fails" if found.failure else "that differs"
    say(out, f"the first operator {what}, {found.number} of {found.operators}: {found.operator}")
    if found.failure:
        say(out, found.failure)
    for tensor in found.tensors:
        say(out, f"{tensor.name} {_shape(tensor.expected_shape)} {_how_far(tensor)} with {tensor.case} inputs")
        rows = [(_shape(one.index), one.expected, one.actual) for one in tensor.values]
        if rows:
            show(out, table("", ("at", "expected", "the engine gives"), rows))


def _how_far(tensor: TensorFinding) -> str:
    if tensor.actual_shape != tensor.expected_shape:
        return f"has the shape {_shape(tensor.actual_shape)} in the engine"
    if math.isinf(tensor.difference):
        return "has NaN or infinity at other places"
    return f"differs by {tensor.difference:.2g} of its largest value"


VERB = Verb(
    "Check that a model's engine computes the model: load it as a server does, compare its answers with another"
    " engine's on made-up inputs or warm-up samples, and check whether the rows of a batch are independent. The exit"
    " status is 0 if all is right, else 1.",
    CheckOptions(),
    check,
    lambda options: options.model.model,
)
