"""Plans the programs of a model version: what to compile and in which order, their inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rocserve.backends.base import ModelSource
from rocserve.backends.batch_sizes import LARGEST_WITHOUT_CONFIGURATION, default_batch_sizes
from rocserve.backends.migraphx.compiling.bucket_programs import at_largest, planned_padding, programs
from rocserve.backends.migraphx.compiling.calibration import calibration_digest
from rocserve.backends.migraphx.compiling.graph import Dims, GraphTensor, ModelGraph, is_beyond_memory
from rocserve.backends.migraphx.compiling.known_faults import KnownFault
from rocserve.backends.migraphx.compiling.onnx_graph import read_onnx_graph
from rocserve.backends.migraphx.compiling.recipe import ProgramEnvironment, ProgramRecipe, ProgramSource, SourceKind
from rocserve.backends.migraphx.compiling.tensorflow_graph import read_tensorflow_graph
from rocserve.backends.migraphx.compiling.wanted_sizes import (
    SizesMissing,
    WantedSizes,
    fewer_sizes,
    wanted_padding,
    with_sizes,
    within_limit,
)
from rocserve.backends.migraphx.options import CompileOptions, Precision, ServingOptions, wrong
from rocserve.backends.migraphx.tensors import nchw, nhwc
from rocserve.cache.digests import file_digest
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import NO_PURPOSE, ModelConfig, Purpose
from rocserve.core.padding import NO_PADDING, Buckets, Lengths, PaddedDimension, Padding

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    recipes: tuple[ProgramRecipe, ...]
    """In compile order; at least one."""
    inputs: tuple[GraphTensor, ...]
    """As clients see them: images of TensorFlow graphs are NHWC. Only the batch, and what is padded, is open."""
    outputs: tuple[GraphTensor, ...]
    """In the program's order, as clients see them. The batch is open."""
    batches: bool
    """Whether the first dimension of every tensor is the batch."""
    weight_bytes: int
    """Size of the weights in the model's file."""
    file_batch: int = 0
    """The batch size that the file fixes; 0 = it leaves the batch open, or there is none."""
    is_quantised: bool = False
    faults: Mapping[str, KnownFault] = field(default_factory=dict)
    """Operator -> its fault in MIGraphX that no comparison finds."""
    purpose: Purpose = NO_PURPOSE
    padding: Padding = NO_PADDING
    kept_batches: Shape = ()
    """Batch sizes that `fewer` keeps."""

    def shape_in(self, tensor: GraphTensor, recipe: ProgramRecipe) -> Shape | None:
        """Return the shape of an input or output in a program, as clients see it, with -1 for the batch and for sizes
        that only the program knows; None = the file does not even have the number of dimensions."""
        shape, buckets = tensor.shape, Buckets(self.padding)
        return None if shape is None else buckets.padded_shape(tensor.name, shape, tuple(recipe.sizes.values()))

    @property
    def first(self) -> ProgramRecipe:
        """The recipe of the program with which the model is ready: it takes the largest sizes. The batch size that a
        file fixes always works; others may fail."""
        return min(self.recipes, key=lambda recipe: (recipe.rebatched, recipe.sizes != self.recipes[0].sizes))

    @property
    def smallest(self) -> ProgramRecipe:
        """The recipe of the program that takes the least work."""
        return min(self.recipes, key=lambda recipe: (recipe.batch_size, *recipe.sizes.values()))

    def at(self, lengths: Lengths) -> ProgramRecipe:
        """Return the recipe of the first program at other lengths of the padded dimensions."""
        recipe, buckets = self.first, Buckets(self.padding)
        shapes = {
            name: nchw(buckets.padded_shape(name, nhwc(shape), lengths))
            if recipe.source.kind is SourceKind.TENSORFLOW
            else buckets.padded_shape(name, shape, lengths)
            for name, shape in recipe.input_shapes.items()
        }
        return replace(recipe, input_shapes=shapes, sizes=dict(zip(recipe.sizes, lengths, strict=True)))

    def fewer(self) -> Iterator[ProgramPlan]:
        """Yield this plan, and then plans of ever fewer programs with the same first one."""
        batches = tuple(sorted({recipe.batch_size for recipe in self.recipes}))
        for rows, sizes in fewer_sizes(batches, [one.sizes for one in self.padding.dimensions], self.kept_batches):
            recipes = tuple(
                recipe
                for recipe in self.recipes
                if recipe.batch_size in rows
                and all(size in own for size, own in zip(recipe.sizes.values(), sizes, strict=True))
            )
            yield replace(self, recipes=recipes, padding=with_sizes(self.padding, sizes))

    def with_outputs(self, names: Sequence[str]) -> ProgramPlan:
        """Return the plan with other names of the outputs."""
        renamed = {tensor.name: name for tensor, name in zip(self.outputs, names, strict=True)}
        dimensions = tuple(
            replace(one, outputs={renamed[name]: places for name, places in one.outputs.items()})
            for one in self.padding.dimensions
        )
        return replace(
            self,
            outputs=tuple(replace(tensor, name=renamed[tensor.name]) for tensor in self.outputs),
            padding=replace(self.padding, dimensions=dimensions),
        )


