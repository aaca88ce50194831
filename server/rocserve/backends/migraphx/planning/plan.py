"""Which programs a model version consists of: what to compile, in which order, and what goes in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rocserve.backends.base import ModelSource
from rocserve.backends.batch_sizes import LARGEST_WITHOUT_CONFIGURATION, default_batch_sizes
from rocserve.backends.migraphx.calibration import calibration_digest
from rocserve.backends.migraphx.configuration.options import CompileOptions, Precision, ServingOptions
from rocserve.backends.migraphx.model_files.graph import Dims, GraphTensor, ModelGraph
from rocserve.backends.migraphx.model_files.onnx_graph import read_onnx_graph
from rocserve.backends.migraphx.model_files.tensorflow_graph import read_tensorflow_graph
from rocserve.backends.migraphx.planning.recipe import ProgramEnvironment, ProgramRecipe, ProgramSource, SourceKind
from rocserve.cache.digests import file_digest
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import ModelConfig

Shape = tuple[int, ...]

_IMAGE_RANK = 4
"""Dimensions of the tensors that have a layout."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """An input or output, as clients see it: of a TensorFlow graph images are NHWC, but NCHW to the program."""

    name: str
    datatype: DataType | None
    """None: known from the program only (an output of a TensorFlow graph)."""
    shape: Shape | None
    """Batch dimension included, as -1. Of an input all else is known; of an output -1 also is a dimension that
    the model leaves open, and None a shape that is known from the program only."""


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
    if batch and model.config.max_batch_size == 0:
        batch = None
    shapes = InputShapes(model.config, serving.input_shapes, batch is not None).resolve(graph.inputs)
    first = ProgramRecipe(
        source=ProgramSource(kind, str(path), file_digest(path, graph.external_files)),
        options=options,
        environment=environment,
        output_names=output_names,
        calibration_digest=calibration_digest(options, model.model_folder),
    )
    return ProgramPlan(
        recipes=_recipes(first, serving, batch, largest, shapes),
        inputs=tuple(
            PlannedTensor(
                tensor.name, tensor.datatype, shapes[tensor.name] if batch is None else (-1, *shapes[tensor.name])
            )
            for tensor in graph.inputs
        ),
        outputs=tuple(_planned_output(tensor, batch) for tensor in graph.outputs),
        batches=batch is not None,
        weight_bytes=graph.weight_bytes,
    )


def _read_tensorflow(config: ModelConfig, path: Path) -> tuple[ModelGraph, tuple[str, ...]]:
    """And the nodes that the compiler is asked for: the configuration's outputs where the graph has nodes of these
    names (else the server reports which there are)."""
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
        ServeError: INVALID_ARGUMENT; MIGraphX needs fixed shapes for the configured precision or format.
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
    batch: int | None,
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
                rebatched=batch > 0,
            ),
        )
    return tuple(
        replace(
            first,
            batch_size=size,
            input_shapes=_program_shapes(first, shapes, size),
            rebatched=batch not in (0, size),
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


def _planned_output(tensor: GraphTensor, batch: int | None) -> PlannedTensor:
    if tensor.dims is None:
        return PlannedTensor(tensor.name, tensor.datatype, None)
    shape = tuple(dim if isinstance(dim, int) else -1 for dim in tensor.dims)
    return PlannedTensor(tensor.name, tensor.datatype, shape if batch is None else (-1, *shape[1:]))


def find_batch_dimension(inputs: Sequence[GraphTensor], outputs: Sequence[GraphTensor]) -> int | None:
    """The number that the file has baked in for the first dimension of every input and output, where that counts a
    batch's rows; 0 = it is left open. None for a model whose tensors share no first dimension: it cannot batch."""
    leads = [_lead(tensor.dims) for tensor in inputs]
    if not leads or None in leads:
        return None
    numbers = {lead for lead in leads if isinstance(lead, int)}
    if not numbers:
        fits = all(isinstance(_lead(output.dims), str) for output in outputs)
        return 0 if fits else None
    baked = numbers.pop()
    if numbers or not all(isinstance(lead, int) for lead in leads):
        return None
    fits = all(isinstance(lead, str) or lead == baked for lead in (_lead(output.dims) for output in outputs))
    return baked if fits else None


def _lead(dims: Dims | None) -> int | str | None:
    """The first dimension; None for a scalar. A tensor of which nothing is known may have any."""
    if dims is None:
        return ""
    return dims[0] if dims else None


