"""Runs `rocserve compile MODEL`: compiles its programs into the cache."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe
from rocserve.core.errors import invalid_argument, unavailable
from rocserve.core.printable import listed
from rocserve.core.printable import readable_size as size
from rocserve.settings.flag import flag, part, text
from rocserve.verbs.model_choice import ModelOptions, ToolModel, find_model
from rocserve.verbs.printing import ToolProgress, console_on, replacing, say, show, table
from rocserve.verbs.tool_context import ToolContext
from rocserve.verbs.verb import Verb

BATCH, SIZES = "{batch}", "{sizes}"
"""Placeholders for the batch size, and for the sizes of padded dimensions (such as 32 or 224x320), in an output file's
name."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    model: ModelOptions = part(ModelOptions, "model")
    output: str = flag(
        "",
        text("FILE.mxr"),
        "also write the program to this file; {batch} in its name becomes the batch size, {sizes} the sizes of padded"
        " dimensions, which several programs need",
    )


def run(options: CompileOptions) -> None:
    compile_model(find_model(options.model), options.output)


def compile_model(model: ToolModel, output: str) -> None:
    """Compile all programs into the cache, and copy them to `output` unless it is "". Raises ServeError."""
    rows: list[Sequence[str]] = []
    folders: list[str] = []
    with ToolProgress() as progress:
        context = ToolContext(model, progress.report)
        recipes = context.plan().recipes
        check_output(output, recipes)
        progress.steps(len(recipes))
        for recipe in recipes:
            program, is_from_cache = context.program(recipe)
            about = program.about
            rows.append(
                (
                    recipe.title,
                    recipe.options.precision.value,
                    "cache" if is_from_cache else "compiled",
                    f"{about.compile_seconds:.2f}",
                    size(program.size_bytes),
                    "-" if about.scratch_bytes is None else size(about.scratch_bytes),
                )
            )
            # If the cache's folder could not take the program, it is in another folder.
            folders.append(str(program.path.parents[2]))
            if output:
                target = output_path(output, recipe)
                try:
                    with program.path.open("rb") as source, replacing(target) as copy:
                        shutil.copyfileobj(source, copy)
                except OSError as error:
                    raise unavailable(f"cannot write {target}: {error.strerror or error}") from None
            progress.done()
    out = console_on()
    title = f"{model.source.name} on MIGraphX {context.library.version}, {context.place}"
    show(out, table(title, ("program", "precision", "from", "seconds", "size", "scratch"), rows, left=3))
    for recipe in recipes if output else ():
        say(out, f"{recipe.title}: {output_path(output, recipe)}")
    say(out, f"cache: {' and '.join(dict.fromkeys(folders))}")


def check_output(output: str, recipes: Sequence[ProgramRecipe]) -> None:
    """Check the name of the output file. Raises ServeError (INVALID_ARGUMENT) if several programs would go into one
    file, if the name does not end in .mxr (it might be the model file's name), or if its folder does not exist."""
    if not output:
        return
    if Path(output).suffix != ".mxr":
        raise invalid_argument(f"--output: expected a name that ends in .mxr, got '{output}'")
    if len({output_path(output, recipe) for recipe in recipes}) < len(recipes):
        batches, sizes = {recipe.batch_size for recipe in recipes}, set(map(_sizes, recipes))
        wanted = [mark for mark, count in ((BATCH, len(batches)), (SIZES, len(sizes))) if count > 1]
        named = ", ".join(str(rows) for rows in sorted(batches))
        programs = f"batch sizes {named}" if len(sizes) == 1 else listed([recipe.title for recipe in recipes], "; ")
        choose = "choose one with --batch-sizes, or " if len(sizes) == 1 else ""
        raise invalid_argument(
            f"--output takes one program, and there are {len(recipes)} ({programs}); {choose}have"
            f" {' and '.join(wanted)} in the file's name"
        )
    if not Path(output).absolute().parent.is_dir():
        raise invalid_argument(f"--output: the folder {Path(output).absolute().parent} does not exist")


def output_path(output: str, recipe: ProgramRecipe) -> Path:
    return Path(output.replace(BATCH, str(recipe.batch_size)).replace(SIZES, _sizes(recipe)))


def _sizes(recipe: ProgramRecipe) -> str:
    return "x".join(map(str, recipe.sizes.values()))


VERB = Verb(
    "Compile a model with MIGraphX, into the cache that a server uses or into a .mxr file. The command line"
    " takes precedence over the model's own parameters.",
    CompileOptions(),
    run,
    lambda options: options.model.model,
)