def plan_programs(
    model: ModelSource,
    options: CompileOptions,
    serving: ServingOptions,
    environment: ProgramEnvironment,
    *,
    model_file: Path | None = None,
    no_batch: str = "",
    default: Padding = NO_PADDING,
    equal: Callable[[WantedSizes], Sequence[Sequence[int]]] | None = None,
) -> ProgramPlan:
    """Plan the programs of a version, from its own file or from `model_file` (the ONNX file next to a .mxr).
    `no_batch`: why the first dimension is not a batch, whatever the shapes say; "" = the shapes decide. `default`: how
    dimensions without a number are padded, as SizesMissing has asked for. `equal`: finds in an ONNX file which of the
    dimensions must be equal, by their indices; None = none but those of one name. Raises SizesMissing, ServeError
    (INVALID_ARGUMENT) if the file or the configuration is wrong, ServeError (UNAVAILABLE) if a file cannot be read."""
    path = model_file or model.model_file
    is_tensorflow = model.config.backend == "tensorflow" and model_file in (None, model.model_file)
    kind = SourceKind.TENSORFLOW if is_tensorflow else SourceKind.ONNX
    # If the graph lacks a configured output, the server's completion reports the existing ones.
    graph = read_graph(kind, path, model.model_folder, [output.name for output in model.config.outputs])
    output_names = tuple(output.name.removesuffix(":0") for output in graph.outputs) if is_tensorflow else ()
    is_paddable = not is_tensorflow and not options.precision.needs_calibration
    if constant := graph.defaults.intersection(entry.name for entry in model.config.inputs):
        raise invalid_argument(
            f"model '{model.name}': input '{min(constant)}' has a default in {path.name}, which MIGraphX takes as a"
            " constant; leave the input out of the configuration, or let ONNX Runtime run the model: parameter 'engine'"
            ' "onnxruntime"'
        )
    if graph.is_quantised and options.precision is not Precision.FP32:
        # fp16 and bf16 also make the scales too coarse: errors exceed 20 %, silently.
        raise invalid_argument(
            f"model '{model.name}' is quantised already ({path.name} holds quantising operators), so precision"
            f' "{options.precision.value}" does not apply; remove it to run the model unchanged'
        )
    largest = LARGEST_WITHOUT_CONFIGURATION if model.config.has_open_batch else model.config.max_batch_size
    batch = batch_dimension(graph) if largest and not no_batch else None
    if model.config.max_batch_size == 0 and (batch or _gives_first_dimension(serving.input_shapes, graph.inputs)):
        batch = None
    if batch is None and largest and serving.batch_sizes and model.config.max_batch_size == 0 and not no_batch:
        taken, given = (
            ", ".join(f"{one.name} {'?' if one.dims is None else _dims_text(one.dims)}" for one in tensors)
            for tensors in (graph.inputs, graph.outputs)
        )
        raise invalid_argument(
            f"model '{model.name}': parameter 'batch_sizes' or 'batch' without max_batch_size is for a model whose"
            " inputs and outputs all leave their first dimension open, which is the batch;"
            f" {path.name} takes {taken} and gives {given}. Leave the parameter out, or set max_batch_size if the first"
            " dimension is the batch"
        )
    rows_fault = no_batch or ("" if batch is not None else "no batch")
    source = ProgramSource(kind, str(path), file_digest(path, graph.external_files))

    def groups(dimensions: Sequence[PaddedDimension]) -> Sequence[Sequence[int]]:
        shapes = _input_shapes(model.config, serving.input_shapes, graph.inputs, batch is not None)
        assert equal is not None, "the caller has seen to it"
        return equal(WantedSizes(source, Padding((*dimensions,)), _open_shapes(shapes), batch is not None))

    padding = default
    if not default.dimensions:
        finds = equal is not None and not is_tensorflow
        padding = planned_padding(
            model.config, options, serving.input_shapes, graph, rows_fault, groups if finds else None
        )
    batches = serving.batch_sizes or default_batch_sizes(largest)
    if batch is None:
        batches = (0,)
    # The program of the first size, or of the file's own, is the one with which the model is ready.
    kept = batches if serving.has_named_sizes else (batches[0], *(size for size in batches if size == batch))
    if default.dimensions:
        padding, batches = within_limit(default, batches, kept)
    sized = at_largest(graph.inputs, padding)
    shapes = _input_shapes(model.config, serving.input_shapes, sized, batch is not None)
    for name, dims in (*shapes.items(), *((output.name, output.dims or ()) for output in graph.outputs)):
        if is_beyond_memory(dims):
            raise invalid_argument(f"model '{model.name}': the shape of tensor '{name}' exceeds any memory")
    _check_numbers(
        model.config, graph, shapes, batch is not None, rows_fault, no_batch, source if is_paddable else None
    )
    first = ProgramRecipe(
        source=source,
        options=options,
        environment=environment,
        output_names=output_names,
        calibration_digest=calibration_digest(options, model.model_folder),
    )
    lead: Dims = () if batch is None else ("",)
    buckets = Buckets(padding)

    def planned_input(tensor: GraphTensor) -> GraphTensor:
        open_places = {place: "" for place, _ in buckets.inputs.get(tensor.name, ())}
        dims = (*lead, *shapes[tensor.name])
        return replace(tensor, dims=tuple(open_places.get(place, dim) for place, dim in enumerate(dims)))

    return ProgramPlan(
        recipes=_recipes(model.name, first, batch, batches, shapes, padding),
        inputs=tuple(map(planned_input, graph.inputs)),
        outputs=tuple(
            tensor if tensor.dims is None else replace(tensor, dims=(*lead, *tensor.dims[len(lead) :]))
            for tensor in graph.outputs
        ),
        batches=batch is not None,
        file_batch=batch or 0,
        weight_bytes=graph.weight_bytes,
        is_quantised=graph.is_quantised,
        faults=graph.faults,
        purpose=graph.purpose,
        padding=padding,
        kept_batches=kept,
    )