class InputShapes:
    """Finds the numbers for one model; dimensions of one name have one number."""

    def __init__(self, config: ModelConfig, given: Mapping[str, Shape], batches: bool) -> None:
        """
        Args:
            given: the parameter `input_shapes`.
            batches: whether the first dimension is the batch, which has no number here.
        """
        self._model = config.name
        self._configured = {
            entry.name: entry.dims if entry.reshape is None else entry.reshape for entry in config.inputs
        }
        self._given = given
        self._batches = batches

    def resolve(self, inputs: Sequence[GraphTensor]) -> dict[str, Shape]:
        """By input; without the batch dimension.

        Raises:
            ServeError: INVALID_ARGUMENT; a dimension has no number, or two.
        """
        names = [tensor.name for tensor in inputs]
        for name in self._given:
            if name not in names:
                raise self._wrong(f"'input_shapes' names '{name}', but the model's inputs are {', '.join(names)}")
        known = {tensor.name: self._known(tensor) for tensor in inputs}
        numbers: dict[str, int] = {}
        for tensor in inputs:
            for symbol, number in zip(self._own_dims(tensor) or (), known[tensor.name], strict=False):
                if not (isinstance(symbol, str) and symbol and isinstance(number, int)):
                    continue
                if numbers.setdefault(symbol, number) != number:
                    raise self._wrong(
                        f"dimension '{symbol}' is {numbers[symbol]} in one input and {number} in '{tensor.name}';"
                        " make 'input_shapes' agree"
                    )
        return {tensor.name: self._completed(tensor, known[tensor.name], numbers) for tensor in inputs}

    def _own_dims(self, tensor: GraphTensor) -> Dims | None:
        """The model's, without the batch dimension."""
        return tensor.dims[1:] if self._batches and tensor.dims is not None else tensor.dims

    def _known(self, tensor: GraphTensor) -> Dims:
        """The model's dims, open ones as the parameter or the configuration gives them."""
        dims = self._own_dims(tensor)
        given = self._given.get(tensor.name)
        configured = self._configured.get(tensor.name)
        if dims is None:
            if given is None and configured is None:
                raise self._wrong(
                    f"input '{tensor.name}' has no shape in the model file; give it one: parameter 'input_shapes'"
                    f' "{tensor.name}: 3x224x224"'
                )
            return given if given is not None else tuple(dim if dim > 0 else "" for dim in configured or ())
        if given is not None:
            return self._checked(tensor, dims, given)
        if configured is None or len(configured) != len(dims):
            # Where the configuration contradicts the model, the server says so when it completes it.
            return dims
        return tuple(
            number if isinstance(dim, str) and number > 0 else dim for dim, number in zip(dims, configured, strict=True)
        )

    def _checked(self, tensor: GraphTensor, dims: Dims, given: Shape) -> Dims:
        if len(given) != len(dims) or any(
            isinstance(dim, int) and dim != number for dim, number in zip(dims, given, strict=True)
        ):
            without = " (without the batch dimension)" if self._batches else ""
            raise self._wrong(
                f"'input_shapes' gives input '{tensor.name}' {_shown(given)}, but the model has {_shown(dims)}"
                f"{without}; only dimensions that it leaves open can be chosen"
            )
        return given

    def _completed(self, tensor: GraphTensor, dims: Dims, numbers: Mapping[str, int]) -> Shape:
        shape: list[int] = []
        for axis, dim in enumerate(dims):
            number = numbers.get(dim) if isinstance(dim, str) else dim
            if number is None:
                raise self._open(tensor, axis + self._batches, str(dim))
            shape.append(number)
        return tuple(shape)

    def _open(self, tensor: GraphTensor, axis: int, symbol: str) -> ServeError:
        named = f" ('{symbol}')" if symbol else ""
        example = "x".join(str(dim) if isinstance(dim, int) else "?" for dim in self._own_dims(tensor) or ())
        batch = ""
        if axis == 0:
            batch = "; if it is the batch, set max_batch_size instead"
        return self._wrong(
            f"dimension {axis}{named} of input '{tensor.name}' is left open by the model, and MIGraphX compiles fixed"
            f" shapes only: give it a number in the configuration's dims or in parameter 'input_shapes'"
            f' "{tensor.name}: {example}"{batch}'
        )

    def _wrong(self, text: str) -> ServeError:
        return invalid_argument(f"model '{self._model}': {text}")


def _shown(dims: Dims) -> str:
    return "[" + ", ".join(str(dim) or "?" for dim in dims) + "]"
