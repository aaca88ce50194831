"""Checks a program whose batch size is not the one that its file has baked in.

MIGraphX takes any batch size for any graph. Whether the graph means the same then, it cannot tell: a Reshape to a
constant shape or a sum over the batch gives other numbers, or none. Rows of random input tell: each must give what it
gives in the file's own batch, whatever the rows beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rocserve.backends.migraphx.binding.interface import Array, Program
from rocserve.backends.migraphx.configuration.options import Precision
from rocserve.backends.migraphx.jobs.samples import Samples, largest_shape
from rocserve.backends.migraphx.planning.recipe import ProgramRecipe
from rocserve.core.errors import ServeError, invalid_argument

_TOLERANCES: Mapping[Precision, float] = {
    Precision.FP32: 0.01,
    Precision.FP16: 0.05,
    Precision.BF16: 0.25,
    Precision.INT8: 0.25,
    Precision.FP8: 0.4,
}
"""The `distance` up to which results of the same rows in batches of other sizes count as equal. Generous: kernels for
other sizes round otherwise, while rows that are mixed up are about 1 apart."""
_NOTHING = 1e-6
"""Per element; errors of what should be 0 are measured against it."""
_MOST_ROWS = 8
_SEED = 1


def refusal(model_name: str, recipe: ProgramRecipe, own_size: int, reason: str) -> ServeError:
    """For a graph that cannot be had in another batch size."""
    return invalid_argument(
        f"model '{model_name}' cannot be had at batch size {recipe.batch_size or recipe.largest_batch}: its graph holds"
        f" its own batch size, {own_size}, in it (for example a Reshape to a constant shape, or a sum over the batch):"
        f" {reason}; export it with a batch dimension that is left open, or set max_batch_size to {own_size} and"
        f" parameter 'batch_sizes' to \"{own_size}\""
    )


def row_fault(program: Program, own: Program, own_size: int, names: Sequence[str], precision: Precision) -> str:
    """Which output is another one than in the file's own batch size, and how; "" where none is.

    Args:
        own: the program at the file's own batch size, `own_size`.
        names: of the outputs, in the program's order.
    """
    samples = Samples(_SEED)
    inputs = samples.inputs(program.parameters)
    found = program.run(inputs)
    size = max((largest_shape(tensor)[0] for tensor in program.parameters.values()), default=0)
    for name, output in zip(names, found, strict=True):
        if output.shape[:1] != (size,):
            return f"output '{name}' has shape {list(output.shape)}, whose first dimension should be {size}"
    worst = dict.fromkeys(names, 0.0)
    # All rows of a small batch, else some from the first to the last.
    for row in sorted({round(place) for place in np.linspace(0, size - 1, min(size, _MOST_ROWS))}):
        # The rows beside it are others than in the program's batch, so that nothing may depend on them.
        alone = samples.inputs(own.parameters, own_size)
        for name in alone.keys() & inputs.keys():
            alone[name][0] = inputs[name][row]
        for name, tensor, output, expected in zip(names, program.outputs, found, own.run(alone), strict=True):
            worst[name] = max(worst[name], distance(output[row], expected[0], tensor.datatype))
    limit = _TOLERANCES[precision]
    for name, far in worst.items():
        if not far <= limit:
            return (
                f"rows of random input give another output '{name}' than in a batch of {own_size} (relative error"
                f" {far:.3g}, at most {limit:g} is rounding)"
            )
    return ""


def distance(found: Array, expected: Array, datatype: str) -> float:
    """Of floats the length of the difference against that of `expected`; of others the share that differs.

    `datatype` is MIGraphX's name. Infinite where shapes differ, or not the same elements are numbers.
    """
    if found.shape != expected.shape:
        return float("inf")
    if found.size == 0 or found.tobytes() == expected.tobytes():
        return 0.0
    if datatype == "bf16":
        # As their bits.
        found, expected = ((values.astype(np.uint32) << 16).view(np.float32) for values in (found, expected))
    if not np.issubdtype(expected.dtype, np.floating):
        return float(np.mean(found != expected))
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=True) or not np.isfinite(found[finite]).all():
        return float("inf")
    error = np.linalg.norm(found[finite] - expected[finite])
    return float(error / (np.linalg.norm(expected[finite]) + _NOTHING * np.sqrt(finite.sum())))
