"""Which programs a model version consists of: what to compile, in which order, and what goes in and out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rocserve.backends.base import ModelSource
from rocserve.backends.batch_sizes import LARGEST_WITHOUT_CONFIGURATION, default_batch_sizes
from rocserve.backends.migraphx.calibration import calibration_digest
from rocserve.backends.migraphx.configuration.options import CompileOptions, Precision, ServingOptions
from rocserve.backends.migraphx.model_files.graph import GraphTensor, ModelGraph
from rocserve.backends.migraphx.model_files.onnx_graph import read_onnx_graph
from rocserve.backends.migraphx.model_files.tensorflow_graph import read_tensorflow_graph
from rocserve.backends.migraphx.planning.recipe import ProgramEnvironment, ProgramRecipe, ProgramSource, SourceKind
from rocserve.backends.migraphx.planning.tensor_shapes import BatchDimension, InputShapes, Shape, find_batch_dimension
from rocserve.cache.digests import file_digest
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import ModelConfig

_IMAGE_RANK = 4
"""Tensors of so many dimensions have a layout."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """An input or output, as clients see it."""

    name: str
    datatype: DataType | None
    """None: only the program tells (an output of a TensorFlow graph)."""
    shape: Shape | None
    """Batch dimension included, as -1. Of an input all else is known; of an output -1 also stands for what the model
    leaves open, and None for a shape of which it says nothing: the program tells."""
    may_be_nhwc: bool = False
    """Of a TensorFlow graph: where it has four dimensions it is NHWC to clients, but NCHW to the program."""


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    recipes: tuple[ProgramRecipe, ...]
    """In the order to compile them; at least one."""
    inputs: tuple[PlannedTensor, ...]
    outputs: tuple[PlannedTensor, ...]
    """In the program's order."""
    batches: bool
    """Whether the first dimension of every tensor is the batch."""
    weight_bytes: int
    """Of the model as its file has it."""


def plan_programs(
    model: ModelSource,
    options: CompileOptions,
    serving: ServingOptions,
    environment: ProgramEnvironment,
    *,
    model_file: Path | None = None,
) -> ProgramPlan:
    """The programs of a version whose file is an ONNX model or a TensorFlow graph.

    Args:
        model_file: instead of the version's own: the ONNX file beside a .mxr that is to be compiled anew.

    Raises:
        ServeError: INVALID_ARGUMENT where the file or the configuration is wrong, UNAVAILABLE where a file cannot be
            read.
    """
    path = model_file or model.model_file
    kind, output_names = SourceKind.ONNX, tuple[str, ...]()
    if model.config.backend == "tensorflow" and model_file in (None, model.model_file):
        kind = SourceKind.TENSORFLOW
        graph, output_names = _read_tensorflow(model.config, path)
    else:
        graph = read_onnx_graph(path, (model.model_folder,))
    if serving.dynamic_batch:
        _check_dynamic_batch(model.name, options, kind)
    if graph.is_quantised and options.precision is not Precision.FP32:
        # fp16 and bf16 as well: they make the scales too coarse, with errors above 20% and no word of it.
        raise invalid_argument(
            f"model '{model.name}' is quantised already ({path.name} holds quantising operators), so precision"
            f' "{options.precision.value}" cannot be; leave it out and the model runs as it is'
        )
    largest = LARGEST_WITHOUT_CONFIGURATION if model.config.has_open_batch else model.config.max_batch_size
    batch = find_batch_dimension(graph.inputs, graph.outputs) if largest else None
    if batch is not None and batch.baked and model.config.max_batch_size == 0:
        batch = None
    shapes = InputShapes(model.config, serving.input_shapes, batch is not None).resolve(graph.inputs)
    first = ProgramRecipe(
        source=ProgramSource(kind, str(path), file_digest(path, graph.external_files)),
        options=options,
        environment=environment,
        output_names=output_names,
        calibration_digest=calibration_digest(options, model.model_folder),
    )
    reorders = kind is SourceKind.TENSORFLOW
    return ProgramPlan(
        recipes=_recipes(first, serving, batch, largest, shapes),
        inputs=tuple(
            PlannedTensor(
                tensor.name,
                tensor.datatype,
                shapes[tensor.name] if batch is None else (-1, *shapes[tensor.name]),
                reorders,
            )
            for tensor in graph.inputs
        ),
        outputs=tuple(_planned_output(tensor, batch, reorders) for tensor in graph.outputs),
        batches=batch is not None,
        weight_bytes=graph.weight_bytes,
    )