def read_graph(kind: SourceKind, path: Path, model_folder: Path, output_names: Sequence[str]) -> ModelGraph:
    """Read a model file's graph. `output_names`: the requested outputs of a TensorFlow graph. Raises ServeError
    (INVALID_ARGUMENT) if the file cannot be read or is not a model."""
    if kind is SourceKind.TENSORFLOW:
        return read_tensorflow_graph(path, output_names)
    return read_onnx_graph(path, (model_folder,))


def _recipes(
    model_name: str,
    first: ProgramRecipe,
    batch: int | None,
    batch_sizes: Shape,
    shapes: Mapping[str, Shape],
    padding: Padding,
) -> tuple[ProgramRecipe, ...]:
    buckets, labels = Buckets(padding), [dimension.label for dimension in padding.dimensions]

    def of_rows(rows: Shape, sizes: Lengths, **options: Any) -> ProgramRecipe:
        """Return the recipe with MIGraphX's shapes: NCHW for NHWC images of TensorFlow graphs."""
        full = {name: buckets.padded_shape(name, (*rows, *shape), sizes) for name, shape in shapes.items()}
        if first.source.kind is SourceKind.TENSORFLOW:
            full = {name: nchw(shape) for name, shape in full.items()}
        return replace(first, input_shapes=full, sizes=dict(zip(labels, sizes, strict=True)), **options)

    if batch is None:
        return tuple(of_rows((), sizes) for _, sizes in programs(padding, (0,), model_name))
    return tuple(
        of_rows((rows,), sizes, batch_size=rows, rebatched=batch not in (0, rows))
        for rows, sizes in programs(padding, batch_sizes, model_name)
    )


def batch_dimension(graph: ModelGraph) -> int | None:
    """Return the batch size that the file fixes: the common first dimension of the inputs, which each output has or
    leaves open. 0 = all tensors leave it open. None = there is no such dimension, so the model cannot batch."""
    # The first dimension of each tensor; None = a scalar. A tensor of unknown rank may have any first dimension.
    inputs, outputs = (
        ["" if tensor.dims is None else tensor.dims[0] if tensor.dims else None for tensor in tensors]
        for tensors in (graph.inputs, graph.outputs)
    )
    if not inputs or None in inputs:
        return None
    if all(isinstance(lead, str) for lead in inputs):
        return 0 if all(isinstance(lead, str) for lead in outputs) else None
    baked = inputs[0]
    fits = set(inputs) == {baked} and all(isinstance(lead, str) or lead == baked for lead in outputs)
    return baked if fits and isinstance(baked, int) else None


def _gives_first_dimension(given: Mapping[str, Shape], inputs: Sequence[GraphTensor]) -> bool:
    """Return whether the parameter `input_shapes` has a number for every dimension of an input, so that the first one
    is not the batch."""
    return any(len(given.get(tensor.name, ())) == len(tensor.dims) for tensor in inputs if tensor.dims)


