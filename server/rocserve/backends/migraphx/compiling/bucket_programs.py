"""Plans the programs of a model whose open dimensions are padded (parameter `sizes`): one for each batch size and each
combination of sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rocserve.backends.migraphx.compiling.graph import GraphTensor, ModelGraph
from rocserve.backends.migraphx.options import CompileOptions
from rocserve.backends.written_sizes import SIZES, Groups, written_padding
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import ModelConfig
from rocserve.core.padding import NO_PADDING, Lengths, Padding
from rocserve.core.requests import Signature, TensorSpec

MOST_PROGRAMS = 128
"""Each takes seconds to hours to compile, is warmed up, and has its own copy of the weights in memory."""


def planned_padding(
    config: ModelConfig,
    options: CompileOptions,
    given: Mapping[str, tuple[int, ...]],
    graph: ModelGraph,
    rows: str,
    groups: Groups | None = None,
) -> Padding:
    """Return the padding of a graph's open dimensions, by the parameters. `given`: the parameter `input_shapes`.
    `rows`: why the first dimension does not count the rows of a batch; "" = it does. `groups`: as of written_padding.
    Raises ServeError (INVALID_ARGUMENT)."""
    if not config.parameters.get(SIZES, "").strip():
        # Values without sizes are for default sizes.
        return NO_PADDING
    padding = written_padding(config, graph_signature(graph, rows), groups)
    if options.precision.needs_calibration:
        raise invalid_argument(
            f"model '{config.name}': parameter 'sizes' does not work with precision"
            f' "{options.precision.value}", whose samples have one shape; remove one of them'
        )
    for dimension in padding.dimensions:
        for name in given.keys() & dimension.inputs.keys():
            raise invalid_argument(
                f"model '{config.name}': parameter 'sizes' gives dimension '{dimension.label}' several sizes, and"
                f" 'input_shapes' gives input '{name}' one shape; leave '{name}' out of 'input_shapes', and write its"
                " other open dimensions into the configuration's dims"
            )
    return padding


def graph_signature(graph: ModelGraph, no_rows: str) -> Signature:
    """Return the signature of a model's file. `no_rows`: as `rows` of `planned_padding`."""
    inputs, outputs = (tuple(map(_spec, tensors)) for tensors in (graph.inputs, graph.outputs))
    return Signature(inputs, outputs, supports_batching=not no_rows, dependent_rows=no_rows)


def _spec(tensor: GraphTensor) -> TensorSpec:
    shape, dims = tensor.shape, tensor.dims or ()
    # TensorFlow's outputs have no datatype; nothing here needs one.
    return TensorSpec(
        tensor.name,
        tensor.datatype or DataType.FP32,
        (-1,) if shape is None else shape,
        any_rank=shape is None,
        dimension_names=tuple(dim if isinstance(dim, str) else "" for dim in dims),
    )


def at_largest(inputs: Sequence[GraphTensor], padding: Padding) -> tuple[GraphTensor, ...]:
    """Return the inputs with the largest size in each place that is padded."""
    sizes = {
        (name, place): dimension.sizes[-1]
        for dimension in padding.dimensions
        for name, places in dimension.inputs.items()
        for place in places
    }
    return tuple(
        replace(one, dims=tuple(sizes.get((one.name, place), dim) for place, dim in enumerate(one.dims or ())))
        if one.dims
        else one
        for one in inputs
    )


def programs(padding: Padding, batch_sizes: Sequence[int], model_name: str) -> Iterator[tuple[int, Lengths]]:
    """Yield each program's batch size and sizes. The first has the smallest batch and the largest sizes, so that it
    takes every request; the others follow from the smallest on. Raises ServeError (INVALID_ARGUMENT) if there are too
    many."""
    by_dimension = [dimension.sizes for dimension in padding.dimensions]
    count = math.prod(map(len, (batch_sizes, *by_dimension)))
    if count > MOST_PROGRAMS:
        factors = [f"{len(batch_sizes)} batch sizes"] if batch_sizes != (0,) else []
        factors += [f"{len(one.sizes)} sizes of '{one.label}'" for one in padding.dimensions]
        raise invalid_argument(
            f"model '{model_name}' would have {count} programs ({' x '.join(factors)}), and MIGraphX compiles at most"
            f" {MOST_PROGRAMS} for a model; name fewer in parameter 'batch_sizes' or 'sizes'"
        )
    first = (batch_sizes[0], tuple(sizes[-1] for sizes in by_dimension))
    yield first
    others = ((rows, sizes) for rows in batch_sizes for sizes in itertools.product(*by_dimension))
    yield from sorted(
        (one for one in others if one != first), key=lambda one: (max(one[0], 1) * math.prod(one[1]), one)
    )
