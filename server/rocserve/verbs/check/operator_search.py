"""Finds the first operator of a graph whose results differ, by comparing cuts of the graph.

The search bisects: it cuts the graph after half of its operators; if the tensors at the cut are equal, the fault is
after the cut, else before it; and so on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rocserve.core.errors import unavailable
from rocserve.load_check.tensors import Array
from rocserve.verbs.check.errors import distances_of
from rocserve.verbs.check.graph_cuts import CutGraph, title


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a tensor, by both engines."""

    index: tuple[int, ...]
    expected: str
    actual: str


@dataclass(frozen=True, slots=True)
class TensorFinding:
    """A tensor that the engines compute differently."""

    name: str
    expected_shape: tuple[int, ...]
    actual_shape: tuple[int, ...]
    difference: float
    """Relative to the tensor's largest value."""
    case: str
    """What the inputs were like: plain, large, ..."""
    values: Sequence[Value]
    """Up to three, the farthest apart first; empty if the shapes differ."""


@dataclass(frozen=True, slots=True)
class OperatorFinding:
    """The first operator whose results differ, although all that it takes is equal."""

    operator: str
    number: int
    """Its place among the graph's operators, from 1."""
    operators: int
    """How many the graph has."""
    tensors: Sequence[TensorFinding] = ()
    failure: str = ""
    """Why the engine cannot load or run the graph up to here; "" = it can."""


@dataclass(frozen=True, slots=True)
class CutResult:
    """The engines' results for the graph's first operators."""

    tensors: Sequence[TensorFinding] = ()
    """Those that differ."""
    failure: str = ""

    @property
    def is_equal(self) -> bool:
        return not self.tensors and not self.failure


async def first_difference(
    graph: CutGraph, examine: Callable[[int], Awaitable[CutResult | None]]
) -> OperatorFinding | None:
    """Return the first operator that differs; None = the whole graph does not. `examine` compares the first so many
    operators; None = the reference cannot run this cut."""
    cuts = [0, *graph.cuts]
    low, high = 0, len(cuts) - 1
    found = await examine(cuts[high])
    if found is None:
        raise unavailable("the reference cannot run the graph with fixed sizes")
    if found.is_equal:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        result = await examine(cuts[middle])
        if result is None:
            del cuts[middle]
            high -= 1
        elif result.is_equal:
            low = middle
        else:
            high, found = middle, result
    differing = {tensor.name for tensor in found.tensors}
    candidates = range(cuts[low], cuts[high])
    # Between two cuts lies one operator, or a few that hand on what is not a tensor.
    number = next((one for one in candidates if differing.intersection(graph.operators[one].output)), cuts[high] - 1)
    operator = graph.operators[number]
    tensors = [one for one in found.tensors if one.name in operator.output] or found.tensors
    return OperatorFinding(title(operator), number + 1, len(graph.operators), tensors, found.failure)


def farthest(expected: Array, actual: Array) -> Sequence[Value]:
    """Return up to three values that are the farthest apart, the farthest first; none if the shapes differ."""
    distances = distances_of(expected, actual)
    if distances is None:
        return ()
    places = np.argsort(-distances.ravel(), kind="stable")[:3]
    return [
        Value(
            tuple(int(index) for index in np.unravel_index(place, expected.shape)),
            _shown(expected.flat[place]),
            _shown(actual.flat[place]),
        )
        for place in places
        if distances.flat[place]
    ]


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, (float, np.floating)) else str(value)
