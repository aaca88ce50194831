"""Plans default sizes of open dimensions without written sizes, and the batch sizes that go with them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rocserve.backends.migraphx.compiling.bucket_programs import MOST_PROGRAMS, graph_signature
from rocserve.backends.migraphx.compiling.graph import ModelGraph
from rocserve.backends.migraphx.compiling.recipe import ProgramSource
from rocserve.backends.written_sizes import SIZES, half_steps, open_dimensions, padding_values, text_inputs
from rocserve.core.errors import ServeError, StatusCode, invalid_argument
from rocserve.core.model_config import ModelConfig
from rocserve.core.padding import NO_PADDING, Padding

Sizes = tuple[int, ...]

USUAL = 512
"""The largest size if the file gives none: the usual limit of text encoders."""
MOST = 2048
"""The largest size that is taken from a file. The first program has it, and attention's memory grows with its square;
users who know their requests can write larger sizes."""


@dataclass(frozen=True, slots=True)
class WantedSizes:
    """Dimensions without a number, and sizes that they get if a check allows it."""

    source: ProgramSource
    padding: Padding
    shapes: Mapping[str, Sizes]
    """Input -> sizes, -1 where it is padded, without the rows."""
    has_rows: bool


class SizesMissing(ServeError):
    """Inputs have dimensions without a number."""

    def __init__(self, fault: str, advice: str, wanted: WantedSizes | None) -> None:
        """`wanted`: what a check may allow in the place of numbers; None = nothing."""
        super().__init__(StatusCode.INVALID_ARGUMENT, f"{fault}: {advice}")
        self._fault = fault
        self._advice = advice
        self.wanted = wanted

    def because(self, reason: str) -> ServeError:
        """Return the error that also says why the dimensions are not padded."""
        return invalid_argument(f"{self._fault}; {reason}; {self._advice}")


def wanted_padding(
    config: ModelConfig, graph: ModelGraph, no_rows: str, unknown: Mapping[str, Sequence[int]]
) -> Padding:
    """Return sizes for the dimensions without a number; none if one of them cannot be padded. `no_rows`: as
    `graph_signature`. `unknown`: input -> places of such dimensions. The first dimension of a tensor is left to its
    clients: it may count rows."""
    if config.parameters.get(SIZES, "").strip():
        return NO_PADDING
    signature = graph_signature(graph, no_rows)
    found = [
        one
        for one in open_dimensions(config, signature)
        if all({*places} <= {*unknown.get(name, ())} for name, places in one.inputs.items())
    ]
    covered = {(name, place) for one in found for name, places in one.inputs.items() for place in places}
    left = {(name, place) for name, places in unknown.items() for place in places}
    if covered != left or not all(place for _, place in left) or text_inputs(signature) & {name for name, _ in left}:
        return NO_PADDING
    padded = tuple(replace(one, sizes=half_steps(MOST)) for one in found)
    return Padding(padded, padding_values(config, signature, padded))


def fewer_sizes(batches: Sizes, dimensions: Sequence[Sizes], kept: Sizes) -> Iterator[tuple[Sizes, Sequence[Sizes]]]:
    """Yield these sizes of batches and of dimensions, and then fewer and fewer: each step drops every second size, of
    the dimensions and of the batches in turn. The largest stay, as do the batch sizes in `kept`."""
    yield batches, dimensions
    for step in itertools.count():
        before = batches, dimensions
        if step % 2:
            batches = tuple(sorted({*_every_second(batches), *kept}))
        else:
            dimensions = [*map(_every_second, dimensions)]
        if (batches, dimensions) != before:
            yield batches, dimensions
        elif all(len(sizes) == 1 for sizes in dimensions) and {*_every_second(batches), *kept} == {*batches}:
            return


def _every_second(sizes: Sizes) -> Sizes:
    return sizes[::-2][::-1]


def within_limit(padding: Padding, batches: Sizes, kept: Sizes) -> tuple[Padding, Sizes]:
    """Return sizes of dimensions and of batches within the limit of programs."""
    fewer = fewer_sizes(batches, [one.sizes for one in padding.dimensions], kept)
    for rows, sizes in fewer:
        if math.prod(map(len, (rows, *sizes))) <= MOST_PROGRAMS:
            break
    return with_sizes(padding, sizes), rows


def with_sizes(padding: Padding, sizes: Sequence[Sizes]) -> Padding:
    dimensions = zip(padding.dimensions, sizes, strict=True)
    return replace(padding, dimensions=tuple(replace(one, sizes=own) for one, own in dimensions))
