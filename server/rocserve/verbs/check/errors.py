"""Compares an engine's outputs with the reference's, output by output, by the rules of the load check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rocserve.load_check.reference import Case, ReferenceVerdict, compare
from rocserve.load_check.tensors import Array, Feed, Run


@dataclass(frozen=True, slots=True)
class OutputError:
    """How far an output is from the reference's, in the case in which it is the farthest."""

    output: str
    verdict: ReferenceVerdict
    noise: float
    """How far the reference's own answer moves when the inputs move in their last place."""
    absolute: float
    """The largest difference in the case of the verdict."""


def output_errors(cases: Sequence[Case], candidate: Run, precision: str) -> Sequence[OutputError]:
    """Run the candidate on each case once, and compare each output of the reference."""
    answers: dict[int, Feed | Exception] = {}
    """By the feed's identity: arrays cannot be keys."""
    for case in cases:
        try:
            answers[id(case.feed)] = candidate(case.feed)
        except Exception as error:
            # Each engine raises its own exceptions.
            answers[id(case.feed)] = error

    def answered(feed: Feed) -> Feed:
        answer = answers[id(feed)]
        if isinstance(answer, Exception):
            raise answer
        return answer

    names = dict.fromkeys(name for case in cases for name in case.outputs)
    found = []
    for name in names:
        own = [replace(case, outputs={name: case.outputs[name]}) for case in cases if name in case.outputs]
        verdict = compare(own, answered, precision)
        worst = next((case for case in own if case.name == verdict.case), own[0])
        noise = worst.noise.get(name, 0.0)
        answer = answers[id(worst.feed)]
        absolute = np.inf
        if not isinstance(answer, Exception) and name in answer:
            absolute = largest_distance(worst.outputs[name], answer[name])
        found.append(OutputError(name, verdict, noise, absolute))
    return found


def largest_distance(one: Array, other: Array) -> float:
    """Return the largest absolute difference; inf for other shapes, or if only one side has a NaN or an infinity."""
    distances = distances_of(one, other)
    return np.inf if distances is None else float(distances.max(initial=0.0))


def distances_of(one: Array, other: Array) -> Array | None:
    """Return the absolute difference of each value, inf where only one side is finite; 1 for unequal texts. None if the
    shapes differ."""
    if one.shape != other.shape:
        return None
    if one.dtype.kind not in "biuf" or other.dtype.kind not in "biuf":
        return np.array([x != y for x, y in zip(one.flat, other.flat, strict=True)], np.float64).reshape(one.shape)
    x, y = one.astype(np.float64), other.astype(np.float64)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        return np.where(same, 0.0, np.nan_to_num(np.abs(x - y), nan=np.inf, posinf=np.inf))
