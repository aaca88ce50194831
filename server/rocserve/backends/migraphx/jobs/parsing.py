"""Has MIGraphX read a model's file as a recipe says."""

from __future__ import annotations

from pathlib import Path

from rocserve.backends.migraphx.binding.interface import (
    Binding,
    DimensionRange,
    OnnxOptions,
    Program,
    TensorflowOptions,
)
from rocserve.backends.migraphx.planning.recipe import ProgramRecipe, SourceKind
from rocserve.core.errors import internal, invalid_argument


def parse_recipe(binding: Binding, recipe: ProgramRecipe) -> Program:
    """The program, neither quantised nor compiled.

    Raises:
        MigraphxError: MIGraphX refuses the file.
        ServeError: it reads something else than was planned.
    """
    source = Path(recipe.source.path)
    if recipe.source.kind is SourceKind.TENSORFLOW:
        program = binding.parse_tensorflow(source, _tensorflow_options(recipe))
    else:
        program = binding.parse_onnx(source, OnnxOptions(input_shapes=_wanted_shapes(recipe)))
    _check_parsed(program, recipe, source.name)
    return program


def _tensorflow_options(recipe: ProgramRecipe) -> TensorflowOptions:
    if recipe.largest_batch:
        raise invalid_argument(
            "MIGraphX takes no TensorFlow graph with a batch size that varies; leave out dynamic_batch, and there is a"
            " program for each of batch_sizes"
        )
    return TensorflowOptions(
        input_shapes=recipe.input_shapes,
        batch_size=recipe.batch_size or 1,
        output_names=recipe.output_names,
    )


def _wanted_shapes(recipe: ProgramRecipe) -> dict[str, tuple[int | DimensionRange, ...]]:
    if not recipe.largest_batch:
        return dict(recipe.input_shapes)
    batch = DimensionRange(1, recipe.largest_batch)
    return {name: (batch, *shape[1:]) for name, shape in recipe.input_shapes.items()}


def _check_parsed(program: Program, recipe: ProgramRecipe, file: str) -> None:
    """Raises: ServeError: MIGraphX has read something else than was planned."""
    if not program.outputs:
        raise invalid_argument(f"MIGraphX finds no outputs in {file}; it is empty or damaged, copy it again")
    wanted = _wanted_shapes(recipe)
    for name, tensor in program.parameters.items():
        if name not in wanted:
            raise internal(f"MIGraphX finds an input '{name}' in {file}, expected {', '.join(wanted)}")
        if tensor.shape != wanted[name]:
            raise internal(
                f"MIGraphX finds input '{name}' of {file} to be of shape {list(tensor.shape)}, expected"
                f" {list(wanted[name])}"
            )
