"""Runs `rocserve compile MODEL`."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rich.console import Console

from rocserve.backends.migraphx.planning.recipe import ProgramRecipe
from rocserve.core.errors import invalid_argument, unavailable
from rocserve.settings.flag import SWITCH, flag, part, text
from rocserve.tools.compile.comparison import PrecisionResult, compare_precisions
from rocserve.tools.measuring.rounds import Timing
from rocserve.tools.model_choice import ModelOptions, ToolModel
from rocserve.tools.printing import complain, replacing, say, show, size, table
from rocserve.tools.progress import ToolProgress
from rocserve.tools.running import run_on_model
from rocserve.tools.tool_context import Compiled, ToolContext
from rocserve.tools.verb import UsageError, Verb

BATCH = "{batch}"
"""Stands for the batch size in the name of an output file."""

_COMPARED_COLUMNS = (
    "precision", "output", "largest", "mean", "relative", "cosine", "top-1", "p50 ms", "speed", ".mxr file",
)  # fmt: skip
_COLUMNS = ("program", "precision", "from", "seconds", "size", "scratch")


_COMPARED = Timing(seconds=1.0)


@dataclass(frozen=True, slots=True)
class CompileOptions:
    model: ModelOptions = part(ModelOptions)
    output: str = flag(
        "",
        text("FILE.mxr"),
        "write the program there; {batch} in the name stands for the batch size, where there are several",
        exclusive=True,
    )
    compare: bool = flag(
        False,
        SWITCH,
        "compile in each precision that is named (else fp32, fp16, bf16, with calibration data int8 and fp8) and"
        " report the errors against fp32, and the speed",
        exclusive=True,
    )
    timing: Timing = part(lambda: _COMPARED)


def run(options: CompileOptions) -> int | None:
    if options.compare:
        precisions = options.model.precision
        return run_on_model(
            replace(options.model, precision=()),
            lambda model, out, log: compare(model, precisions, options.timing, out, log),
        )
    for field in fields(Timing):
        if getattr(options.timing, field.name) != getattr(_COMPARED, field.name):
            name = field.name.replace("_", "-")
            raise UsageError(f"argument --{name}: needs --compare, without which nothing is timed")
    return run_on_model(options.model, lambda model, out, log: compile_model(model, options.output, out, log))


def compile_model(model: ToolModel, output: str, out: Console, log: logging.Logger) -> None:
    """Compile all programs of the model into the cache, and copy them to `output` where that is not "".

    Raises:
        ServeError: one cannot be compiled, with the reason.
    """
    rows: list[Sequence[str]] = []
    folders: list[str] = []
    with ToolProgress() as progress:
        context = ToolContext(model, progress.report, log)
        recipes = context.plan().recipes
        check_output(output, recipes)
        progress.steps(len(recipes))
        for recipe in recipes:
            compiled = context.program(recipe)
            rows.append(program_row(recipe, compiled))
            # Another than the cache's, where that could not take it.
            folders.append(str(compiled.program.path.parents[2]))
            if output:
                _copy(compiled.program.path, output_path(output, recipe))
            progress.done()
    show(
        out,
        table(f"{model.source.name} on MIGraphX {context.library.version}, {context.place}", _COLUMNS, rows, left=3),
    )
    for recipe in recipes if output else ():
        say(out, f"{recipe.title}: {output_path(output, recipe)}")
    say(out, f"cache: {' and '.join(dict.fromkeys(folders))}")


def compare(model: ToolModel, precisions: Sequence[str], timing: Timing, out: Console, log: logging.Logger) -> int:
    """Print the errors and the speed of each precision; the exit status, 1 when one of them failed.

    Raises:
        ServeError: fp32 cannot be compiled or run, or the samples cannot be read.
    """
    compared = compare_precisions(model, precisions, timing, log)
    rows = [row for result in compared.results for row in _comparison_rows(result)]
    show(out, table(f"{model.source.name}, {compared.title}, {compared.place}", _COMPARED_COLUMNS, rows, left=2))
    say(out, f"errors against fp32, on {compared.data}")
    say(out, "top-1: the share of rows whose largest element is at the same place; speed: fp32's p50 over its own")
    failures = [result.failure for result in compared.results if result.failure]
    for failure in failures:
        complain(f"rocserve compile: {failure}")
    return 1 if failures else 0


def _comparison_rows(result: PrecisionResult) -> Iterator[Sequence[str]]:
    if result.latency is None:
        yield (result.precision, "failed", *["-"] * (len(_COMPARED_COLUMNS) - 2))
        return
    speed = (f"{result.latency.p50:.3f}", f"{result.speed:.3g} x", size(result.size_bytes))
    for output, error in result.outputs.items():
        errors = (f"{error.largest:.3g}", f"{error.mean:.3g}", f"{error.relative:.3g}", f"{error.cosine:.6f}")
        top1 = "-" if error.top1 is None else f"{error.top1:.1%}"
        yield (result.precision, output, *errors, top1, *speed)


def program_row(recipe: ProgramRecipe, compiled: Compiled) -> Sequence[str]:
    about = compiled.program.about
    return (
        recipe.title,
        recipe.options.precision.value,
        "cache" if compiled.from_cache else "compiled",
        f"{about.compile_seconds:.2f}",
        size(compiled.program.size_bytes),
        "-" if about.scratch_bytes is None else size(about.scratch_bytes),
    )


def check_output(output: str, recipes: Sequence[ProgramRecipe]) -> None:
    """
    Raises:
        ServeError: INVALID_ARGUMENT, several programs would go into one file, the name is no program's (it may be that
            of the model's own file), or the folder is not there.
    """
    if not output:
        return
    if Path(output).suffix != ".mxr":
        raise invalid_argument(f"--output: expected a name that ends in .mxr, got '{output}'")
    if len(recipes) > 1 and BATCH not in output:
        sizes = ", ".join(str(recipe.batch_size) for recipe in recipes)
        raise invalid_argument(
            f"--output takes one program, and there are {len(recipes)} (batch sizes {sizes}); choose one with"
            f" --batch-sizes, or have {BATCH} in the file's name"
        )
    if not Path(output).absolute().parent.is_dir():
        raise invalid_argument(f"--output: the folder {Path(output).absolute().parent} does not exist")


def output_path(output: str, recipe: ProgramRecipe) -> Path:
    return Path(output.replace(BATCH, str(recipe.batch_size or recipe.largest_batch)))


def _copy(program: Path, target: Path) -> None:
    try:
        with program.open("rb") as source, replacing(target, 0o666 & ~_umask()) as copy:
            shutil.copyfileobj(source, copy)
    except OSError as error:
        raise unavailable(f"cannot write {target}: {error.strerror or error}") from None


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


VERB = Verb(
    "Compile a model with MIGraphX, into the cache that a server uses or into a .mxr file. What the command line says"
    " goes before the model's own parameters.",
    CompileOptions(),
    run,
    lambda options: options.model.model,
)
