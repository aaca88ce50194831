"""What a program is made of: has MIGraphX read the file of a recipe, in its own batch size or another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rocserve.backends.migraphx.binding.interface import (
    Binding,
    DimensionRange,
    OnnxOptions,
    Program,
    TensorflowOptions,
)
from rocserve.backends.migraphx.model_files.onnx_graph import read_onnx_graph
from rocserve.backends.migraphx.model_files.tensorflow_graph import read_tensorflow_graph
from rocserve.backends.migraphx.planning.recipe import ProgramRecipe, SourceKind
from rocserve.core.errors import internal, invalid_argument


@dataclass(frozen=True, slots=True)
class ProgramFile:
    output_names: tuple[str, ...]
    """In the program's order."""
    own_batch: int
    """The batch size that it has baked in; 0 = it is left open."""
    more_files: tuple[Path, ...]
    """That belong to it: external data."""


def read_program_file(recipe: ProgramRecipe, model_folder: Path) -> ProgramFile:
    """Raises: ServeError: INVALID_ARGUMENT; it cannot be read or is no model."""
    path = Path(recipe.source.path)
    files: tuple[Path, ...] = ()
    if recipe.source.kind is SourceKind.TENSORFLOW:
        inputs, names = read_tensorflow_graph(path).inputs, recipe.output_names
    else:
        graph = read_onnx_graph(path, (model_folder,))
        inputs, names = graph.inputs, tuple(output.name for output in graph.outputs)
        files = graph.external_files
    first = {tensor.dims[0] for tensor in inputs if tensor.dims}
    size = first.pop() if len(first) == 1 else 0
    return ProgramFile(names, size if isinstance(size, int) else 0, files)


def own_recipe(recipe: ProgramRecipe, own_batch: int) -> ProgramRecipe:
    """Of the same model in the batch size that its file has baked in."""
    shapes = {name: (own_batch, *shape[1:]) for name, shape in recipe.input_shapes.items()}
    return replace(recipe, batch_size=own_batch, largest_batch=0, rebatched=False, input_shapes=shapes)


def parse_recipe(binding: Binding, recipe: ProgramRecipe) -> Program:
    """The program, neither quantised nor compiled. Raises: MigraphxError: MIGraphX refuses the file. ServeError: it
    reads something else than was planned."""
    source = Path(recipe.source.path)
    varying = (DimensionRange(1, recipe.largest_batch),) if recipe.largest_batch else ()
    shapes = {name: (*varying, *shape[len(varying) :]) for name, shape in recipe.input_shapes.items()}
    if recipe.source.kind is SourceKind.ONNX:
        program = binding.parse_onnx(source, OnnxOptions(input_shapes=shapes))
    elif recipe.largest_batch:
        raise invalid_argument(
            "MIGraphX takes no TensorFlow graph with a batch size that varies; leave out dynamic_batch, and there is a"
            " program for each of batch_sizes"
        )
    else:
        options = TensorflowOptions(recipe.input_shapes, recipe.batch_size or 1, output_names=recipe.output_names)
        program = binding.parse_tensorflow(source, options)
    if not program.outputs:
        raise invalid_argument(f"MIGraphX finds no outputs in {source.name}; it is empty or damaged, copy it again")
    for name, tensor in program.parameters.items():
        if name not in shapes:
            raise internal(f"MIGraphX finds an input '{name}' in {source.name}, expected {', '.join(shapes)}")
        if tensor.shape != shapes[name]:
            raise internal(
                f"MIGraphX finds input '{name}' of {source.name} to be of shape {list(tensor.shape)}, expected"
                f" {list(shapes[name])}"
            )
    return program
