"""Checks a program whose batch size is not the one that its file has baked in.

MIGraphX takes any batch size for any graph. Whether the graph means the same then, it cannot tell: a Reshape to a
constant shape or a sum over the batch gives other numbers, or none. Rows of random input tell: each must give what it
gives in the file's own batch, whatever the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rocserve.backends.migraphx.binding.interface import Program
from rocserve.backends.migraphx.configuration.options import Precision
from rocserve.backends.migraphx.jobs.comparison import TOLERANCES, distance
from rocserve.backends.migraphx.jobs.samples import Samples, largest_shape
from rocserve.core.errors import ServeError, invalid_argument

_MOST_ROWS = 8
_SEED = 1


class Refusal:
    """Words for a graph that cannot be had in another batch size."""

    def __init__(self, model_name: str, size: int, own_size: int) -> None:
        self._model_name = model_name
        self._size = size
        self._own_size = own_size

    def error(self, reason: str) -> ServeError:
        return invalid_argument(
            f"model '{self._model_name}' cannot be had at batch size {self._size}: its graph holds its own batch size,"
            f" {self._own_size}, in it (for example a Reshape to a constant shape, or a sum over the batch): {reason};"
            f" export it with a batch dimension that is left open, or set max_batch_size to {self._own_size} and"
            f" parameter 'batch_sizes' to \"{self._own_size}\""
        )


def check_rows(
    program: Program, own: Program, own_size: int, names: Sequence[str], precision: Precision, refusal: Refusal
) -> None:
    """Raises: ServeError: INVALID_ARGUMENT, an output is another one than in the file's own batch size.

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
            raise refusal.error(
                f"output '{name}' has shape {list(output.shape)}, whose first dimension should be {size}"
            )
    worst = dict.fromkeys(names, 0.0)
    for row in _rows(size):
        # The rows beside it are others than in the program's batch, so that nothing may depend on them.
        alone = samples.inputs(own.parameters, own_size)
        for name in alone.keys() & inputs.keys():
            alone[name][0] = inputs[name][row]
        for name, tensor, output, expected in zip(names, program.outputs, found, own.run(alone), strict=True):
            worst[name] = max(worst[name], distance(output[row], expected[0], tensor.datatype))
    limit = TOLERANCES[precision]
    for name, far in worst.items():
        if not far <= limit:
            raise refusal.error(
                f"rows of random input give another output '{name}' than in a batch of {own_size} (relative error"
                f" {far:.3g}, at most {limit:g} is rounding)"
            )


def _rows(size: int) -> list[int]:
    """Those that are looked at: all of a small batch, else some from the first to the last."""
    return sorted({round(place) for place in np.linspace(0, size - 1, min(size, _MOST_ROWS))})