def _read_tensorflow(config: ModelConfig, path: Path) -> tuple[ModelGraph, tuple[str, ...]]:
    """And the nodes that the compiler is asked for: the configuration's outputs where the graph has nodes of these
    names (else the server tells which there are)."""
    frozen = read_tensorflow_graph(path)
    names = tuple(output.name for output in config.outputs)
    if not names or any(name.removesuffix(":0") not in frozen.nodes for name in names):
        names = frozen.outputs
    node_names = tuple(name.removesuffix(":0") for name in names)
    frozen.check_outputs(node_names)
    outputs = tuple(GraphTensor(name, None, None) for name in names)
    return ModelGraph(frozen.inputs, outputs, path.stat().st_size), node_names


def _check_dynamic_batch(model: str, options: CompileOptions, kind: SourceKind) -> None:
    """
    Raises:
        ServeError: INVALID_ARGUMENT; MIGraphX needs fixed shapes for what the configuration asks for.
    """
    why = ""
    if options.precision.needs_calibration:
        why = f'precision "{options.precision.value}"'
    elif kind is SourceKind.TENSORFLOW:
        why = "a TensorFlow graph"
    if why:
        raise invalid_argument(
            f"model '{model}': 'dynamic_batch' cannot be had with {why}, for which MIGraphX needs fixed shapes; leave"
            " it out, and there is a program for each of 'batch_sizes'"
        )


def _recipes(
    first: ProgramRecipe,
    serving: ServingOptions,
    batch: BatchDimension | None,
    largest: int,
    shapes: Mapping[str, Shape],
) -> tuple[ProgramRecipe, ...]:
    if batch is None:
        return (replace(first, input_shapes=_program_shapes(first, shapes)),)
    if serving.dynamic_batch:
        return (
            replace(
                first,
                largest_batch=largest,
                input_shapes=_program_shapes(first, shapes, 1),
                rebatched=batch.baked > 0,
            ),
        )
    return tuple(
        replace(
            first,
            batch_size=size,
            input_shapes=_program_shapes(first, shapes, size),
            rebatched=batch.baked not in (0, size),
        )
        for size in serving.batch_sizes or default_batch_sizes(largest)
    )


def _program_shapes(recipe: ProgramRecipe, shapes: Mapping[str, Shape], *batch: int) -> dict[str, Shape]:
    """As MIGraphX has them, which turns the images of TensorFlow graphs to NCHW."""
    full = {name: (*batch, *shape) for name, shape in shapes.items()}
    if recipe.source.kind is SourceKind.TENSORFLOW:
        return {name: to_nchw(shape) for name, shape in full.items()}
    return full


def to_nchw(shape: Shape) -> Shape:
    """Of an NHWC tensor; shapes of another number of dimensions stay as they are."""
    if len(shape) != _IMAGE_RANK:
        return shape
    rows, height, width, channels = shape
    return (rows, channels, height, width)


def _planned_output(tensor: GraphTensor, batch: BatchDimension | None, reorders: bool) -> PlannedTensor:
    if tensor.dims is None:
        return PlannedTensor(tensor.name, tensor.datatype, None, reorders)
    shape = tuple(dim if isinstance(dim, int) else -1 for dim in tensor.dims)
    return PlannedTensor(tensor.name, tensor.datatype, shape if batch is None else (-1, *shape[1:]), reorders)
