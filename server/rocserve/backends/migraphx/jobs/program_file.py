"""What a program is made of: the file of its recipe, and how it is in the batch size that the file has baked in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rocserve.backends.migraphx.model_files.graph_tensor import GraphTensor
from rocserve.backends.migraphx.model_files.onnx_graph import read_onnx_graph
from rocserve.backends.migraphx.model_files.tensorflow_graph import read_tensorflow_graph
from rocserve.backends.migraphx.planning.recipe import ProgramRecipe, SourceKind


@dataclass(frozen=True, slots=True)
class ProgramFile:
    output_names: tuple[str, ...]
    """In the program's order."""
    own_batch: int
    """The batch size that it has baked in; 0 = it is left open."""
    more_files: tuple[Path, ...]
    """That belong to it: external data."""


def read_program_file(recipe: ProgramRecipe, model_folder: Path) -> ProgramFile:
    """
    Raises:
        ServeError: INVALID_ARGUMENT; it cannot be read or is no model.
    """
    path = Path(recipe.source.path)
    if recipe.source.kind is SourceKind.TENSORFLOW:
        frozen = read_tensorflow_graph(path)
        return ProgramFile(recipe.output_names, _own_batch(frozen.inputs), ())
    graph = read_onnx_graph(path, (model_folder,))
    names = tuple(output.name for output in graph.outputs)
    return ProgramFile(names, _own_batch(graph.inputs), graph.external_files)


def own_recipe(recipe: ProgramRecipe, own_batch: int) -> ProgramRecipe:
    """Of the same model in the batch size that its file has baked in."""
    shapes = {name: (own_batch, *shape[1:]) for name, shape in recipe.input_shapes.items()}
    return replace(recipe, batch_size=own_batch, largest_batch=0, rebatched=False, input_shapes=shapes)


def _own_batch(inputs: Sequence[GraphTensor]) -> int:
    first = {tensor.dims[0] for tensor in inputs if tensor.dims}
    size = first.pop() if len(first) == 1 else 0
    return size if isinstance(size, int) else 0