def _input_shapes(
    config: ModelConfig, given: Mapping[str, Shape], inputs: Sequence[GraphTensor], batches: bool
) -> dict[str, Shape]:
    """Return the size of every dimension of each input, without the batch dimension; 0 = unknown. Open dimensions of
    one name get one size. `given`: the parameter `input_shapes`."""

    own = {tensor.name: tensor.dims[1:] if batches and tensor.dims is not None else tensor.dims for tensor in inputs}
    for name in given:
        if name not in own:
            raise wrong(config, f"'input_shapes' names '{name}', but the model's inputs are {', '.join(own)}")
    configured = {entry.name: entry.model_dims for entry in config.inputs}
    known: dict[str, Shape] = {}
    numbers: dict[str, int] = {}
    for name, dims in own.items():
        wanted = given.get(name, configured.get(name))
        if dims is None and wanted is None:
            raise wrong(
                config,
                f"input '{name}' has no shape in the model file; give it one: parameter 'input_shapes'"
                f' "{name}: 3x224x224"',
            )
        file_dims: Dims = ("",) * len(wanted or ()) if dims is None else dims
        fits = wanted is not None and len(wanted) == len(file_dims)
        if name in given and not (fits and all(map(_may_be, file_dims, given[name]))):
            without = " (without the batch dimension)" if batches else ""
            raise wrong(
                config,
                f"'input_shapes' gives input '{name}' {_dims_text(given[name])}, but the model has"
                f" {_dims_text(file_dims)}{without}; only dimensions that it leaves open can be chosen",
            )
        # The server's completion reports a configuration that contradicts the model.
        sizes = wanted if wanted is not None and fits else (0,) * len(file_dims)
        pairs = zip(file_dims, sizes, strict=True)
        known[name] = tuple(dim if isinstance(dim, int) else max(size, 0) for dim, size in pairs)
        for symbol, number in zip(file_dims, known[name], strict=True):
            if isinstance(symbol, str) and symbol and number and numbers.setdefault(symbol, number) != number:
                raise wrong(
                    config,
                    f"dimension '{symbol}' is {numbers[symbol]} in one input and {number} in '{name}'; make"
                    " 'input_shapes' agree",
                )
    shapes = {}
    for name, sizes in known.items():
        dims = own[name] or ("",) * len(sizes)
        shapes[name] = tuple(size or numbers.get(str(dim), 0) for dim, size in zip(dims, sizes, strict=True))
    return shapes


def _check_numbers(
    config: ModelConfig,
    graph: ModelGraph,
    shapes: Mapping[str, Shape],
    batches: bool,
    no_rows: str,
    no_batch: str,
    source: ProgramSource | None,
) -> None:
    """Raise SizesMissing if a dimension has no number. `no_batch`: why there is no batch dimension, for the error.
    `source`: of a model whose dimensions may be padded; None = they may not."""
    unknown = {
        name: tuple(place for place, size in enumerate(shape, batches) if not size) for name, shape in shapes.items()
    }
    name = next((name for name, places in unknown.items() if places), None)
    if name is None:
        return
    own = {tensor.name: (tensor.dims or ())[batches:] for tensor in graph.inputs}[name]
    axis = unknown[name][0]
    named = f" ('{own[axis - batches]}')" if own and own[axis - batches] else ""
    example = "x".join(str(dim) if isinstance(dim, int) else "?" for dim in own)
    wanted, if_batch = None, "; if it is the batch, set max_batch_size instead"
    if source is not None and (padding := wanted_padding(config, graph, no_rows, unknown)).dimensions:
        wanted = WantedSizes(source, padding, _open_shapes(shapes), batches)
    raise SizesMissing(
        f"model '{config.name}': dimension {axis}{named} of input '{name}' is left open by the model, and MIGraphX"
        " compiles fixed shapes only",
        f"give it a number in the configuration's dims or in parameter 'input_shapes' \"{name}: {example}\""
        + ("" if axis else f"; it is not a batch: {no_batch}" if no_batch else if_batch),
        wanted,
    )


def _open_shapes(shapes: Mapping[str, Shape]) -> Mapping[str, Shape]:
    """Return the shapes with -1 for unknown sizes."""
    return {name: tuple(size or -1 for size in shape) for name, shape in shapes.items()}


def _may_be(dim: int | str, number: int) -> bool:
    return isinstance(dim, str) or dim == number


def _dims_text(dims: Dims) -> str:
    return "[" + ", ".join(str(dim) or "?" for dim in dims) + "]"
